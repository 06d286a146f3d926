"""Asks torch and the native kernels what a worker of this environment would run: `python -m` this module.

Runs in a child process, because a library for another CPU can end its process. Prints one line of JSON. The kernels
are loaded and compared with torch exactly as a worker does at its start.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile


def main() -> None:
    """Prints `EngineFacts` as JSON."""
    import torch

    from baton.model.cpu import has_bfloat16_arithmetic
    from baton.model.huge_pages import huge_empty, huge_fraction
    from baton.model.loading.kernel_choice import KernelUse, choose_kernels
    from baton.model.weight_file.format import open_weight_file, write_weight_file

    chosen = choose_kernels(KernelUse.AUTO, "cpu")
    sample = huge_empty((16, 1024, 1024), torch.uint8).zero_()
    file_fraction = None
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        write_weight_file(file.fileno(), [sample], "")
        file_fraction = huge_fraction(open_weight_file(file.fileno()).tensors)
    gpus: list[str] = []
    error = ""
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(f"{properties.name}, {properties.total_memory / 1024**3:.0f} GiB")
    except RuntimeError as cause:
        error = str(cause).splitlines()[0]
    facts = {
        "torch": torch.__version__,
        "level": None if chosen.kernels is None else chosen.kernels.level.value,
        "note": chosen.note,
        "bfloat16": has_bfloat16_arithmetic(),
        "huge_fraction": huge_fraction([sample]),
        "file_huge_fraction": file_fraction,
        "cuda_build": torch.version.cuda,
        "gpus": gpus,
        "gpu_error": error,
    }
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
