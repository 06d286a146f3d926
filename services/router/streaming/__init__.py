"""The choices of one request as one stream: run, merge, number and send their events."""
