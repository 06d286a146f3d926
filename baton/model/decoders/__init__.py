"""Models over one page pool: the stock decoder, the lean decoder, and CUDA graphs of decode steps."""
