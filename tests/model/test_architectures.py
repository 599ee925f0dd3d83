"""What metadata of each architecture turns into, and which of it is refused with one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.errors import ModelFileError, UnsupportedModelError
from headrace.model.angles import fill_angles
from headrace.model.config import LayerConfig, ModelConfig, RopeConfig
from tiny.models import Tensor, TinySpec

if TYPE_CHECKING:
    from conftest import Plan


def test_llama_config_is_read(make_plan: Callable[..., Plan]) -> None:
    config = make_plan(TinySpec(layers=3, rope_scaling=4.0, rope_factors=True)).config
    assert (config.heads, config.kv_heads, config.head_width, config.group) == (4, 2, 32, 2)
    assert config.layers == (LayerConfig(),) * 3
    assert config.neighbour_pairs
    (rope,) = config.ropes
    assert (rope.base, rope.rotated, rope.scale, len(rope.factors)) == (10000.0, 32, 0.25, 16)


def test_gemma3_config_is_read(make_plan: Callable[..., Plan]) -> None:
    config = make_plan(TinySpec("gemma3", layers=7, rope_scaling=8.0)).config
    assert [layer.window for layer in config.layers] == [16, 16, 16, 16, 16, 0, 16]
    assert config.ropes == (RopeConfig(1e6, 32, scale=0.125), RopeConfig(10000.0, 32))
    assert config.embedding_scale == math.sqrt(64)
    assert (config.activation, config.head_norms, config.post_norms) == ("gelu", True, True)


def test_config_survives_json(make_plan: Callable[..., Plan]) -> None:
    config = make_plan(TinySpec("gemma3", rope_factors=True)).config
    assert ModelConfig.from_json(config.to_json()) == config


def test_rope_factor_without_a_kind_is_linear(make_plan: Callable[..., Plan]) -> None:
    config = make_plan(TinySpec(metadata={"llama.rope.scaling.factor": 2.0})).config
    assert config.ropes[0].scale == 0.5


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.expert_count": 8}, "mixture of 8 experts"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.attention.value_length": 64}, "values of width 64"),
        ({"llama.attention.head_count_kv": 3}, "4 heads on 3 KV heads"),
        ({"llama.rope.dimension_count": 24}, "24 dimensions"),
    ],
)
def test_metadata_that_cannot_be_run_is_refused(make_plan: Callable[..., Plan], metadata: dict[str, int], words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as caught:
        make_plan(TinySpec(metadata=metadata))
    assert str(caught.value).count("\n") == 0


def test_unknown_architecture_is_refused(make_plan: Callable[..., Plan]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama, gemma3"):
        make_plan(TinySpec("mamba"))


def test_rope_factors_must_be_positive(make_plan: Callable[..., Plan]) -> None:
    def negate(tensors: dict[str, Tensor]) -> None:
        tensors["rope_freqs.weight"].data[3] = -1.0

    with pytest.raises(ModelFileError, match="rope factors"):
        make_plan(TinySpec(rope_factors=True), negate)


def test_angles_are_exact_at_large_positions() -> None:
    rope = RopeConfig(1e4, 8, scale=0.5, factors=(1.0, 1.0, 2.0, 4.0))
    out = np.zeros((2, 8), np.float32)
    fill_angles(rope, out, 1_000_003)
    for row in range(2):
        for i in range(4):
            angle = (1_000_003 + row) * 0.5 * 1e4 ** (-i / 4) / rope.factors[i]
            assert out[row, i] == pytest.approx(math.cos(angle), abs=1e-6)
            assert out[row, 4 + i] == pytest.approx(math.sin(angle), abs=1e-6)
