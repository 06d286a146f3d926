"""Observability: logs, metrics, and one record of each client request."""
