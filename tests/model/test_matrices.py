"""How tensors are joined into matrices, and which files are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from headrace.errors import ModelFileError, UnsupportedModelError
from headrace.model.architectures import read_config
from headrace.model.graph import Product
from headrace.model.matrices import plan_matrices, row_order
from headrace.weights.gguf import GgufFile
from tiny.models import Tensor, TinySpec

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Plan


def test_matrices_of_one_format_are_joined(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(TinySpec(layers=1))
    names = {name: matrix.tensors for name, matrix in plan.matrices.matrices.items()}
    assert names == {
        "0.qkv": ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"),
        "0.output": ("blk.0.attn_output.weight",),
        "0.gate_up": ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"),
        "0.down": ("blk.0.ffn_down.weight",),
        "embedding": ("token_embd.weight",),
    }
    assert plan.matrices.matrices["0.gate_up"].gated
    assert plan.matrices.part(0, "attn_k") == (plan.matrices.matrices["0.qkv"], 1)


def test_matrices_of_several_formats_stay_apart_and_in_order(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(TinySpec(layers=1, formats={"attn_k": "F16", "ffn_up": "Q8_0"}))
    products = [op for op in plan.graph if isinstance(op, Product)]
    assert [(op.matrix.tensors[-1].split(".")[2], op.matrix.format, op.at, op.waits) for op in products[:3]] == [
        ("attn_q", "F32", 0, True),
        ("attn_k", "F16", 128, False),
        ("attn_v", "F32", 192, False),
    ]
    assert [(op.output, op.waits) for op in products if op.name == "gate_up"] == [("gate", True), ("up", False)]


def test_row_order_turns_neighbours_into_halves_head_by_head(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    spec = TinySpec(layers=1, head_width=64, rotated=32, heads=2, kv_heads=1)
    plan = make_plan(spec)
    with GgufFile.open(tmp_path / "tiny.gguf") as gguf:
        order = row_order(gguf, plan.matrices.matrices["0.qkv"], plan.config)
    assert order is not None
    head = [*range(0, 32, 2), *range(1, 32, 2), *range(32, 64)]
    expected = [64 * number + row for number in range(3) for row in head] + list(range(192, 256))
    assert order.tolist() == expected  # the values' rows stay as they are


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight", "blk.0.ffn_norm.weight"])
def test_missing_tensor_is_named(make_plan: Callable[..., Plan], name: str) -> None:
    def remove(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    with pytest.raises(ModelFileError, match=name):
        make_plan(TinySpec(), remove)


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "blk.1.attn_q.weight", "blk.0.ffn_down.weight", "blk.0.attn_norm.weight"]
)
def test_tensor_of_another_shape_is_named(make_plan: Callable[..., Plan], name: str) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        data = tensors[name].data
        tensors[name].data = np.concatenate([data, data], axis=-1)

    with pytest.raises(ModelFileError, match=name):
        make_plan(TinySpec(), widen)


def test_tensor_that_nobody_would_read_is_refused(make_plan: Callable[..., Plan]) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["blk.0.attn_q.bias"] = Tensor(Kind.F32, np.zeros(128, np.float32))

    with pytest.raises(UnsupportedModelError, match=r"1 tensors.*blk\.0\.attn_q\.bias"):
        make_plan(TinySpec(), add)


def test_missing_norm_of_gemma3_is_named(make_plan: Callable[..., Plan]) -> None:
    def remove(tensors: dict[str, Tensor]) -> None:
        del tensors["blk.1.post_ffw_norm.weight"]

    with pytest.raises(ModelFileError, match="post_ffw_norm"):
        make_plan(TinySpec("gemma3"), remove)


def test_plan_counts_packed_bytes(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(TinySpec(format="Q4_1"))
    vectors = 4 * sum(plan.matrices.vectors.values())
    assert plan.matrices.num_bytes == vectors + sum(matrix.num_bytes for matrix in plan.matrices.matrices.values())
    with GgufFile.open(tmp_path / "tiny.gguf") as gguf:
        assert plan_matrices(gguf, read_config(gguf)).num_bytes == plan.matrices.num_bytes
