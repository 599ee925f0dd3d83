"""Logits of tiny models against a slow forward pass in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tiny.models import TinySpec
from tiny.slow_model import SlowModel

if TYPE_CHECKING:
    from conftest import TinyModels

TOKENS = 90  # three pages, and several windows of 16

# Root mean square of the difference over that of the logits. float32 sums of some hundred products are off by 1e-6, so a
# key or value that lies as near to the middle between two float16 values falls to either side: one in 500 does, by 2^-11
# of itself, and sharp attention makes ten times that of the worst of them. Measured: 3e-5 to 1.4e-4.
FLOAT_TOLERANCE = 3e-4
# In the same way one activation in some 10,000 falls to the other side of one of its 255 levels, by 1/127 of the largest
# of its block, and pushes others after it. Measured: 5e-4 to 5e-3; without the rounding in the slow model it is 3e-2.
QUANTISED_TOLERANCE = 1e-2

FLOAT_SPECS = {
    "llama": TinySpec(),
    "llama-untied-f16": TinySpec(format="F16", tied=False, seed=1),
    "llama-bf16-mixed": TinySpec(format="BF16", formats={"ffn_gate": "F32", "attn_v": "F16", "attn_q": "F16"}, seed=2),
    "llama-rope-factors": TinySpec(rope_factors=True, seed=3),
    "llama-rope-scaling": TinySpec(rope_scaling=4.0, seed=4),
    "llama-rotates-a-part": TinySpec(head_width=64, rotated=32, heads=2, kv_heads=1, seed=5),
    "llama-head-width-128": TinySpec(head_width=128, heads=3, kv_heads=1, seed=6),
    "gemma3": TinySpec("gemma3", seed=7),
    "gemma3-seven-layers-scaled": TinySpec("gemma3", layers=7, rope_scaling=8.0, seed=8),
}
QUANTISED_SPECS = {
    "llama-q4_1": TinySpec(format="Q4_1", formats={"token_embd": "Q8_0"}, seed=10),
    "llama-gate-apart": TinySpec(format="Q8_0", formats={"ffn_up": "Q4_1", "attn_k": "F16"}, seed=11),
    "llama-layers-differ": TinySpec(
        format="Q8_0", formats={"blk.0.attn_v": "F16", "blk.1.": "F16", "blk.1.ffn_gate": "Q8_0"}, seed=12
    ),
    "llama-outputs-differ": TinySpec(format="F16", formats={"blk.0.attn_output": "Q8_0", "blk.1.ffn_down": "Q8_0"}, seed=13),
    "gemma3-k-quants": TinySpec(
        "gemma3",
        format="Q4_K",
        formats={"token_embd": "Q8_0", "attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_k": "Q5_0"},
        embedding=256,
        feed_forward=256,
        heads=4,
        kv_heads=1,
        head_width=64,
        seed=14,
    ),
}


def _difference(models: TinyModels, spec: TinySpec, level: str) -> float:
    model = models.load(spec, level=level)
    ids = np.random.default_rng(1).integers(0, spec.vocabulary, TOKENS).tolist()
    slow = SlowModel(models.path(spec)).logits(ids)
    fast = model.logits(ids)
    assert fast.dtype == np.float32
    assert fast.shape == (TOKENS, spec.vocabulary)
    return float(np.sqrt(((fast - slow) ** 2).mean() / (slow**2).mean()))


@pytest.mark.parametrize("name", FLOAT_SPECS)
def test_logits_of_float_weights_equal_the_slow_model(tiny_models: TinyModels, level: str, name: str) -> None:
    assert _difference(tiny_models, FLOAT_SPECS[name], level) < FLOAT_TOLERANCE


@pytest.mark.parametrize("name", QUANTISED_SPECS)
def test_logits_of_quantised_weights_equal_the_slow_model(tiny_models: TinyModels, level: str, name: str) -> None:
    assert _difference(tiny_models, QUANTISED_SPECS[name], level) < QUANTISED_TOLERANCE


def test_logits_repeat_for_equal_beginnings(tiny_models: TinyModels) -> None:
    model = tiny_models.load(FLOAT_SPECS["llama"])
    assert np.array_equal(model.logits([5, 6, 7]), model.logits([5, 6, 7, 8])[:3])
