"""generation_config.json: how a model's publisher would have its tokens chosen.

Its sampling parameters become the defaults of requests that leave theirs open. As in vLLM,
`max_new_tokens` is such a default too, and no limit; what transformers itself would assume for a
key that is absent plays no part. `do_sample` false means greedy, whatever temperature stands
beside it. The end tokens in the file are no defaults and always count: `frontend.text.text_model`
reads them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from protocol.errors import ModelFileError
from protocol.messages import SamplingDefaults

FILE = "generation_config.json"

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "sequence_bias": ({},),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "stop_strings": ([], ""),
    "token_healing": (False,),
    "watermarking_config": ({},),
}
"""What would change the output and is not honoured, with the values that ask for nothing."""


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's file says of sampling."""

    defaults: SamplingDefaults = SamplingDefaults()
    given: list[str] = []
    """The names in `defaults` that the file decides."""
    not_honoured: list[str] = []
    """What it says beside, as `name=value`, in vain."""


class _Sampling(msgspec.Struct, frozen=True, kw_only=True):
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def read_generation_config(directory: Path) -> GenerationConfig:
    """Read a model directory's generation_config.json; a missing one says nothing.

    Raises ModelFileError for a file, or a parameter in it, that is not what its name says.
    """
    path = directory / FILE
    if not path.is_file():
        return GenerationConfig()
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        sampling = msgspec.convert(values, _Sampling)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}.") from error
    given, refused = _split(sampling)
    return GenerationConfig(
        defaults=msgspec.structs.replace(SamplingDefaults(), **given),
        given=list(given),
        not_honoured=[*refused, *_unsupported(values)],
    )


def _split(sampling: _Sampling) -> tuple[dict[str, float | int], list[str]]:
    """Return the defaults, and what is out of this engine's range as `name=value`."""
    in_range: dict[str, Callable[[float], bool]] = {
        "temperature": lambda value: 0 <= value <= 2,
        "top_k": lambda value: -1 <= value < 2**31,
        "top_p": lambda value: 0 < value <= 1,
        "min_p": lambda value: 0 <= value <= 1,
        "repetition_penalty": lambda value: 0 < value <= 2,
        "max_new_tokens": lambda value: 1 <= value < 2**31,
    }
    values = msgspec.structs.asdict(sampling)
    if values.pop("do_sample") is False:
        values["temperature"] = 0.0
    given: dict[str, float | int] = {}
    refused = []
    for name, is_legal in in_range.items():
        value = values[name]
        if value is None:
            continue
        if is_legal(value):
            given["max_tokens" if name == "max_new_tokens" else name] = value
        else:
            refused.append(f"{name}={_short(value)}")
    return given, refused


def _unsupported(values: Mapping[str, object]) -> Iterator[str]:
    for name, neutral in _UNSUPPORTED.items():
        value = values.get(name)
        if value is not None and value not in neutral:
            yield f"{name}={_short(value)}"


def _short(value: object) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return str(value)[:64]
