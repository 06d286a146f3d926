"""Attention over pages: one hook into the stock modelling code, and backends that do the arithmetic."""
