"""Native CPU kernels: C++ without torch, one optional library for each instruction set level."""
