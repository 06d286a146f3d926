"""From logits to tokens: penalties, filters, and sampling in torch and in native kernels."""
