"""Parts that both engines share: batches, chunk cutting, the mailbox, the runner and the engine thread."""
