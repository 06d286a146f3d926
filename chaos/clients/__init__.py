"""Clients of the cluster, and the requests they send."""
