"""The `baton` command: `serve` runs one service, `up` a whole system on this machine."""
