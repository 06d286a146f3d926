"""Runtime of a simulated cluster: virtual time, processes, a network, page reads and a trace."""
