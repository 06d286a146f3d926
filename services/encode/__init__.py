"""The encode worker: images in, embeddings out. It has a vision tower, and no pages."""
