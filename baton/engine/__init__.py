"""What both engines are made of: batches, chunk cutting, the mailbox, the runner and the engine thread."""
