"""Prefill's part of an attempt, and when it may begin before decode has reserved."""
