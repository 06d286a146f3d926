"""Faults on real processes: a cluster behind fault proxies, a matrix of phases and faults, a soak, and their checks.

Development only: `python -m chaos`. No module of the product imports it.
"""
