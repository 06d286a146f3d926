"""Matrix products with weights that stay: plain, packed for native kernels or oneDNN, quantised to int8."""
