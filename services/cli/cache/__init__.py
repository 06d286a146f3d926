"""`baton cache`: what caches on this machine hold, and the removal of what nobody uses."""
