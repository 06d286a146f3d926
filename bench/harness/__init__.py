"""Measurement harness: rotations, probes, ceilings, random models and running systems. Imports no experiment."""
