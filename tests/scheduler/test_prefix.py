import hashlib
from array import array

import pytest

from scheduler.prefix import DIGEST_BYTES, PrefixBlock, PrefixChain, PrefixHasher


def test_keys_are_at_least_128_bits_of_keyed_blake2_over_parent_and_tokens():
    hasher = PrefixHasher(b"secret")
    expected = hashlib.blake2b(
        b"parent" + b"tokens", key=b"secret", digest_size=16, person=b"block"
    ).digest()
    assert hasher.key(b"parent", b"tokens") == expected
    assert DIGEST_BYTES * 8 >= 128


def test_a_chain_names_each_block_by_its_whole_prefix():
    hasher = PrefixHasher(b"secret")
    chain = PrefixChain(hasher, b"tenant", 2)
    tokens = array("i", [1, 2, 1, 2, 5])
    first, second = chain.block(0, tokens), chain.block(1, tokens)
    assert first.parent == hasher.root(b"tenant")
    assert first.tokens == second.tokens == array("i", [1, 2]).tobytes()
    assert second.parent == first.key
    assert second.key == hasher.key(first.key, second.tokens) != first.key


def test_a_chain_grows_with_the_tokens_and_computes_each_block_once():
    chain = PrefixChain(PrefixHasher(b""), b"", 2)
    tokens = array("i", [1, 2])
    first = chain.block(0, tokens)
    tokens.extend([3, 4])
    assert chain.block(1, tokens).parent == first.key
    assert chain.block(0, tokens) is first


def test_only_full_blocks_have_a_key():
    with pytest.raises(AssertionError, match="only full blocks"):
        PrefixChain(PrefixHasher(b""), b"", 4).block(0, array("i", [1, 2, 3]))


@pytest.mark.parametrize(
    ("key", "domain"), [(b"other", b"tenant"), (b"secret", b"other"), (b"secret", b"")]
)
def test_another_process_or_domain_has_other_keys(key, domain):
    tokens = array("i", [1, 2])
    one = PrefixChain(PrefixHasher(b"secret"), b"tenant", 2).block(0, tokens)
    other = PrefixChain(PrefixHasher(key), domain, 2).block(0, tokens)
    assert one.key != other.key


def test_blocks_of_equal_key_and_other_content_are_not_equal():
    block = PrefixBlock(b"key", b"parent", b"domain", b"toks")
    assert block == PrefixBlock(b"key", b"parent", b"domain", b"toks")
    assert block != PrefixBlock(b"key", b"parent", b"domain", b"else")
    assert block != PrefixBlock(b"key", b"parent", b"elsewhere", b"toks")
    assert block != PrefixBlock(b"key", b"another", b"domain", b"toks")
