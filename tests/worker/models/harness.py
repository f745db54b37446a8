"""Tiny random models of a family, and our logits of them, divided among ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.worker.models.families import SIZES, Family
from tests.worker.plan_builder import make_join
from tests.worker.thread_ranks import ThreadRank, on_all, thread_ranks
from tests.worker.tiny_models import Stepper, reference_logits

TOKENS = [(7 * i + 3) % 131 for i in range(40)]


def save_family(family: Family, directory: Path, **changes: Any) -> Any:
    """Save a random float32 model of the family and return it."""
    torch.manual_seed(0)
    values = {**SIZES, **family.config, **changes}
    if family.beside is not None:
        values = {"text_config": values, **family.beside}
    config = AutoConfig.for_model(family.model_type, **values)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=family.norm_mean, std=0.3)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.get_input_embeddings().weight.data.div_(family.embedding_scale)
    model.save_pretrained(directory)
    assert model.config.architectures == [family.architecture]
    return model


def logits_of(path: Path, rank: ThreadRank) -> torch.Tensor:
    """This rank's logits of tokens 9 to 39: two chunks beside a growing decode row."""
    stepper = Stepper(path, group=rank)
    parts = [stepper.prefill(0, TOKENS[:10], range(11))[None]]
    parts += [stepper.decode({0: token}) for token in TOKENS[10:15]]
    stepper.last_tokens[0] = TOKENS[15]
    join = make_join(1, TOKENS, range(11, 22), generation=1)
    parts.append(stepper.step(joins=[join], decode=[0], chunks=[(1, 0, 23, 0)]))
    stepper.last_tokens[0] = TOKENS[16]
    parts.append(stepper.step(decode=[0], chunks=[(1, 23, 17, 1)]))
    return torch.cat(parts)


def assert_equal_to_transformers(path: Path, reference: Any, size: int) -> None:
    """Raise unless the logits of `size` ranks are the reference's within 1e-4."""
    ranks = thread_ranks(size)
    shards = on_all(partial(logits_of, path, rank) for rank in ranks)
    assert {shard.shape for shard in shards} == {(9, -(-131 // size))}
    whole = torch.cat(shards, dim=1)
    expected = reference_logits(reference, TOKENS)[[*range(9, 17), 39]]
    torch.testing.assert_close(whole[:, :131], expected, rtol=0, atol=1e-4)
    assert whole[:, 131:].eq(float("-inf")).all()
