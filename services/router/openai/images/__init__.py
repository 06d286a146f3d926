"""Images in the messages of a chat."""
