"""HTTP around the endpoints: limits on the socket, middleware, API keys, bodies, disconnects, errors, SSE framing."""
