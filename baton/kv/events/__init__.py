"""What enters and leaves a prefix cache, as numbered events: their source, the log of a worker, and their wire form."""
