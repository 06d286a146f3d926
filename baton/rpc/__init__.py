"""How processes talk: generated stubs, translation to the domain, channels, servers and shutdown."""
