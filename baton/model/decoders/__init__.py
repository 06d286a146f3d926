"""Models over one page pool: the stock decoder, the lean decoder, CUDA graphs of its decode steps."""
