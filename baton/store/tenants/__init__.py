"""Rates and service of tenants, shared by all routers."""
