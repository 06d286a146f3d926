"""The version of the conversation between Baton's processes; raised when old and new cannot understand each other."""

PROTOCOL_VERSION = 1
