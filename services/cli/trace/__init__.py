"""`baton trace`: one request's waterfall, or a list of the latest or slowest ones."""
