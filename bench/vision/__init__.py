"""What images cost: time to the first token, gaps of text streams beside them, and the router's work."""
