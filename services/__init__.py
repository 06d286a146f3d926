"""The three services and the `baton` command; the services never import each other."""
