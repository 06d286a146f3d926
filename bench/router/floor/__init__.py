"""The least that a short request costs a router in Python, beside the real router."""
