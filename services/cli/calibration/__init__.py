"""The workers of `baton up` on a small machine, chosen by the step times of its model."""
