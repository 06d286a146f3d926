"""Files of images on their way to prefill workers: their memory here, and their upload."""
