"""What decides whether a run passed: answers, histories, and resource growth."""
