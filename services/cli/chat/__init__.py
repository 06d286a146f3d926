"""`baton chat`: a conversation in the terminal, over any router's HTTP interface."""
