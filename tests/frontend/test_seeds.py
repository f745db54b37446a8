from frontend.seeds import SeedSource, sample_seed


def test_the_same_start_draws_the_same_seeds():
    first, again = SeedSource(0, 0), SeedSource(0, 0)
    seeds = [first.draw() for _ in range(100)]
    assert [again.draw() for _ in range(100)] == seeds
    assert len(set(seeds)) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert min(seeds) < 0 < max(seeds)


def test_frontends_and_starts_draw_different_ones():
    draws = {SeedSource(seed, stream).draw() for seed in range(-5, 5) for stream in range(10)}
    assert len(draws) == 100


def test_the_first_sample_has_the_requests_seed_and_the_others_their_own():
    for seed in (-(2**63), -1, 0, 1, 2**63 - 1):
        seeds = [sample_seed(seed, sample) for sample in range(64)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 64
        assert all(-(2**63) <= value < 2**63 for value in seeds)


def test_neighbouring_seeds_share_no_samples():
    seeds = {sample_seed(seed, sample) for seed in range(100) for sample in range(8)}
    assert len(seeds) == 800


def test_the_numbers_are_splitmix64s():
    """Reference values: SplitMix64 started at 0 gives these first two numbers."""
    assert sample_seed(0, 1) % 2**64 == 0xE220A8397B1DCDAF
    assert sample_seed(0, 2) % 2**64 == 0x6E789E6AA1B965F4
