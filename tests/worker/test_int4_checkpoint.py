"""How AWQ's and GPTQ's words are read; whole models are test_quantized_checkpoint's."""

import pytest
import torch

from protocol.errors import ModelFileError
from tests.worker.quantized_models import Quantize, awq, gptq
from worker.int4_checkpoint import Int4Part, int4_part, rank_group, read_values
from worker.quantization_config import Int4Checkpoint, Unquantized
from worker.weights import Weight

CPU = torch.device("cpu")


def form(*, is_awq: bool = False, group_size: int = 32, has_order: bool = False) -> Int4Checkpoint:
    return Int4Checkpoint(
        is_awq=is_awq,
        group_size=group_size,
        has_order=has_order,
        zero_offset=0 if is_awq else 1,
        unquantized=Unquantized(),
    )


def columns(start: int, size: int, whole: int) -> Weight:
    """Return 16 outputs of some of the inputs."""
    target = torch.empty(16, size, device="meta")
    return Weight(name="down.weight", target=target, whole_size=whole, dim=1, start=start)


def filled(
    form: Int4Checkpoint, weight: Weight, quantize: Quantize
) -> tuple[Int4Part, torch.Tensor]:
    """Return the tensors with values, and this rank's part of what they mean."""
    torch.manual_seed(0)
    tensors, meant = quantize("down", torch.randn(weight.shape))
    part = int4_part(form, weight)
    for each in part.weights:
        each.fill(tensors[each.name.removeprefix("down.")])
    return part, meant[:, weight.start : weight.end]


@pytest.mark.parametrize("is_awq", [True, False])
@pytest.mark.parametrize(
    ("start", "size", "group"), [(0, 192, 32), (96, 96, 32), (48, 48, 16), (64, 64, 32)]
)
def test_a_ranks_values(is_awq: bool, start: int, size: int, group: int):
    weight = columns(start, size, 192)
    quantize = awq(32) if is_awq else gptq(32, is_symmetric=False)
    part, meant = filled(form(is_awq=is_awq), weight, quantize)
    assert rank_group(part) == group
    values = read_values(form(is_awq=is_awq), part, group, CPU)
    assert values.scales.shape == values.zeros.shape == (16, size // group)
    wide = values.codes.float() - values.zeros.repeat_interleave(group, 1)
    wide *= values.scales.float().repeat_interleave(group, 1)
    torch.testing.assert_close(wide, meant)


def test_one_group_for_all_inputs():
    part, _ = filled(form(group_size=-1), columns(48, 48, 192), gptq(-1))
    assert rank_group(part) == 48
    assert part.scales.shape == (1, 16)


def test_groups_too_small_for_a_rank():
    with pytest.raises(ModelFileError, match="groups of 32 inputs come to 8 of this rank's 40"):
        rank_group(int4_part(form(), columns(40, 40, 80)))


def test_words_are_not_divided():
    with pytest.raises(ModelFileError, match="inputs 20 to 40 of 80; 4-bit codes are stored by 8"):
        int4_part(form(), columns(20, 20, 80))


def test_an_order_is_that_of_groups():
    quantize = gptq(32, has_order=True)
    part, meant = filled(form(has_order=True), columns(0, 96, 96), quantize)
    values = read_values(form(has_order=True), part, 32, CPU)
    assert values.order is not None
    wide = values.codes.float() - values.zeros.repeat_interleave(32, 1)
    wide *= values.scales.float().repeat_interleave(32, 1)
    torch.testing.assert_close(wide, meant[:, values.order])
    part.g_idx.target[0] += 1
    with pytest.raises(ModelFileError, match="does not put 32 inputs into each of 3 groups"):
        read_values(form(has_order=True), part, 32, CPU)
