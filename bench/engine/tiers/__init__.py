"""What tiers below the pool buy."""
