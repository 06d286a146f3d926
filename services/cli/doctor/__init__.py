"""`baton doctor`: checks of this machine, of Redis and of the registered workers, each with a hint for the fix."""
