"""Bytes of the file tier: segments of page-sized slots, their index, and the threads that read and write them."""
