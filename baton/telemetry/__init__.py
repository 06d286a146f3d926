"""What Baton says about itself: logs, metrics, and the timeline of a request that the latency metrics come from."""
