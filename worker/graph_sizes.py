"""Which steps become CUDA graphs, by their sizes. Pure numbers, without torch."""

CHUNK_TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024)
"""Tokens of steps with chunks that graphs are captured for; longer steps run eagerly."""
_CHUNK_SEQUENCES = (8, 64)


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Return the row counts of decode steps: dense where a step is short, up to `max_rows`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def chunk_sequences(max_sequences: int) -> tuple[int, ...]:
    """Return the sequence counts of steps with chunks, up to `max_sequences`."""
    return (*(count for count in _CHUNK_SEQUENCES if count < max_sequences), max_sequences)


def max_num_graphs(max_num_seqs: int) -> int:
    """Return how many graphs there may come to be: with filters and without, and of decode steps
    also with edited logits."""
    of_chunks = len(CHUNK_TOKENS) * len(chunk_sequences(max_num_seqs))
    return 3 * len(decode_buckets(max_num_seqs)) + 2 * of_chunks
