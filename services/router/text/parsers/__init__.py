"""Parsers of what models write beside text: tool calls. One incremental parser a format; a whole answer is its fold."""
