"""`baton bench`: a load generator for any OpenAI server, its definitions, its run files and their table.

`workload` and `results` are pure: no clock and no socket. `client` does the I/O, `load_generator` the timing, and
`commands` combines them for `baton.services.cli.main`.
"""
