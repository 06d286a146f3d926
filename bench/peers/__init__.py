"""Other servers on the same cores in the same run: how they are installed, given a model, started and measured."""
