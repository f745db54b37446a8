"""The pieces models are made of; each receives what it uses."""
