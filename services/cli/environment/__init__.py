"""Commands that show what a process would see: effective settings, a report for a bug, and shell completion."""
