"""Models that draft: their keys and values lie in the draft layers of the target's pages."""
