import argparse

import pytest

from benchmarks.flags import between, positive, whole


def test_numbers_within_their_limits_are_read():
    assert (whole(1)("1"), whole(1, 2)("2"), whole(0)("0")) == (1, 2, 0)
    assert (between(0.1, 60_000)("0.1"), between(0.1, 60_000)("60000")) == (0.1, 60_000.0)
    assert positive("1e-3") == 0.001


@pytest.mark.parametrize(
    ("read", "text", "sentence"),
    [
        (whole(1), "0", "'0' is not a whole number of at least 1."),
        (whole(1), "1.5", "'1.5' is not a whole number of at least 1."),
        (whole(1, 2), "3", "'3' is not a whole number from 1 to 2."),
        (between(0.1, 60_000), "0.09", "'0.09' is not a number from 0.1 to 60000."),
        (between(0.1, 60_000), "nan", "'nan' is not a number from 0.1 to 60000."),
        (between(0.1, 60_000), "x", "'x' is not a number from 0.1 to 60000."),
        (positive, "0", "'0' is not a finite number above 0."),
        (positive, "inf", "'inf' is not a finite number above 0."),
        (positive, "nan", "'nan' is not a finite number above 0."),
    ],
)
def test_others_are_one_sentence(read, text, sentence):
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        read(text)
    assert str(caught.value) == sentence
