"""Which matrices a step multiplies with, and how they are made of a file's tensors.

Matrices that read the same activations are joined where their formats agree: queries, keys and values into one, gate
and up into one whose groups of 16 rows alternate. A plan names everything once; packing, executing and counting bytes
all read it. Holds no weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelFileError, UnsupportedModelError
from headrace.kernels.packed import PACKED, ROWS, PackedFormat, groups, packed_bytes
from headrace.model.config import ModelConfig
from headrace.weights.gguf import GgufFile, GgufTensor
from headrace.weights.metadata import shown

_ROPE_FACTORS = "rope_freqs.weight"  # read by the architecture


@dataclass(frozen=True)
class Matrix:
    """A packed matrix: `tensors` one below the other, or group by group in turn if `gated`.

    `pairs_of_heads` names the tensors whose rows are reordered, head by head, from neighbouring pairs to halves.
    """

    name: str
    format: str
    rows: int
    columns: int
    tensors: tuple[str, ...]
    gated: bool = False
    pairs_of_heads: tuple[str, ...] = ()

    @property
    def layout(self) -> PackedFormat:
        """How its units lie in memory."""
        return PACKED[self.format]

    @property
    def groups(self) -> int:
        """Groups of 16 rows."""
        return groups(self.rows)

    @property
    def num_bytes(self) -> int:
        """Packed size."""
        return packed_bytes(self.layout, self.rows, self.columns)

    def to_json(self) -> dict[str, Any]:
        """A form that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Matrix:
        """The inverse of `to_json`."""
        return cls(**{**value, "tensors": tuple(value["tensors"]), "pairs_of_heads": tuple(value["pairs_of_heads"])})


@dataclass(frozen=True)
class Matrices:
    """All matrices and vectors of a model, by name. Vectors (norm weights) are float32."""

    matrices: dict[str, Matrix]
    vectors: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """Packed size of all matrices and vectors."""
        return sum(matrix.num_bytes for matrix in self.matrices.values()) + 4 * sum(self.vectors.values())

    def part(self, layer: int, tensor: str) -> tuple[Matrix, int]:
        """The matrix that holds a layer's tensor, and the tensor's number within it."""
        name = f"blk.{layer}.{tensor}.weight"
        for matrix in self.matrices.values():
            if name in matrix.tensors:
                return matrix, matrix.tensors.index(name)
        raise KeyError(name)


def plan_matrices(gguf: GgufFile, config: ModelConfig) -> Matrices:
    """Checks that every tensor is there with the right shape, and says how they are joined.

    Raises:
        ModelFileError: a tensor is missing or has another shape.
        UnsupportedModelError: there are tensors that this architecture does not have.
    """
    planner = _Planner(gguf, config)
    for layer in range(len(config.layers)):
        planner.add_layer(layer)
    planner.add_ends()
    planner.check_complete()
    return Matrices(planner.matrices, planner.vectors)


class _Planner:
    def __init__(self, gguf: GgufFile, config: ModelConfig) -> None:
        self._gguf, self._config = gguf, config
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, int] = {}

    def add_layer(self, layer: int) -> None:
        config = self._config
        width, head = config.embedding_width, config.head_width
        rows = {
            "attn_q": config.heads * head,
            "attn_k": config.kv_heads * head,
            "attn_v": config.kv_heads * head,
        }
        projections = [self._matrix(layer, name, count, width) for name, count in rows.items()]
        turned = [self._name(layer, name) for name in ("attn_q", "attn_k")] if config.neighbour_pairs else []
        for _, same in groupby(projections, key=lambda tensor: tensor.format.name):
            self._add(f"{layer}.qkv", list(same), pairs_of_heads=tuple(turned))
        self._add(f"{layer}.output", [self._matrix(layer, "attn_output", width, config.heads * head)])
        gate = self._matrix(layer, "ffn_gate", config.feed_forward_width, width)
        up = self._matrix(layer, "ffn_up", config.feed_forward_width, width)
        if gate.format == up.format and config.feed_forward_width % ROWS == 0:
            self._add(f"{layer}.gate_up", [gate, up], gated=True)
        else:
            self._add(f"{layer}.gate", [gate])
            self._add(f"{layer}.up", [up])
        self._add(f"{layer}.down", [self._matrix(layer, "ffn_down", width, config.feed_forward_width)])
        self._vector(self._name(layer, "attn_norm"), width)
        self._vector(self._name(layer, "ffn_norm"), width)
        if config.head_norms:
            self._vector(self._name(layer, "attn_q_norm"), head)
            self._vector(self._name(layer, "attn_k_norm"), head)
        if config.post_norms:
            self._vector(self._name(layer, "post_attention_norm"), width)
            self._vector(self._name(layer, "post_ffw_norm"), width)

    def add_ends(self) -> None:
        shape = (self._config.vocabulary, self._config.embedding_width)
        embedding = self._gguf.require_tensor("token_embd.weight", shape)
        self._add("embedding", [embedding])
        if "output.weight" in self._gguf.tensors:
            self._add("logits", [self._gguf.require_tensor("output.weight", shape)])
        self._vector("output_norm.weight", self._config.embedding_width)

    def check_complete(self) -> None:
        """Refuses files with tensors that nobody reads: a bias or an adapter left out would change every answer."""
        read = {name for matrix in self.matrices.values() for name in matrix.tensors} | set(self.vectors) | {_ROPE_FACTORS}
        unread = [name for name in self._gguf.tensors if name not in read]
        if unread:
            raise UnsupportedModelError(
                f"{self._gguf.path.name} has {len(unread)} tensors that its architecture "
                f"{self._config.architecture!r} does not have here, the first is {shown(unread[0])}: use another model"
            )

    @staticmethod
    def _name(layer: int, tensor: str) -> str:
        return f"blk.{layer}.{tensor}.weight"

    def _matrix(self, layer: int, tensor: str, rows: int, columns: int) -> GgufTensor:
        return self._gguf.require_tensor(self._name(layer, tensor), (rows, columns))

    def _vector(self, name: str, width: int) -> None:
        self._gguf.require_tensor(name, (width,))
        self.vectors[name] = width

    def _add(self, name: str, tensors: list[GgufTensor], *, gated: bool = False, pairs_of_heads: tuple[str, ...] = ()) -> None:
        columns = tensors[0].shape[1]
        unit = PACKED[tensors[0].format.name].unit_columns
        if columns % unit:
            raise ModelFileError(
                f"{self._gguf.path.name} has tensor {tensors[0].name!r} with {columns} columns in {tensors[0].format.name}, "
                f"which takes multiples of {unit}: the file is damaged"
            )
        if name in self.matrices:  # queries, keys and values in more than one run of formats
            name = f"{name}.{tensors[0].name}"
        names = tuple(tensor.name for tensor in tensors)
        self.matrices[name] = Matrix(
            name=name,
            format=tensors[0].format.name,
            rows=sum(tensor.shape[0] for tensor in tensors),
            columns=columns,
            tensors=names,
            gated=gated,
            pairs_of_heads=tuple(tensor for tensor in names if tensor in pairs_of_heads),
        )


def raw_rows(gguf: GgufFile, matrix: Matrix) -> npt.NDArray[np.uint8]:
    """The GGUF rows of a matrix's tensors, one below the other: uint8 [rows, row bytes]."""
    parts = [gguf.tensors[name] for name in matrix.tensors]
    arrays = [part.raw.reshape(part.shape[0], -1) for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def row_order(gguf: GgufFile, matrix: Matrix, config: ModelConfig) -> npt.NDArray[np.intp] | None:
    """Row i of the packed matrix is row order[i] of `raw_rows`; None if they are the same."""
    if matrix.gated:
        half = matrix.rows // 2
        pairs = np.arange(matrix.rows).reshape(2, half // ROWS, ROWS)
        return np.ascontiguousarray(pairs.transpose(1, 0, 2)).reshape(-1)
    if not matrix.pairs_of_heads:
        return None
    order, start = [], 0
    for name in matrix.tensors:
        rows = gguf.tensors[name].shape[0]
        numbers = np.arange(start, start + rows)
        if name in matrix.pairs_of_heads:
            numbers = _halves(numbers, config)
        order.append(numbers)
        start += rows
    return np.concatenate(order)


def _halves(numbers: npt.NDArray[np.intp], config: ModelConfig) -> npt.NDArray[np.intp]:
    """Within each head: even rotated rows, then odd ones, then those that are not rotated."""
    rotated = config.ropes[0].rotated
    heads = numbers.reshape(-1, config.head_width)
    turned = heads[:, :rotated]
    return np.concatenate([turned[:, 0::2], turned[:, 1::2], heads[:, rotated:]], axis=1).reshape(-1)
