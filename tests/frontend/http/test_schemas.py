import msgspec
import pytest

from frontend.http.schemas import (
    OF_ONE_ENDPOINT,
    ONE_VALUE,
    ChatRequest,
    CompletionRequest,
    known_fields,
    unsupported_fields,
)
from protocol.messages import SamplingParams


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_no_field_is_both_honoured_and_refused(kind):
    assert not set(kind.__struct_fields__) & unsupported_fields(kind).keys()
    assert known_fields(kind) > ONE_VALUE.keys() | OF_ONE_ENDPOINT.keys()


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_sampling_parameter_can_be_set(kind):
    inner = {"grammar", "bad_word_ids"}
    assert set(SamplingParams.__struct_fields__) - inner <= set(kind.__struct_fields__)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_an_empty_object_is_a_body(kind):
    assert msgspec.convert({}, kind) == kind()


@pytest.mark.parametrize("value", ["5", True, 1.5, 1.0, [], {}])
def test_integers_are_integers(value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"max_tokens": value}, ChatRequest)


def test_an_integer_is_also_a_number():
    assert msgspec.convert({"temperature": 1}, ChatRequest).temperature == 1.0
