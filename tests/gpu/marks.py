"""Marks of tests that need a GPU, with the reason for skipping them elsewhere."""

from __future__ import annotations

import importlib.util

import pytest
import torch

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
needs_flashinfer = [
    *needs_gpu,
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"),
]
