"""The shape of a model, whatever its architecture calls things."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Activation = Literal["silu", "gelu"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: angle(position, i) = position * scale * base^(-2i / rotated) / factors[i]."""

    base: float
    rotated: int
    scale: float = 1.0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerConfig:
    """What differs between layers: `window` tokens a query sees (0: all), and which of the model's ropes turns it."""

    window: int = 0
    rope: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """Everything the operations of a step depend on, apart from the formats of the weights."""

    architecture: str
    name: str
    context_tokens: int
    vocabulary: int
    embedding_width: int
    feed_forward_width: int
    heads: int
    kv_heads: int
    head_width: int
    norm_epsilon: float
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    query_scale: float = 1.0
    neighbour_pairs: bool = False
    """Rope turns neighbouring pairs: query and key rows are reordered when packed, so that kernels turn halves."""
    head_norms: bool = False
    """Queries and keys are normed head by head."""
    post_norms: bool = False
    """Attention and feed-forward outputs are normed before they are added."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    def to_json(self) -> dict[str, Any]:
        """A form that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_json`."""
        layers = tuple(LayerConfig(**layer) for layer in value["layers"])
        ropes = tuple(RopeConfig(**{**rope, "factors": tuple(rope["factors"])}) for rope in value["ropes"])
        return cls(**{**value, "layers": layers, "ropes": ropes})
