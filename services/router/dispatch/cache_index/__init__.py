"""What workers have cached, by their own events: the index and the readers that fill it."""
