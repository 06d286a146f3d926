"""Pages without tensors: their geometry, who holds them, and which tokens they are the cache of."""
