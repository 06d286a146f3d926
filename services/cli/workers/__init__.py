"""Commands that find one worker in the state store and call it."""
