"""Fetches images over https from hosts that the operator has listed. Off by default."""
