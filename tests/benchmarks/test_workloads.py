from benchmarks.workloads import WORKLOADS, warm_up


def sizes(name: str) -> tuple[int, int, int]:
    requests = WORKLOADS[name]()
    return (
        len(requests),
        sum(len(request.prompt) for request in requests),
        sum(request.num_output_tokens for request in requests),
    )


def test_sizes():
    assert sizes("nano") == (256, 142_827, 133_966)
    assert sizes("bs1") == (1, 128, 512)
    assert sizes("bs8") == (8, 8 * 128, 8 * 512)
    assert sizes("prefill") == (64, 64 * 2048, 64)
    assert WORKLOADS["nano"]() == WORKLOADS["nano"]()


def test_warm_up_shares_no_prompt():
    warm = {tuple(request.prompt[:64]) for request in warm_up()}
    assert len(warm) == 64
    for make in WORKLOADS.values():
        assert not warm & {tuple(request.prompt[:64]) for request in make()}
