"""HTTP around the endpoints: socket limits, middleware, API keys, bodies, disconnects, errors, SSE framing."""
