import pytest

from benchmarks.simulation.card import CARDS, Card


@pytest.mark.parametrize("path", sorted(CARDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_kept_card_has_costs_and_room(path):
    card = Card.load(path.stem)
    assert min(card.cost.step_s, card.cost.token_s, card.cost.read_s, card.cost.pair_s) > 0
    assert card.hop_s > 0
    assert card.cache_tokens > 100_000
