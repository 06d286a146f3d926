"""Dequantises checkpoints while their tensors are read. One module a method; `methods.py` lists them."""
