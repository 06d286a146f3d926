"""Moving page bytes from prefill's pool into decode's: one interface, `nixl` and `stream` behind it."""
