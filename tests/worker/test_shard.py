import pytest

from worker.shard import Shard, divide, divide_heads, divide_vocabulary


def test_even_parts():
    assert [divide(12, rank=rank, size=3) for rank in range(3)] == [
        Shard(whole=12, start=0, size=4),
        Shard(whole=12, start=4, size=4),
        Shard(whole=12, start=8, size=4),
    ]
    with pytest.raises(AssertionError, match="13 does not divide among 3 ranks"):
        divide(13, rank=0, size=3)


def test_heads_become_rows():
    assert divide(6, rank=1, size=3).scaled(64) == Shard(whole=384, start=128, size=128)


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "starts", "held"),
    [
        (4, 1, [0], 4),
        (4, 2, [0, 2], 2),
        (4, 4, [0, 1, 2, 3], 1),
        (2, 4, [0, 0, 1, 1], 1),
        (1, 4, [0, 0, 0, 0], 1),
        (2, 8, [0, 0, 0, 0, 1, 1, 1, 1], 1),
    ],
)
def test_kv_heads_are_divided_or_shared(num_kv_heads, size, starts, held):
    shards = [divide_heads(8, num_kv_heads, rank=rank, size=size) for rank in range(size)]
    assert [shard.key_value.start for shard in shards] == starts
    assert {shard.key_value.size for shard in shards} == {held}
    for shard in shards:
        # Every query head finds the KV head it belongs to.
        for head in range(shard.query.start, shard.query.start + shard.query.size):
            index = head // (8 // num_kv_heads) - shard.key_value.start
            assert 0 <= index < held
            assert index == (head - shard.query.start) // (shard.query.size // held)


@pytest.mark.parametrize(
    ("vocab_size", "size", "sizes", "width"),
    [
        (8, 3, [3, 3, 2], 3),
        (131, 4, [33, 33, 33, 32], 33),
        (128, 4, [32] * 4, 32),
        (5, 4, [2, 2, 1, 0], 2),
        (1, 2, [1, 0], 1),
    ],
)
def test_vocabularies_are_padded(vocab_size, size, sizes, width):
    shards = [divide_vocabulary(vocab_size, rank=rank, size=size) for rank in range(size)]
    assert [shard.ids.size for shard in shards] == sizes
    assert {shard.width for shard in shards} == {width}
    starts = [sum(sizes[:rank]) for rank in range(size)]
    assert [shard.ids.start for shard in shards] == starts
