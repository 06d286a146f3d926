"""The upper half of the router: OpenAI's HTTP. A body becomes a `Valid*` call, a call's tokens become an answer.

routes -> body -> validation (fields, parameters, prompts) -> calls -> relay -> delivery (chat, completions, sse)
"""
