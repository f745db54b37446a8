import random
from array import array

import pytest

from scheduler.block_books import Holding
from scheduler.block_manager import BlockManager, BlocksLostError
from scheduler.prefix import PrefixBlock, PrefixChain, PrefixHasher

HASHER = PrefixHasher(b"key")


def prefix(*tokens, domain=b"", block_size=2):
    """The full blocks of a token list."""
    chain = PrefixChain(HASHER, domain, block_size)
    array_ = array("i", tokens)
    return [chain.block(index, array_) for index in range(len(tokens) // block_size)]


def registered(manager, *tokens, domain=b""):
    """Blocks held once, full of some tokens and registered."""
    content = prefix(*tokens, domain=domain)
    blocks = manager.allocate(len(content))
    for block, each in zip(blocks, content, strict=True):
        assert manager.register(block, each)
    return blocks


def test_blocks_are_counted_up_in_whole_blocks():
    manager = BlockManager(8, 4)
    assert [manager.blocks_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_allocated_blocks_come_back_when_released():
    manager = BlockManager(3, 4)
    assert manager.allocate(2) == [0, 1]
    assert manager.num_free == 1
    assert manager.release([0, 1]) == 2
    assert manager.num_free == 3


def test_more_than_is_free_is_the_callers_bug():
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        BlockManager(2, 4).allocate(3)


def test_a_prefix_is_found_as_far_as_it_is_known():
    manager = BlockManager(8, 2)
    blocks = registered(manager, 1, 2, 3, 4)
    assert manager.match(prefix(1, 2, 3, 4, 5, 6)) == blocks
    assert manager.match(prefix(1, 2, 9, 9)) == blocks[:1]
    assert manager.match(prefix(3, 4)) == []
    assert manager.match(prefix(1, 2, domain=b"tenant")) == []


def test_an_equal_key_with_other_tokens_is_no_hit():
    manager = BlockManager(8, 2)
    (content,) = prefix(1, 2)
    (block,) = manager.allocate(1)
    assert manager.register(block, content)
    forged = PrefixBlock(content.key, content.parent, content.domain, array("i", [7, 7]).tobytes())
    assert manager.match([content]) == [block]
    assert manager.match([forged]) == []
    assert manager.match([content._replace(domain=b"tenant")]) == []


def test_a_shared_block_is_free_when_its_last_holder_gives_it_up():
    manager = BlockManager(4, 2)
    blocks = registered(manager, 1, 2)
    manager.share(blocks)
    assert manager.num_holders(blocks[0]) == 2
    assert manager.release(blocks) == 0
    assert manager.num_free == 3
    assert manager.release(blocks) == 1
    assert manager.num_free == 4


def test_a_free_block_keeps_its_content_until_it_is_needed():
    manager = BlockManager(2, 2)
    manager.release(registered(manager, 1, 2))
    hits = manager.match(prefix(1, 2))
    assert manager.num_free_among(hits) == 1
    manager.share(hits)
    assert manager.num_free == 1
    manager.release(hits)
    assert manager.allocate(2) == [1, 0]  # the one without content first
    assert manager.match(prefix(1, 2)) == []
    assert manager.num_indexed == 0


def test_the_least_recently_freed_content_is_evicted_first_tails_before_heads():
    manager = BlockManager(4, 2)
    old = registered(manager, 1, 2, 3, 4)
    young = registered(manager, 5, 6, 7, 8)
    manager.release(old)
    manager.release(young)
    evicted = [manager.take() for _ in range(4)]
    assert evicted == [old[1], old[0], young[1], young[0]]


def test_content_that_is_known_already_stays_where_it_is():
    manager = BlockManager(4, 2)
    (first,) = registered(manager, 1, 2)
    (second,) = manager.allocate(1)
    assert not manager.register(second, prefix(1, 2)[0])
    assert manager.match(prefix(1, 2)) == [first]
    assert not manager.is_registered(second)
    manager.release([second])
    manager.release([first])
    assert manager.audit(HASHER, []) == []


def test_a_copy_of_known_content_is_exchanged_for_its_block():
    manager = BlockManager(4, 2)
    (first,) = registered(manager, 1, 2)
    (copy,) = manager.allocate(1)
    (content,) = prefix(1, 2)
    assert not manager.register(copy, content)
    assert manager.exchange(copy, content) == first
    assert (manager.num_holders(first), manager.num_holders(copy)) == (2, 0)
    assert manager.take() == copy
    manager.release([copy, first, first])
    # So it is for content that nobody holds any more.
    (copy,) = manager.allocate(1)
    assert manager.exchange(copy, content) == first
    assert (manager.num_holders(first), manager.num_free) == (1, 3)
    manager.release([first])
    assert manager.audit(HASHER, []) == []


def test_only_exactly_equal_content_is_exchanged():
    manager = BlockManager(4, 2)
    registered(manager, 1, 2)
    (copy,) = manager.allocate(1)
    (content,) = prefix(1, 2)
    assert manager.exchange(copy, prefix(3, 4)[0]) is None
    assert manager.exchange(copy, content._replace(tokens=array("i", [7, 7]).tobytes())) is None
    assert manager.num_holders(copy) == 1
    manager.share([copy])
    assert manager.exchange(copy, content) is None, "another holds it too"
    assert manager.exchange(0, content) is None, "it is the index's own"
    assert (manager.num_holders(copy), manager.num_holders(0)) == (2, 1)


def test_what_is_not_held_or_registered_already_is_not_registered():
    manager = BlockManager(4, 2)
    (block,) = registered(manager, 1, 2)
    assert not manager.register(block, prefix(3, 4)[0])
    assert not manager.register(3, prefix(3, 4)[0])
    assert [finding.block for finding in manager.take_stumbles()] == [block, 3]
    assert (manager.num_indexed, manager.has_stumbled) == (1, False)


def test_everything_can_be_forgotten_at_once():
    manager = BlockManager(6, 2)
    held = registered(manager, 1, 2)
    manager.share(held)
    old = registered(manager, 5, 6)
    young = registered(manager, 7, 8)
    manager.release(old)
    manager.release(young)
    assert manager.forget_all() == 3
    assert (manager.num_indexed, manager.num_cached, manager.num_free) == (0, 0, 5)
    assert manager.match(prefix(1, 2)) == manager.match(prefix(5, 6)) == []
    holders = [Holding("request=1", held, prefix(1, 2)), Holding("request=2", held, prefix(1, 2))]
    assert manager.audit(HASHER, holders) == []
    assert manager.forget_all() == 0
    assert [manager.release(held), manager.release(held)] == [0, 1]
    assert manager.num_free == 6
    assert [manager.take(), manager.take(), manager.take()] == [*held, *old, *young]


# What operations stumble over


def blocks_of(stumbles):
    return [finding.block for finding in stumbles]


def test_what_is_held_is_not_given_out_whatever_the_lists_say():
    manager = BlockManager(4, 2)
    (block,) = registered(manager, 1, 2)
    manager._free.append(block)
    assert manager.take() != block
    manager._cached[block] = None
    manager._free.clear()
    with pytest.raises(BlocksLostError):
        manager.take()
    assert blocks_of(manager.take_stumbles()) == [block]
    assert manager.num_holders(block) == 1


def test_an_allocation_that_comes_short_takes_nothing():
    manager = BlockManager(4, 2)
    (block,) = manager.allocate(1)
    manager._free.insert(0, block)
    with pytest.raises(BlocksLostError):
        manager.allocate(4)
    assert manager.num_free == 3
    assert sorted(manager.allocate(3)) == [1, 2, 3]


def test_a_block_that_was_given_to_another_stays_with_that_one():
    manager = BlockManager(1, 2)
    (block,) = manager.allocate(1)
    uses = {block: manager.uses[block]}
    manager.release([block])  # once too often
    assert manager.take() == block
    assert not manager.is_untouched([block], uses)
    assert manager.release([block], uses) == 0
    assert manager.num_holders(block) == 1
    (finding,) = manager.take_stumbles()
    assert (finding.block, finding.is_foreign) == (block, True)


def test_what_nobody_holds_is_not_released():
    manager = BlockManager(2, 2)
    assert manager.release([0]) == 0
    assert (manager.num_free, manager.num_holders(0)) == (2, 0)
    assert blocks_of(manager.take_stumbles()) == [0]


def test_a_prefix_ends_before_a_block_that_is_in_doubt():
    for corrupt in (
        lambda manager, block: manager._cached.pop(block),
        lambda manager, block: manager._references.__setitem__(block, 1),
        lambda manager, block: manager._references.__setitem__(block, -1),
        lambda manager, block: manager._content.__setitem__(block, None),
    ):
        manager = BlockManager(4, 2)
        first, second = registered(manager, 1, 2, 3, 4)
        manager.release([first, second])
        corrupt(manager, second)
        assert manager.match(prefix(1, 2, 3, 4)) == [first]
        assert blocks_of(manager.take_stumbles()) == [second]


def test_content_that_the_index_does_not_lead_to_is_not_evicted():
    manager = BlockManager(1, 2)
    manager.release(registered(manager, 1, 2))
    manager._index.clear()
    with pytest.raises(BlocksLostError):
        manager.take()
    assert blocks_of(manager.take_stumbles()) == [0]


def test_a_block_in_quarantine_is_nobodys_next():
    manager = BlockManager(4, 2)
    first, second = registered(manager, 1, 2, 3, 4)
    manager.quarantine({first: 1, 3: 0}, 7)
    assert manager.match(prefix(1, 2)) == []
    assert (manager.num_free, manager.num_quarantined, manager.num_indexed) == (1, 2, 1)
    assert not manager.register(first, prefix(1, 2)[0])
    assert manager.release([first, second]) == 1
    assert not manager.has_stumbled
    assert manager.audit(HASHER, []) == []
    # Somebody who was admitted before still runs: who knows what he was given.
    assert manager.end_quarantine(7) == 0
    assert manager.end_quarantine(8) == 2
    assert (manager.num_free, manager.num_quarantined) == (4, 0)
    assert manager.audit(HASHER, []) == []


# What the audit sees


@pytest.fixture
def audited():
    """A manager with one held, one cached and two empty blocks, and what is held."""
    manager = BlockManager(4, 2)
    held = registered(manager, 1, 2)
    manager.release(registered(manager, 5, 6))
    holding = Holding("request=1", held, prefix(1, 2))
    assert manager.audit(HASHER, [holding]) == []
    return manager, holding


def test_audit_names_a_block_that_nobody_holds(audited):
    manager, _ = audited
    assert manager.audit(HASHER, []) == ["block 0 has 1 references but is in the tables of nobody"]


def test_audit_names_a_block_that_two_sequences_hold_unknowingly(audited):
    manager, holding = audited
    (block,) = manager.allocate(1)
    twice = [Holding("request=2", [block], []), Holding("request=3", [block], [])]
    assert manager.audit(HASHER, [holding, *twice]) == [
        "block 2 has 1 references but is in the tables of ['request=2', 'request=3']",
        "block 2 is shared by ['request=2', 'request=3'] without being registered",
    ]


def test_audit_lets_two_sequences_share_what_both_know_to_be_there(audited):
    manager, holding = audited
    (block,) = manager.allocate(1)
    manager.share([block])
    twice = [Holding(f"request={number}", [block], prefix(3, 4)) for number in (2, 3)]
    assert manager.audit(HASHER, [holding, *twice]) == []
    other = Holding("request=3", [block], prefix(5, 7))
    assert manager.audit(HASHER, [holding, twice[0], other]) == [
        "block 2 is shared by ['request=2', 'request=3'] without being registered"
    ]


def test_audit_names_a_copy_that_was_not_exchanged(audited):
    manager, holding = audited
    (copy,) = manager.allocate(1)
    other = Holding("request=2", [copy], prefix(1, 2))
    assert manager.audit(HASHER, [holding, other]) == ["block 2 of request=2 is a copy of block 0"]


def test_audit_names_a_block_in_two_free_lists(audited):
    manager, holding = audited
    manager._free.append(1)
    assert manager.audit(HASHER, [holding]) == [
        "block 1 is registered but listed as free without content",
        "block 1 is in the free lists 2 times instead of 1",
    ]


def test_audit_names_a_held_block_in_a_free_list(audited):
    manager, holding = audited
    manager._cached[0] = None
    assert manager.audit(HASHER, [holding]) == ["block 0 is in the free lists 1 times instead of 0"]


def test_audit_names_an_index_entry_that_leads_elsewhere(audited):
    manager, holding = audited
    manager._index[prefix(1, 2)[0].key] = 1
    assert manager.audit(HASHER, [holding]) == [
        "block 1 is in the index under a key that is not its own",
        "block 0 is registered but the index does not lead to it",
    ]


def test_audit_names_content_that_does_not_fit_its_key(audited):
    manager, holding = audited
    content = prefix(5, 6)[0]
    manager._content[1] = content._replace(tokens=array("i", [5, 7]).tobytes())
    assert manager.audit(HASHER, [holding]) == ["block 1 holds other tokens than its key says"]


def test_audit_names_content_that_is_not_its_holders(audited):
    manager, holding = audited
    other = Holding(holding.name, holding.block_table, prefix(3, 4))
    assert manager.audit(HASHER, [other]) == ["block 0 holds other tokens than request=1 has there"]


@pytest.mark.slow
def test_no_block_is_lost_over_a_million_operations():
    generator = random.Random(0)
    manager = BlockManager(64, block_size=2)
    # Texts of eight blocks that are alike, two by two, in their first four.
    texts = [prefix(*[number // 2, 1] * 4, *[number, 2] * 4) for number in range(40)]
    holders: list[tuple[int, list[int], int]] = []  # text, blocks, registered
    num_hits = num_exchanged = 0

    for operation in range(1_000_000):
        match generator.randrange(4):
            case 0 if manager.num_free >= 8:
                text = generator.randrange(len(texts))
                length = generator.randint(1, 8)
                hits = manager.match(texts[text][: length - 1])
                manager.share(hits)
                num_hits += len(hits)
                blocks = hits + manager.allocate(length - len(hits))
                holders.append((text, blocks, len(hits)))
            case 1 if holders:
                place = generator.randrange(len(holders))
                text, blocks, registered = holders[place]
                if registered < len(blocks):
                    content = texts[text][registered]
                    if not manager.register(blocks[registered], content):
                        known = manager.exchange(blocks[registered], content)
                        assert known is not None
                        blocks[registered] = known
                        num_exchanged += 1
                    holders[place] = (text, blocks, registered + 1)
            case 2 if holders and manager.num_free and len(holders[-1][1]) < 8:
                holders[-1][1].append(manager.take())
            case 3 if holders:
                place = generator.randrange(len(holders))
                _, blocks, _ = holders.pop(place)
                before = manager.num_free
                freed = manager.release(blocks)
                assert manager.num_free == before + freed
        if operation % 20_000 == 0:
            holdings = [
                Holding(str(place), blocks, texts[text][:registered])
                for place, (text, blocks, registered) in enumerate(holders)
            ]
            assert manager.audit(HASHER, holdings) == []
    assert num_hits > 50_000
    assert num_exchanged > 30_000
    for _, blocks, _ in holders:
        manager.release(blocks)
    assert manager.num_free == 64
    assert manager.audit(HASHER, []) == []
