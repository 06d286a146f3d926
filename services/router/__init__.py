"""The router: OpenAI HTTP in front, admission and placement inside, workers behind. The only room with text."""
