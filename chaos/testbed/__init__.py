"""The system under test: real processes, and the proxies between them."""
