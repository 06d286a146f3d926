"""Page bookkeeping without tensors: geometry, pool, page tables and the prefix cache."""
