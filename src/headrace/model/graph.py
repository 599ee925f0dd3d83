"""The operations of a step, in order: what the engine executes and what the ledger counts.

A step takes T new tokens (rows) of any sequences. Buffers hold one row per token:

    x0, x1      float32 [E]    the residual stream, in turn, so that no operation writes what it reads
    normed      quantised [E]  input of a layer's matrices (float32 too, where a matrix wants it)
    qkv         float32 [(H + 2G) D]
    queries     float32 [H D]  rotated and scaled
    states      float32        attention's partial results, see `kernels/attention.py`
    attended    quantised [H D]
    added       float32 [E]    what attention or feed-forward adds to the residual stream
    gated       float32 [F]    (gate and up apart: gate, up)
    hidden      quantised [F]
    last        quantised [E]  one row per token whose logits are wanted
    logits      float32 [V]
    scores      float32 [V]    logits with biases, penalties and mask, of the rows that have any
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from headrace.model.config import ModelConfig
from headrace.model.matrices import Matrices, Matrix


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What every operation has: its name in the ledger, and its layer (-1 outside of layers).

    `waits` says that all operations before it must be complete; without it, it may run beside the one before.
    """

    name: str
    layer: int
    waits: bool = True


@dataclass(frozen=True, kw_only=True)
class Embed(Operation):
    """x0 = rows of the embedding matrix."""

    matrix: Matrix
    output: str = "x0"


@dataclass(frozen=True, kw_only=True)
class Rows(Operation):
    """Sum, norm and quantisation of rows, see `kernels/rows.py`. Names of vectors and buffers; '' where there is none."""

    columns: int
    source: str
    output: str
    addend: str = ""
    addend_norm: str = ""
    weight: str = ""
    total: str = ""
    quantised: bool = True
    floats: bool = False
    combine: str = ""
    last_rows: bool = False


@dataclass(frozen=True, kw_only=True)
class Product(Operation):
    """output[:, at:] = matrix times source; gated matrices give half as many columns."""

    matrix: Matrix
    source: str
    output: str
    at: int = 0
    activation: str = ""
    last_rows: bool = False


@dataclass(frozen=True, kw_only=True)
class Rope(Operation):
    """Rotates queries and keys, writes keys and values into pages."""

    query_norm: str = ""
    key_norm: str = ""


@dataclass(frozen=True, kw_only=True)
class Attention(Operation):
    """States of all new tokens over the past and themselves."""

    window: int = 0


@dataclass(frozen=True, kw_only=True)
class Merge(Operation):
    """Divides and quantises attention's states."""

    quantised: bool = True
    floats: bool = False


@dataclass(frozen=True, kw_only=True)
class Find(Operation):
    """Edits the logits of each part of a row and finds the largest, see `kernels/choose.py`."""


@dataclass(frozen=True, kw_only=True)
class Choose(Operation):
    """The token that follows each row, the most likely one or one that is drawn."""


def choosing_graph(graph: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """A step that also chooses the tokens that follow."""
    return (*graph, Find(name="choose", layer=-1), Choose(name="choose", layer=-1))


def build_graph(config: ModelConfig, matrices: Matrices) -> tuple[Operation, ...]:
    """The operations of every step of a model."""
    return tuple(_Builder(config, matrices).build())


class _Builder:
    def __init__(self, config: ModelConfig, matrices: Matrices) -> None:
        self._config, self._matrices = config, matrices
        self._stream = "x0"

    def build(self) -> list[Operation]:
        config, found = self._config, self._matrices.matrices
        ops: list[Operation] = [Embed(name="embed", layer=-1, matrix=found["embedding"])]
        for layer in range(len(config.layers)):
            ops += self._layer(layer)
        logits = found.get("logits", found["embedding"])
        ops.append(self._norm("last_norm", -1, "output_norm.weight", "last", [logits], post="post_ffw_norm", last_rows=True))
        ops.append(Product(name="logits", layer=-1, matrix=logits, source="last", output="logits", last_rows=True))
        return ops

    def _layer(self, layer: int) -> list[Operation]:
        config, found = self._config, self._matrices.matrices
        projections = [matrix for name, matrix in found.items() if name.split(".", 2)[:2] == [str(layer), "qkv"]]
        output, down = found[f"{layer}.output"], found[f"{layer}.down"]
        ops: list[Operation] = [
            self._norm("attention_norm", layer, f"blk.{layer}.attn_norm.weight", "normed", projections, post="post_ffw_norm")
        ]
        at = 0
        for number, matrix in enumerate(projections):
            ops.append(Product(name="qkv", layer=layer, waits=number == 0, matrix=matrix, source="normed", output="qkv", at=at))
            at += matrix.rows
        ops.append(
            Rope(
                name="rope",
                layer=layer,
                query_norm=f"blk.{layer}.attn_q_norm.weight" if config.head_norms else "",
                key_norm=f"blk.{layer}.attn_k_norm.weight" if config.head_norms else "",
            )
        )
        ops.append(Attention(name="attention", layer=layer, window=config.layers[layer].window))
        ops.append(Merge(name="merge", layer=layer, **_wanted([output])))
        ops.append(Product(name="output", layer=layer, matrix=output, source="attended", output="added"))
        ops += self._feed_forward(layer)
        ops.append(Product(name="down", layer=layer, matrix=down, source="hidden", output="added"))
        return ops

    def _feed_forward(self, layer: int) -> list[Operation]:
        config, found = self._config, self._matrices.matrices
        norm, down = f"blk.{layer}.ffn_norm.weight", _wanted([found[f"{layer}.down"]])
        width = config.feed_forward_width
        joined = found.get(f"{layer}.gate_up")
        if joined is not None:
            return [
                self._norm("feed_forward_norm", layer, norm, "normed", [joined], post="post_attention_norm"),
                Product(
                    name="gate_up",
                    layer=layer,
                    matrix=joined,
                    source="normed",
                    output="gated",
                    activation=config.activation,
                ),
                Rows(name="quantise", layer=layer, columns=width, source="gated", output="hidden", **down),
            ]
        gate, up = found[f"{layer}.gate"], found[f"{layer}.up"]
        return [
            self._norm("feed_forward_norm", layer, norm, "normed", [gate, up], post="post_attention_norm"),
            Product(name="gate_up", layer=layer, matrix=gate, source="normed", output="gate"),
            Product(name="gate_up", layer=layer, waits=False, matrix=up, source="normed", output="up"),
            Rows(
                name="quantise",
                layer=layer,
                columns=width,
                source="gate",
                addend="up",
                combine=config.activation,
                output="hidden",
                **down,
            ),
        ]

    def _norm(
        self, name: str, layer: int, weight: str, output: str, readers: list[Matrix], *, post: str, last_rows: bool = False
    ) -> Rows:
        """A norm of the residual stream, after adding what the block before left in `added`."""
        source = self._stream
        first = layer == 0 and name == "attention_norm"
        if not first:
            self._stream = "x1" if source == "x0" else "x0"
        # a layer's first norm adds what the layer before it left
        owner = layer if name == "feed_forward_norm" else (len(self._config.layers) if layer < 0 else layer) - 1
        return Rows(
            name=name,
            layer=layer,
            columns=self._config.embedding_width,
            source=source,
            addend="" if first else "added",
            addend_norm=f"blk.{owner}.{post}.weight" if self._config.post_norms and not first else "",
            weight=weight,
            total="" if first or last_rows else self._stream,
            output=output,
            last_rows=last_rows,
            **_wanted(readers),
        )


class _Parts(TypedDict):
    """Parts of an activation row."""

    quantised: bool
    floats: bool


def _wanted(readers: list[Matrix]) -> _Parts:
    """Which forms of a row its readers want."""
    integers = [reader.layout.integer_activations for reader in readers]
    return {"quantised": any(integers), "floats": not all(integers)}


def activation_row_bytes(columns: int, *, quantised: bool, floats: bool) -> tuple[int, int]:
    """Bytes of the two parts of an activation row: quantised, padded to 64, and float32."""
    padded = -(-(columns + columns // 2) // 64) * 64
    return (padded if quantised else 0), (4 * columns if floats else 0)
