"""Version of the protocol between processes; raised by incompatible changes."""

PROTOCOL_VERSION = 1
