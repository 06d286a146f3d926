"""The file tier of an engine: the part that joins policy, prefix cache and files."""
