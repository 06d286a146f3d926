"""The three services and the `baton` command; the services never import each other."""

if __name__ != "baton.services":  # the folder is on the path of a checkout, too: modules would exist twice
    raise ImportError("the package is called baton.services")
