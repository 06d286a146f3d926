"""The `baton` command: `serve` runs one service, `up` runs a whole system on this machine."""
