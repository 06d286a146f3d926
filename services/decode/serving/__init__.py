"""What a decode worker does for one attempt, whether it came by a call or in a session."""
