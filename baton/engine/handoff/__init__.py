"""Exports and imports of KV pages, as far as both engines have them: states, commands and events."""
