"""Measurements, each a module that prints JSON lines: `python -m benchmarks.NAME`."""
