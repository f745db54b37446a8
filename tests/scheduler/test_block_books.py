"""What the fast look sees of what the audit's tests do; those are with the block manager's."""

import pytest

from scheduler.block_books import Holding
from scheduler.block_manager import BlockManager
from tests.scheduler.test_block_manager import HASHER, prefix, registered


@pytest.fixture
def books():
    """A manager whose block 0 two sequences hold, 1 is cached, 2 quarantined and held, 3 free."""
    manager = BlockManager(4, 2)
    held = registered(manager, 1, 2)
    manager.share(held)
    manager.release(registered(manager, 5, 6))
    (quarantined,) = manager.allocate(1)
    manager.quarantine({quarantined: 1}, 0)
    uses = {held[0]: 1, quarantined: 1}
    holdings = [
        Holding("request=1", [*held, quarantined], prefix(1, 2), uses),
        Holding("request=2", held, prefix(1, 2), uses),
    ]
    assert manager.find(holdings) == []
    assert manager.is_sound(holdings)
    return manager, holdings


DAMAGE = [
    ("block 0 has 3 references", lambda manager: manager._references.__setitem__(0, 3)),
    ("block 0 is in the free lists", lambda manager: manager._cached.__setitem__(0, None)),
    ("block 2 is in the free lists", lambda manager: manager._free.append(2)),
    ("block 3 is in the free lists", lambda manager: manager._free.remove(3)),
    ("block 1 is registered but listed", lambda manager: manager._free.append(1)),
    ("block 1 is listed as cached but", lambda manager: manager._content.__setitem__(1, None)),
    ("block 1 is registered but the", lambda manager: manager._index.popitem()),
    ("block 3 is in the index", lambda manager: manager._index.__setitem__(b"key", 3)),
    ("block 0 was given to another", lambda manager: manager.uses.__setitem__(0, 2)),
]


@pytest.mark.parametrize(("sentence", "damage"), DAMAGE, ids=[name for name, _ in DAMAGE])
def test_both_looks_see_the_damage(books, sentence, damage):
    manager, holdings = books
    damage(manager)
    assert any(finding.sentence.startswith(sentence) for finding in manager.find(holdings))
    assert not manager.is_sound(holdings)


def test_what_is_held_and_what_is_believed_to_be_held_is_compared(books):
    manager, (first, second) = books
    other = Holding(second.name, second.block_table, prefix(3, 4), second.uses)
    (finding,) = manager.find([first, other])
    assert finding == (0, "block 0 holds other tokens than request=2 has there", True)
    assert not manager.is_sound([first, other])


def test_who_may_still_write_shares_nothing_that_is_not_registered(books):
    manager, (first, second) = books
    manager.forget_all()
    assert manager.is_sound([first, second])
    writer = Holding(second.name, second.block_table, [], second.uses)
    (finding,) = manager.find([first, writer])
    assert (finding.block, finding.is_foreign) == (0, True)
    assert not manager.is_sound([first, writer])


def test_keys_are_recomputed_where_that_is_asked_for(books):
    manager, holdings = books
    manager._content[1] = manager._content[1]._replace(tokens=bytes(8))
    assert manager.is_sound(holdings)
    assert manager.find_keys(HASHER, [0, 2, 3]) == []
    (finding,) = manager.find_keys(HASHER, [1])
    assert (finding.block, finding.is_foreign) == (1, False)
    assert manager.audit(HASHER, holdings) == [finding.sentence]
