"""Among how many programs FlashAttention 3 may divide a row's tokens.

Its plan is made on the device for the lengths it finds, but a bound must be given, and the same one
wherever a plan is used: a plan of more splits than its call expects reads out of bounds. Left to
itself the library would guess it from whatever is at hand at each place.
"""

_KEYS = 128
"""Tokens of a tile of keys."""
_QUERIES = 128
"""Rows of a tile of queries, those of all heads of a KV head."""
_UNSPLIT_TILES = 4
"""Adding splits up takes as long as to go through these tiles."""
_TILES_AMONG_MANY = 16
"""Least tiles of a split where rows alone fill the GPU, so that only a far longer row gains."""
_MAX_SPLITS = 128


def decode_splits(rows: int, num_kv_heads: int, capacity: int, num_processors: int) -> int:
    """Return the bound for rows of one query each, whose tables hold `capacity` tokens."""
    tiles = -(-capacity // _KEYS)
    if tiles <= _UNSPLIT_TILES:
        return 1
    splits = min(tiles, num_processors // num_kv_heads, _MAX_SPLITS)
    if rows * num_kv_heads >= 2 * num_processors:
        splits = min(splits, tiles // _TILES_AMONG_MANY)
    return max(1, splits)


def chunk_splits(
    rows: int, group: int, num_kv_heads: int, max_length: int, num_processors: int
) -> int:
    """Return the bound for chunks of `rows` in all, `group` query heads to a KV head.

    Several only where the tiles of queries, were they one chunk's, leave most of the GPU idle:
    every split takes memory.
    """
    tiles = -(-max_length // _KEYS)
    if tiles <= _UNSPLIT_TILES:
        return 1
    programs = -(-rows * group // _QUERIES) * num_kv_heads
    return max(1, min(tiles, num_processors // programs, _MAX_SPLITS))
