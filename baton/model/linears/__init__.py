"""Matrix products with constant weights: plain, packed for native kernels or oneDNN, quantised to int8."""
