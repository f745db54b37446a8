"""Everything two of Tokenwire's processes must agree on, and nothing else."""
