"""Plain sockets, of page connections and of sessions."""
