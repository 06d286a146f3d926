"""`baton top`: the cluster in a terminal, live, from any router's `/v1/cluster`."""
