import pytest
import torch

from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.shard import Shard
from worker.weights import Weight, fill_with_dummies, norm_weight, stacked_weights

CPU = torch.device("cpu")


def whole(size: int) -> Shard:
    return Shard(whole=size, start=0, size=size)


def test_a_shard_takes_its_slices():
    whole = torch.arange(24.0).view(6, 4)
    rows = Weight(name="w", target=torch.empty(2, 4), whole_size=6, start=2)
    rows.fill(whole)
    assert rows.shape == (6, 4)
    assert torch.equal(rows.target, whole[2:4])
    columns = Weight(name="w", target=torch.empty(6, 1), whole_size=4, dim=1, start=3)
    columns.fill(whole)
    assert torch.equal(columns.target, whole[:, 3:])


def test_filling_converts():
    weight = Weight(name="w", target=torch.empty(2, dtype=torch.bfloat16))
    weight.fill(torch.tensor([1.0, 2.5], dtype=torch.float64))
    assert weight.target.tolist() == [1.0, 2.5]


@pytest.mark.parametrize("bias", [False, True])
def test_stacked_weights_fill_a_product_from_top_to_bottom(bias: bool):
    linear = Linear(3, 5, bias=bias, dtype=torch.float32, device=CPU)
    weights = list(stacked_weights(linear, {"q": whole(2), "k": whole(3)}))
    for number, weight in enumerate(weights):
        weight.target.fill_(number)
    if bias:
        assert [weight.name for weight in weights] == ["q.weight", "q.bias", "k.weight", "k.bias"]
        assert linear.weight[:, 0].tolist() == [0, 0, 2, 2, 2]
        assert linear.bias.tolist() == [1, 1, 3, 3, 3]
    else:
        assert [weight.name for weight in weights] == ["q.weight", "k.weight"]
        assert linear.weight[:, 0].tolist() == [0, 0, 1, 1, 1]


def test_sizes_must_fill_the_product():
    linear = Linear(3, 5, bias=False, dtype=torch.float32, device=CPU)
    with pytest.raises(AssertionError, match="q, k do not fill"):
        list(stacked_weights(linear, {"q": whole(2), "k": whole(2)}))


def make(name: str, *shape: int, **shard: int) -> Weight:
    return Weight(name=name, target=torch.empty(shape), **shard)


def test_dummies():
    norm = RMSNorm(4, 1e-5, dtype=torch.float32, device=CPU)
    weights = [norm_weight(norm, "norm"), make("a", 200, 300), make("b", 200, 300)]
    fill_with_dummies(weights, seed=3)
    assert norm.weight.tolist() == [1.0] * 4
    a, b = weights[1].target, weights[2].target
    assert abs(a.std() - 0.02) < 5e-4
    assert abs(a.mean()) < 5e-4
    assert not torch.equal(a, b)


def test_dummies_follow_from_seed_and_name():
    first, again, other = make("a", 8, 6), make("a", 8, 6), make("a", 8, 6)
    fill_with_dummies([first], seed=1)
    fill_with_dummies([make("b", 8, 6), again], seed=1)
    fill_with_dummies([other], seed=2)
    assert torch.equal(first.target, again.target)
    assert not torch.equal(first.target, other.target)


def test_dummy_shards_are_parts_of_one_tensor():
    whole = make("a", 8, 6)
    shard = make("a", 8, 2, whole_size=6, dim=1, start=2)
    fill_with_dummies([whole, shard], seed=1)
    assert torch.equal(shard.target, whole.target[:, 2:4])
