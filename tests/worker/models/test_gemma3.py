"""What Gemma 3 rounds, and where."""

from pathlib import Path

import torch
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3RMSNorm,
    Gemma3TextScaledWordEmbedding,
)

from tests.worker.models.families import FAMILIES
from tests.worker.models.harness import TOKENS, save_family
from tests.worker.tiny_models import CPU, Stepper, reference_logits
from worker.layers.embedding import Embedding
from worker.layers.norm import RMSNorm
from worker.model_files import read_model_config
from worker.models.gemma3 import build_gemma3
from worker.parallel import OneRank
from worker.weights import fill_with_dummies

FAMILY = next(family for family in FAMILIES if family.model_type == "gemma3_text")


def test_embeddings_are_scaled_by_a_number_rounded_to_their_dtype():
    scale = 2560**0.5
    ours = Embedding(10, 64, scale=scale, dtype=torch.bfloat16, device=CPU)
    theirs = Gemma3TextScaledWordEmbedding(10, 64, padding_idx=0, embed_scale=scale).bfloat16()
    ours.weight.copy_(theirs.weight.data.normal_())
    tokens = torch.tensor([1, 9, 3])
    with torch.inference_mode():
        assert torch.equal(ours(tokens), theirs(tokens))


def test_one_is_added_to_norm_weights_in_float32():
    torch.manual_seed(0)
    ours = RMSNorm(64, 1e-6, offset=1.0, dtype=torch.bfloat16, device=CPU)
    theirs = Gemma3RMSNorm(64).bfloat16()
    # In bfloat16, 1 plus this is 1.
    theirs.weight.data.uniform_(-0.003, 0.003)
    ours.weight.copy_(theirs.weight.data)
    ours.prepare()
    x = torch.randn(5, 64).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(ours(x.float()), theirs(x.float()).bfloat16(), rtol=0, atol=0.02)
        exact = theirs(x.double().float())
        # Within one rounding to bfloat16 of what is exact; a gain of 1 would not be.
        assert ((ours(x.float()).float() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_dummy_norms_scale_by_one(tmp_path: Path):
    save_family(FAMILY, tmp_path)
    model = build_gemma3(
        read_model_config(tmp_path),
        group=OneRank(),
        max_model_len=8,
        dtype=torch.float32,
        device=CPU,
    )
    fill_with_dummies(model.weights(), seed=0)
    norms = [weight for weight in model.weights() if weight.is_norm]
    assert len(norms) == 4 * 6 + 1
    assert all(weight.offset == 1.0 and weight.target.eq(0.0).all() for weight in norms)


def test_in_bfloat16(tmp_path: Path):
    reference = save_family(FAMILY, tmp_path)
    for parameter in reference.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    expected = reference_logits(reference, TOKENS)[-1]
    ours = Stepper(tmp_path, dtype=torch.bfloat16).prefill(0, TOKENS, range(11)).float()
    assert (ours - expected).abs().max() / expected.std() < 0.2
