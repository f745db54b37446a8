import torch

from worker.kernels.overlap import launch_options, overlaps


def test_only_where_the_hardware_has_it():
    assert not overlaps(torch.device("cpu"))
    assert launch_options(torch.device("cpu")) == {"PDL": False}
