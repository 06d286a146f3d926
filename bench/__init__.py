"""Experiments on Baton itself: mock workers, probes, interleaved arms. Run from a checkout, never shipped.

The load generator and everything that computes figures are `baton.services.cli.bench`, which is.
"""
