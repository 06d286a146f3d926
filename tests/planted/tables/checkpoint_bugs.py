"""Planted bugs in the loading of checkpoints; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug as bug

CHECKPOINTS = "right weights"

CHECKPOINT_BUGS = (
    bug(
        CHECKPOINTS, "a leftover scale is dropped", "baton/model/loading/dequantize/plan.py",
        "name.endswith(parts) and name not in consumed", "False",
        "tests/unit/model/dequantize/test_fp8.py",
    ),
    bug(
        CHECKPOINTS, "scales are laid over blocks row by row", "baton/model/loading/dequantize/fp8.py",
        "index = first // block[0]", "index = 0",
        "tests/unit/model/dequantize/test_fp8.py",
    ),
    bug(
        CHECKPOINTS, "float8 without a method is served as plain numbers", "baton/model/loading/stored_weights.py",
        "packed = tensor.dtype not in PLAIN_DTYPES and len(tensor.shape) > 1", "packed = False",
        "tests/unit/model/loading/test_stored_weights.py",
    ),
    bug(
        CHECKPOINTS, "a bias without a place is left out", "baton/model/loading/stored_weights.py",
        "if next(modules[owner].parameters(recurse=False), None) is not None:", "if False:",
        "tests/unit/model/loading/test_stored_weights.py",
    ),
    bug(
        CHECKPOINTS, "zero points of GPTQ's first version are not shifted", "baton/model/loading/dequantize/gptq.py",
        "+ zero_offset) & (2**bits - 1)", ") & (2**bits - 1)",
        "tests/unit/model/dequantize/test_gptq.py",
    ),
    bug(
        CHECKPOINTS, "groups are in order whatever g_idx says", "baton/model/loading/dequantize/gptq.py",
        "    if groups is None:", "    if True:",
        "tests/unit/model/dequantize/test_gptq.py",
    ),
    bug(
        CHECKPOINTS, "outputs of AWQ are in the order of their bits", "baton/model/loading/dequantize/awq.py",
        "FIELD_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)", "FIELD_OF_OUTPUT = (0, 1, 2, 3, 4, 5, 6, 7)",
        "tests/unit/model/dequantize/test_awq.py",
    ),
    bug(
        CHECKPOINTS, "a text model ties its head as it likes", "baton/model/loading/multimodal.py",
        'fields["tie_word_embeddings"] = config.tie_word_embeddings', 'fields.setdefault("tie_word_embeddings", False)',
        "tests/unit/model/loading/test_multimodal.py",
    ),
)  # fmt: skip
