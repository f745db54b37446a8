"""Settings worth timing for a product. Imports neither torch nor Triton."""

from collections.abc import Iterator

from worker.product_table import MAX_GEMV_ROWS, Gemv, Setting, Tiles

_LANES = 32
_LOAD = 8
"""Elements of 16 bits in one 16-byte load."""

_SMALL_TILES = (
    # block_n, block_k, warps, stages
    (64, 64, 4, 8),
    (64, 128, 4, 4),
    (64, 128, 4, 6),
    (64, 256, 4, 3),
    (64, 256, 4, 5),
    (128, 64, 4, 6),
    (128, 128, 4, 3),
    (128, 128, 4, 5),
    (128, 128, 8, 4),
    (128, 256, 8, 3),
    (32, 128, 4, 6),
    (32, 256, 4, 4),
)
_LARGE_TILES = (
    (64, 64, 4, 4),
    (64, 128, 4, 3),
    (128, 64, 4, 4),
    (128, 64, 8, 3),
    (128, 64, 8, 4),
    (128, 128, 8, 3),
)


def candidates(rows: int, outputs: int, inputs: int, *, processors: int) -> Iterator[Setting]:
    """Yield settings that fit, without `pdl`. `processors` are the GPU's multiprocessors."""
    if rows <= MAX_GEMV_ROWS:
        yield from _gemvs(rows, outputs, inputs, processors)
    if rows > 1:
        yield from _tiles(rows, outputs, inputs, processors)


def _gemvs(rows: int, outputs: int, inputs: int, processors: int) -> Iterator[Gemv]:
    for warps in (1, 2, 4, 8):
        width = _LANES * _LOAD * warps
        # Blocks shorter than all warps read at once have each warp compute outputs of its own.
        for block_k in (256, 512, 1024, 2048, 4096):
            for loads in (1, 2, 4, 8):
                # A thread's loads in flight, and its sums, must fit its registers.
                block_n = loads * width // block_k
                if not block_n or rows * loads > 64 or 2 * outputs < processors * block_n:
                    continue
                setting = Gemv(block_n=block_n, block_k=block_k, warps=warps)
                if setting.fits(rows, outputs, inputs):
                    yield setting


def _tiles(rows: int, outputs: int, inputs: int, processors: int) -> Iterator[Tiles]:
    heights = [size for size in (16, 32, 64, 128, 256) if size < 2 * rows and 4 * size >= rows]
    # Two heights at most: the one that holds all rows, and half of it.
    for block_m in heights[-2:] if rows > 16 else (16,):
        for block_n, block_k, warps, stages in _SMALL_TILES if block_m <= 64 else _LARGE_TILES:
            one = Tiles(block_n, block_m, block_k, 1, warps, stages)
            for split in _splits(one.num_tiles(rows, outputs), inputs // block_k, processors):
                setting = Tiles(block_n, block_m, block_k, split, warps, stages)
                if setting.fits(rows, outputs, inputs):
                    yield setting


def _splits(num_tiles: int, num_blocks: int, processors: int) -> list[int]:
    """Return numbers of splits that give each multiprocessor about one, two or three programs."""
    wanted = {1}
    for programs in (processors, 2 * processors, 3 * processors):
        wanted |= {programs // num_tiles, -(-programs // num_tiles)}
    legal = {split for split in wanted if 1 <= split <= num_blocks}
    # A split whose programs do not all get a block would leave some idle.
    return sorted(s for s in legal if -(-num_blocks // s) * (s - 1) < num_blocks)
