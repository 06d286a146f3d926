"""What `/v1/cluster` shows: workers, links, open and recent requests, and what happened. Read only."""
