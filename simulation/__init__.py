"""Deterministic simulation: the real services on a virtual clock, over a network and processes that fail by seed.

Run by `python -m simulation`, `make sim` and `tests/simulation`. Not shipped. It may import every service; no shipped
module imports it. `docs/testing.md` explains how to read a failing seed.
"""
