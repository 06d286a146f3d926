"""Chat template, tokenizer, detokenizer and stop strings: the only package that knows text. Sees no HTTP or workers."""
