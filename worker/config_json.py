"""config.json and generation_config.json of a model directory, read into a `ModelConfig`.

Written by many versions of transformers: version 5 says `rope_parameters` and `dtype`, older ones
`rope_theta` with `rope_scaling` and `torch_dtype`. Both are read (`worker.rope_json`). Nothing in
these files is run: `auto_map` is ignored. What families add is read by `worker.families`.
"""

from dataclasses import replace
from pathlib import Path

from worker.config_fields import architecture
from worker.families import FAMILIES, SUPPORTED_ARCHITECTURES
from worker.json_object import JsonObject, read_json
from worker.model_config import ModelConfig, merge_token_ids
from worker.quantization_config import read_quantization


def read_config_json(directory: Path) -> ModelConfig:
    """Read a model directory's config. Raises ModelFileError naming the file and the key."""
    source = directory / "config.json"
    values = read_json(source)
    config = JsonObject(source, values)
    name = architecture(config)
    if name not in FAMILIES:
        raise config.bad(
            "architectures",
            f"names an architecture that is not supported; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}",
        )
    model = FAMILIES[name](config)
    quantization = None
    # Packed experts beside 16 bits are their family's to read.
    if model.experts is None or not model.experts.is_packed:
        quantization = read_quantization(source, values.get("quantization_config"))
    if quantization is not None and model.experts is not None:
        raise config.bad("quantization_config", "must be absent where a model has experts")
    return replace(
        model,
        eos_token_ids=merge_token_ids(
            model.eos_token_ids, _generation_eos(directory, model.vocab_size)
        ),
        quantization=quantization,
    )


def _generation_eos(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the EOS ids of generation_config.json, which chat models extend there."""
    source = directory / "generation_config.json"
    if not source.exists():
        return ()
    config = JsonObject(source, read_json(source))
    ids = config.token_ids("eos_token_id")
    if not all(0 <= token_id < vocab_size for token_id in ids):
        raise config.bad("eos_token_id", f"must be 0 to {vocab_size - 1}")
    return ids
