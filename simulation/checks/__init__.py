"""What must hold during a run and at its end."""
