"""What a simulated cluster runs on: virtual time, processes, a network, page reads and a trace."""
