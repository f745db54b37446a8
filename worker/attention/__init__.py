"""Attention over the paged KV cache: one interface, a back end for each way to compute it."""
