"""The real scheduler under a virtual clock: traces in, latencies out, no model and no GPU."""
