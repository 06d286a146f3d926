"""The simulated processes: a router, a prefill worker, a decode worker and the state store."""
