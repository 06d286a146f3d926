"""Stock Hugging Face models on paged KV: loading, attention, kernels, sampling. Knows no scheduler."""
