"""A stock Hugging Face model on pages: its weights, its attention, its cache and its sampler. Knows no scheduler."""
