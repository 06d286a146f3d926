"""Experiments on page transfer: throughput and digests."""
