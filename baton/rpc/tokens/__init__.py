"""Tokens on the wire: rows of a session, and check numbers of replies."""
