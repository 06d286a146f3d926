"""Exports and imports of KV pages on the wire: links between workers, the Handoff service, its log of announcements."""
