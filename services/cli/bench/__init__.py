"""`baton bench`: a load generator for any OpenAI server, its definitions, its run files and their table.

Pure rooms (arrivals, prompts, traces, objectives, distribution, intervals, summary) know no clock and no socket;
`connection` and `client` do the I/O, `load` the timing, `commands` puts them together for `services.cli.main`.
"""
