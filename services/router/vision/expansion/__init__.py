"""The tokens that stand for an image in a prompt, by its size alone: one module for each kind of image processor."""
