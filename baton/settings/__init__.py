"""Settings: one frozen model a service, from flags and `BATON_*` variables; no one else reads the environment."""
