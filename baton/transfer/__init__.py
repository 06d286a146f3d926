"""Transfer of page bytes from prefill's pool into decode's, over `nixl` or `stream`."""
