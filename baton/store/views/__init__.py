"""What routers show each other of their requests, while somebody watches the cluster."""
