from protocol.messages import SamplingParams
from scheduler.block_manager import BlockManager
from scheduler.policy import WORTH_WAITING_TOKENS
from scheduler.prefix_finder import Prefix, PrefixFinder
from tests.scheduler.simulation import make_sequence

BLOCK_SIZE = 4  # of the chains that `make_sequence` makes


def finder(*, prefix_cache=True):
    blocks = BlockManager(400, BLOCK_SIZE)
    return blocks, PrefixFinder(blocks, prefix_cache=prefix_cache)


def computed(blocks, sequence):
    """Let a sequence have computed all its full blocks, and register them."""
    sequence.block_table = blocks.allocate(len(sequence.tokens) // BLOCK_SIZE)
    sequence.num_computed = len(sequence.tokens)
    for number, block in enumerate(sequence.block_table):
        assert blocks.register(block, sequence.chain.block(number, sequence.tokens))


def test_one_token_is_left_to_compute():
    blocks, finds = finder()
    first = make_sequence(0, 12)
    computed(blocks, first)
    assert finds.find(make_sequence(1, 13)) == Prefix(first.block_table, 12)
    assert finds.find(make_sequence(1, 12)) == Prefix(first.block_table[:2], 8)
    assert finds.find(make_sequence(1, 3)) == Prefix([], 0)


def test_without_a_prefix_cache_nothing_is_found():
    blocks, finds = finder(prefix_cache=False)
    computed(blocks, make_sequence(0, 12))
    assert finds.find(make_sequence(1, 13)) == Prefix([], 0)


def test_who_would_compute_the_same_waits_until_it_is_registered():
    _, finds = finder()
    first, second = (make_sequence(i, 3 * WORTH_WAITING_TOKENS, request_id=i) for i in range(2))
    finds.enter(first)
    assert finds.find(second) is None
    finds.registered(first)
    assert finds.find(second) == Prefix([], 0)


def test_what_is_little_is_not_waited_for():
    _, finds = finder()
    first, second = (make_sequence(i, WORTH_WAITING_TOKENS, request_id=i) for i in range(2))
    finds.enter(first)
    assert finds.find(second) == Prefix([], 0)


def test_who_has_left_is_not_waited_for():
    _, finds = finder()
    first, second = (make_sequence(i, 3 * WORTH_WAITING_TOKENS, request_id=i) for i in range(2))
    finds.enter(first)
    finds.leave(first)
    assert finds.find(second) == Prefix([], 0)


def test_a_siblings_last_block_is_to_be_copied():
    blocks, finds = finder(prefix_cache=False)
    sibling, other = make_sequence(0, 11), make_sequence(1, 11, sample=1)
    sibling.block_table, sibling.num_computed = blocks.allocate(3), 11
    finds.enter(sibling)
    assert finds.find(other) == Prefix(sibling.block_table[:2], 10, sibling.block_table[2])
    assert sibling.num_registered == 2


def test_what_waits_on_the_host_need_not_wait_for_others():
    blocks, finds = finder()
    cached = make_sequence(0, 8)
    computed(blocks, cached)
    other, moved = (make_sequence(i, 3 * WORTH_WAITING_TOKENS, request_id=i) for i in (1, 2))
    finds.enter(other)
    assert finds.find(moved) is None
    moved.host_blocks, moved.num_swapped = [0, 1, 2], 11
    assert finds.find(moved) == Prefix(cached.block_table, 11)
    moved.host_blocks, moved.num_swapped = [0], 3
    assert finds.find(moved) == Prefix(cached.block_table, 8)


def test_a_sibling_in_doubt_is_none():
    blocks, finds = finder(prefix_cache=False)
    sibling, other = make_sequence(0, 11), make_sequence(1, 11, sample=1)
    sibling.block_table, sibling.num_computed = blocks.allocate(3), 11
    sibling.block_uses = {block: blocks.uses[block] for block in sibling.block_table}
    finds.enter(sibling)
    assert finds.find(other).num_tokens == 10
    sibling.block_uses[sibling.block_table[0]] -= 1
    assert finds.find(other).num_tokens == 0, "its first block was given to another"
    sibling.block_uses.clear()
    blocks.quarantine({sibling.block_table[1]: 1}, 0)
    assert finds.find(other).num_tokens == 0, "its second block is in quarantine"
    blocks.end_quarantine(None)
    sibling.is_damaged = True
    assert finds.find(other).num_tokens == 0
    sibling.is_damaged = False
    assert finds.find(other).num_tokens == 10
    finds.reset(0)
    assert finds.find(other).num_tokens == 0, "it ran at a reset"
    finds.leave(sibling)


def test_nobody_waits_for_what_is_back_from_before_a_reset():
    _, finds = finder()
    old, new, late = (make_sequence(i, 3 * WORTH_WAITING_TOKENS, request_id=i) for i in range(3))
    finds.reset(1)
    old.rests_on, new.rests_on = 1, 2
    finds.enter(old)
    assert finds.find(late) == Prefix([], 0)
    finds.enter(new)
    assert finds.find(late) is None
    finds.leave(old)
    finds.leave(new)
    assert finds.find(late) == Prefix([], 0)


def test_a_prompt_that_is_to_be_scored_is_computed_whole():
    blocks, finds = finder()
    first, scored = make_sequence(0, 12), make_sequence(1, 13)
    computed(blocks, first)
    finds.enter(make_sequence(2, 13, sample=1))
    scored.params = SamplingParams(prompt_logprobs=0)
    assert finds.find(scored) == Prefix([], 0)
    scored.num_swapped, scored.host_blocks = 6, [0, 1]
    assert finds.find(scored) == Prefix([], 6)
    scored.num_swapped, scored.host_blocks = 0, []
    scored.num_scored = 13
    assert finds.find(scored) == Prefix(first.block_table, 12)
