"""The supported quantisation methods by their `quant_method`, and the refusal of all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from baton.model.errors import UnsupportedModel
from baton.model.loading.dequantize.awq import read_awq
from baton.model.loading.dequantize.compressed import read_compressed
from baton.model.loading.dequantize.fp8 import read_fp8
from baton.model.loading.dequantize.gptq import read_gptq
from baton.model.loading.dequantize.mxfp4 import read_mxfp4
from baton.model.loading.dequantize.plan import WeightFormat

METHODS: Mapping[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
MAX_NESTING = 4


def weight_format(raw: Mapping[str, Any]) -> WeightFormat | None:
    """The format that a `config.json` names, at the top or in a nested config; None if it names none.

    Raises `UnsupportedModel` for an unknown method, for parameters that are not supported, and for two methods.
    """
    found = list(_configs(raw, MAX_NESTING))
    if not found:
        return None
    if any(config != found[0] for config in found):
        raise UnsupportedModel("config.json has two different quantization configs")
    config = found[0]
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if not isinstance(config, Mapping) or not isinstance(method, str) or method not in METHODS:
        name = f'quant_method "{method}"' if method else "a quantization_config without quant_method"
        raise UnsupportedModel(f"{name} is not supported; supported: {', '.join(sorted(METHODS))}")
    return METHODS[method](config)


def _configs(config: Mapping[str, Any], depth: int) -> Iterator[Any]:
    for key, value in config.items():
        if key in QUANTIZATION_KEYS and value:
            yield value
        elif isinstance(value, Mapping) and depth:
            yield from _configs(value, depth - 1)
