"""What window slots buy and cost: rows of a decode pool, hits of a prefill pool, time of steps."""
