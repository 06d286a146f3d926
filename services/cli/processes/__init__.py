"""Child processes of the CLI: the services of `baton up`, and a local redis-server."""
