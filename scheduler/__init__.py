"""Decides what each step computes. Knows integers only: no text, no tensors, no torch."""
