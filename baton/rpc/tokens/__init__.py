"""Tokens on the wire: rows of a session, check numbers of replies, and constraints."""
