"""OpenAI's protocol: a JSON body becomes a `ValidRequest`, its tokens become response objects. Knows nothing of HTTP.

request_parser -> validation (fields, parameters, prompts) -> valid_request; chat, completions -> schemas
"""
