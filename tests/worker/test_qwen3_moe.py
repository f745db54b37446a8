"""What the common row of tests/worker/models leaves out of Qwen3-MoE."""

from pathlib import Path

import pytest

from tests.worker.models.families import FAMILIES
from tests.worker.models.harness import assert_equal_to_transformers, save_family

(FAMILY,) = [family for family in FAMILIES if family.model_type == "qwen3_moe"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []},
        {"use_sliding_window": True, "sliding_window": 7, "attention_bias": True},
    ],
    ids=["some layers", "windows"],
)
def test_logits(tmp_path: Path, changes: dict[str, object]):
    reference = save_family(FAMILY, tmp_path, **changes)
    assert_equal_to_transformers(tmp_path, reference, 2)
