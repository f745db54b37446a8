"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

In a chain of short kernels that hides each one's launch and its first loads. A kernel launched so

- calls `gdc_launch_dependents` first, so that the next may start as soon as there is room;
- may read what no kernel of the chain writes, such as weights;
- calls `gdc_wait` in every program before it touches anything else: then all before it have ended.

A kernel that is launched otherwise, as torch's are, waits for all before it, and ends a chain.
"""

import functools

import torch

HOPPER = (9, 0)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return whether kernels on a device can be launched so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the launch arguments of a kernel that takes PDL: whether it is launched so."""
    if overlaps(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
