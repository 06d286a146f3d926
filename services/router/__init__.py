"""The router: OpenAI HTTP in `api`, text in `text`, workers behind `dispatch`; `generation` is the seam between."""
