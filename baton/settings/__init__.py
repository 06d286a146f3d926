"""Settings: one frozen model a service, from flags and `BATON_*` variables. Only this package reads the environment."""
