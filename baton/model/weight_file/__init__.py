"""Files of ready weights, which the workers of a host map instead of keeping copies. Knows tensors, no layer."""
