"""Computes what it is told, on one tensor-parallel rank."""
