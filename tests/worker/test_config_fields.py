from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ModelFileError
from worker.config_fields import layer_types, plain_config
from worker.json_object import JsonObject

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def config(**changes: Any) -> JsonObject:
    return JsonObject(Path("config.json"), CONFIG | changes)


def test_what_is_not_said_is_llamas():
    plain = plain_config(config())
    assert (plain.num_kv_heads, plain.head_dim, plain.attention_scale) == (4, 8, 8**-0.5)
    assert (plain.windows, plain.activation, plain.query_key_norm) == ((None, None), "silu", None)
    assert plain.embedding_multiplier == plain.residual_multiplier == plain.logits_divisor == 1.0


def test_a_caller_that_computes_a_field_may_have_it():
    file = config(logits_scaling=8.0, hidden_activation="gelu_pytorch_tanh")
    with pytest.raises(ModelFileError, match=r"logits_scaling is 8\.0; it must be left out or 1"):
        plain_config(file)
    plain = plain_config(
        file,
        computes=("logits_scaling",),
        default_theta=5.0,
        activation_key="hidden_activation",
    )
    assert plain.activation == "gelu_tanh"
    assert [rope.theta for rope in plain.ropes if rope is not None] == [5.0, 5.0]


@pytest.mark.parametrize("value", [None, False])
def test_fields_that_change_nothing_may_stand_there(value: object):
    assert plain_config(config(use_sliding_window=value, logits_scaling=1.0)).windows == (None,) * 2


def test_layer_types():
    assert layer_types(config(), 2) is None
    types = ["full_attention", "sliding_attention"]
    assert layer_types(config(layer_types=types), 2) == tuple(types)
    with pytest.raises(ModelFileError, match=r"layer_types .* must have 3 entries"):
        layer_types(config(layer_types=types), 3)
