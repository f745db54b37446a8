import torch

from worker.tensor_spans import Span, spans, tensor_part
from worker.weights import Weight


def test_spans():
    span = Span(100, 30, 70)
    assert span.coarse(40) == (3, 0, 2)
    assert span.run_of_each(40).tolist() == [0] * 10 + [1] * 30
    assert Span(100, 50, 100).coarse(40) == (3, 1, 3)
    assert Span(100, 50, 100).run_of_each(40).tolist() == [0] * 30 + [1] * 20


def test_a_part_of_a_tensor():
    weight = Weight(name="w", target=torch.empty(6, 4), whole_size=8, dim=1, start=4)
    outputs, inputs = spans(weight)
    assert outputs == (6, 0, 6)
    assert inputs == (8, 4, 8)
    part = tensor_part("t", torch.int32, inputs.coarse(2), outputs)
    assert (part.name, part.shape, part.dim, part.start) == ("t", (4, 6), 0, 2)
    assert part.target.shape == (2, 6)
    assert part.target.dtype == torch.int32
    assert tensor_part("t", torch.int32, outputs).shape == (6,)
