"""The router: OpenAI HTTP in front, admission and placement inside, prefill and decode behind. The only room with text."""
