"""The only room with text: template, tokenizer, detokenizer, stop strings. Knows no HTTP and no workers."""
