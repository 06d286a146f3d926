"""Native CPU kernels: C++ without torch, one library a level of instructions, optional everywhere."""
