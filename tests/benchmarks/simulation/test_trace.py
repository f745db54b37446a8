import pytest

from benchmarks.simulation.trace import (
    Shape,
    TraceError,
    TraceRequest,
    longest_request,
    read_csv,
    synthesize,
)

GROUPED = "arrival_s,prompt_tokens,output_tokens,prefix_group,prefix_tokens\n"


def write(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_read_in_order_of_arrival(tmp_path):
    path = write(
        tmp_path,
        "arrival_s,prompt_tokens,output_tokens,prefix_group,prefix_tokens\n"
        "2.5,100,7,chat,40\n"
        "1,30,2,,\n"
        "3,41,1,chat,40\n",
    )
    assert read_csv(path) == [
        TraceRequest(1.0, 30, 2),
        TraceRequest(2.5, 100, 7, 1, 40),
        TraceRequest(3.0, 41, 1, 1, 40),
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    path = write(tmp_path, "\ufeffarrival_s,prompt_tokens,output_tokens\n0,3,1\n")
    assert read_csv(path) == [TraceRequest(0.0, 3, 1)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "",
            "trace.csv has no column arrival_s; it needs arrival_s, prompt_tokens, output_tokens.",
        ),
        ("arrival_s,prompt_tokens,output_tokens\n", "trace.csv has no requests."),
        (
            "arrival_s,prompt_tokens,output_tokens\n0,1,1\n0,x,1\n",
            "trace.csv, line 3: a field is missing or is not a number.",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens\n0,1\n",
            "trace.csv, line 2: a field is missing or is not a number.",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens\n-1,1,1\n",
            "trace.csv, line 2: times must be 0 or more, and lengths more than 0.",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens\ninf,1,1\n",
            "trace.csv, line 2: times must be 0 or more, and lengths more than 0.",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens\n0,1,1\n0,1,1,5\n",
            "trace.csv, line 3: there are more fields than the header has.",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens\n0,1048575,1\n0,1048575,2\n",
            "trace.csv, line 3: prompt and output have 1048577 tokens; at most 1048576 can be run.",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens,prefix_group\n0,101,1,a\n",
            "trace.csv, line 1: a column prefix_group needs a column prefix_tokens.",
        ),
        (
            f"{GROUPED}0,9,1,a,9\n0,9,1,b,10\n",
            "trace.csv, line 3: prefix_tokens is 10, but the prompt has 9.",
        ),
        (
            f"{GROUPED}0,9,1,a,8\n0,9,1,b,7\n0,9,1,a,7\n",
            "trace.csv, line 4: prefix_tokens is 7, but group 'a' has had 8.",
        ),
        (f"{GROUPED}0,9,1,a,\n", "trace.csv, line 2: a field is missing or is not a number."),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, text, sentence):
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_csv(path)
    assert str(caught.value) == f"{tmp_path}/{sentence}"


def test_a_file_that_is_no_text_or_not_there_is_one_sentence(tmp_path):
    path = tmp_path / "trace.csv"
    with pytest.raises(TraceError) as caught:
        read_csv(path)
    assert str(caught.value) == f"{path} does not exist."
    with pytest.raises(TraceError) as caught:
        read_csv(tmp_path)
    assert str(caught.value) == f"{tmp_path} cannot be read: Is a directory."
    path.write_bytes(b"arrival_s,prompt_tokens,output_tokens\n0,1,\xff\n")
    with pytest.raises(TraceError) as caught:
        read_csv(path)
    assert str(caught.value) == f"{path} is not UTF-8 text."
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,1," + "1" * 200_000)
    with pytest.raises(TraceError) as caught:
        read_csv(path)
    assert str(caught.value) == f"{path} is not CSV: field larger than field limit (131072)."


def test_a_replica_may_hold_less_than_the_protocol(tmp_path):
    path = write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n0,60,4\n")
    assert read_csv(path, 64) == [TraceRequest(0.0, 60, 4)]
    with pytest.raises(TraceError) as caught:
        read_csv(path, 63)
    sentence = "line 2: prompt and output have 64 tokens; at most 63 can be run."
    assert str(caught.value) == f"{path}, {sentence}"


def test_a_synthetic_trace_has_its_rate_lengths_and_groups():
    shape = Shape(prompt_median=100, output_median=20, longest=300, num_groups=3)
    trace = synthesize(4_000, 50.0, shape)
    assert trace == synthesize(4_000, 50.0, shape)
    assert trace == sorted(trace)
    assert trace[-1].arrival_s == pytest.approx(80, rel=0.05)
    own = sorted(each.num_prompt_tokens - each.num_prefix_tokens for each in trace)
    assert (own[0] >= 1, own[-1]) == (True, 300)
    assert own[2_000] == pytest.approx(100, rel=0.05)
    assert {(each.prefix_group, each.num_prefix_tokens) for each in trace} == {
        (1, 256),
        (2, 256),
        (3, 256),
    }


def test_the_longest_request_counts_prompt_and_output():
    assert longest_request([TraceRequest(0, 10, 5), TraceRequest(0, 3, 13)]) == 16
