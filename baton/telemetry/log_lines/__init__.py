"""Log lines that come with every request."""
