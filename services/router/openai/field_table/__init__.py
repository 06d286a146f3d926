"""The table of request fields: the one source of validation, the OpenAPI document, docs/api.md and the union test.

field -> shapes -> honoured, refused, harmless -> table. Every name that a client may know has a row; a value that would
change the answer is honoured or refused, never ignored.
"""
