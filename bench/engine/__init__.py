"""Experiments on the engine in this process: decode steps, prefill, kernels and quantization."""
