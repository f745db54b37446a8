import pytest

from worker.graph_sizes import CHUNK_TOKENS, chunk_sequences, decode_buckets, max_num_graphs


def test_buckets():
    assert decode_buckets(1) == (1,)
    assert decode_buckets(5) == (1, 2, 4, 5)
    assert decode_buckets(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert decode_buckets(256)[-4:] == (208, 224, 240, 256)
    assert decode_buckets(300)[-3:] == (256, 288, 300)


@pytest.mark.parametrize("max_rows", [1, 7, 64, 100, 256, 513])
def test_every_decode_step_has_a_bucket(max_rows: int):
    buckets = decode_buckets(max_rows)
    assert list(buckets) == sorted(set(buckets))
    for rows in range(1, max_rows + 1):
        bucket = min(bucket for bucket in buckets if bucket >= rows)
        assert bucket <= max(rows + 31, 4)


def test_sequences_of_chunks():
    assert chunk_sequences(5) == (5,)
    assert chunk_sequences(64) == (8, 64)
    assert chunk_sequences(256) == (8, 64, 256)


def test_number_of_graphs():
    assert max_num_graphs(1) == 3 + 2 * len(CHUNK_TOKENS)
    assert max_num_graphs(256) == 3 * 23 + 2 * 3 * len(CHUNK_TOKENS)
