"""Metadata that architectures share, read and checked in one place."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ModelFileError, UnsupportedModelError
from headrace.model.config import RopeConfig
from headrace.weights.gguf import GgufFile

_MAX_LAYERS = 512  # several steps in one program have to stay below 2^16 operations; real models have up to 126 layers
_MAX_WIDTH = 1 << 20
_HEAD_MULTIPLE = 32
_MAX_CONTEXT = 1 << 24


@dataclass(frozen=True)
class Shape:
    """The numbers every decoder has."""

    name: str
    layers: int
    context_tokens: int
    vocabulary: int
    embedding_width: int
    feed_forward_width: int
    heads: int
    kv_heads: int
    head_width: int
    norm_epsilon: float


def read_shape(gguf: GgufFile) -> Shape:
    """Reads and checks the common keys of `general.architecture`.

    Raises:
        ModelFileError: a key is missing, out of range or at odds with another.
        UnsupportedModelError: a width is not one the kernels can take.
    """
    prefix = gguf.require_str("general.architecture")
    heads = gguf.require_int(f"{prefix}.attention.head_count", minimum=1, maximum=_MAX_WIDTH)
    kv_heads = gguf.get_int(f"{prefix}.attention.head_count_kv", heads, minimum=1, maximum=heads)
    width = gguf.require_int(f"{prefix}.embedding_length", minimum=1, maximum=_MAX_WIDTH)
    head_width = gguf.get_int(f"{prefix}.attention.key_length", width // heads, minimum=1, maximum=_MAX_WIDTH)
    value_width = gguf.get_int(f"{prefix}.attention.value_length", head_width, minimum=1, maximum=_MAX_WIDTH)
    feed_forward = gguf.require_int(f"{prefix}.feed_forward_length", minimum=1, maximum=_MAX_WIDTH)
    if heads % kv_heads:
        raise ModelFileError(
            f"{gguf.path.name} has {heads} heads on {kv_heads} KV heads, which do not divide: the file is damaged"
        )
    if value_width != head_width:
        raise UnsupportedModelError(
            f"{gguf.path.name} has keys of width {head_width} and values of width {value_width}: "
            "Headrace runs equal widths only"
        )
    for label, number in (("head width", head_width), ("embedding width", width), ("feed-forward width", feed_forward)):
        if number % _HEAD_MULTIPLE:
            raise UnsupportedModelError(
                f"{gguf.path.name} has {label} {number}: Headrace runs multiples of {_HEAD_MULTIPLE} only"
            )
    embedding = gguf.require_tensor("token_embd.weight")
    return Shape(
        name=gguf.get_str("general.name", gguf.path.stem),
        layers=gguf.require_int(f"{prefix}.block_count", minimum=1, maximum=_MAX_LAYERS),
        context_tokens=gguf.require_int(f"{prefix}.context_length", minimum=1, maximum=_MAX_CONTEXT),
        vocabulary=embedding.shape[0],
        embedding_width=width,
        feed_forward_width=feed_forward,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        norm_epsilon=gguf.require_float(f"{prefix}.attention.layer_norm_rms_epsilon", minimum=0.0, maximum=1.0),
    )


def read_rope(gguf: GgufFile, head_width: int, base_key: str, default_base: float) -> RopeConfig:
    """Rotation from `rope.*` keys and the optional tensor of frequency factors.

    Raises:
        UnsupportedModelError: a scaling is asked for that is not known here.
        ModelFileError: a key or the tensor is out of range.
    """
    prefix = gguf.require_str("general.architecture")
    rotated = gguf.get_int(f"{prefix}.rope.dimension_count", head_width, minimum=2, maximum=head_width)
    if rotated % _HEAD_MULTIPLE:
        raise UnsupportedModelError(
            f"{gguf.path.name} rotates {rotated} dimensions of a head: Headrace rotates multiples of {_HEAD_MULTIPLE} only"
        )
    base = gguf.get_float(base_key, default_base, minimum=1.0, maximum=1e12)
    # a factor alone means linear scaling, as in llama.cpp
    implied = "linear" if f"{prefix}.rope.scaling.factor" in gguf.metadata else "none"
    kind = gguf.get_str(f"{prefix}.rope.scaling.type", implied)
    scale = 1.0
    if kind == "linear":
        scale = 1.0 / gguf.require_float(f"{prefix}.rope.scaling.factor", minimum=1e-6, maximum=1e6)
    elif kind != "none":
        raise UnsupportedModelError(f"{gguf.path.name} scales positions by {kind!r}: Headrace knows 'none' and 'linear'")
    factors: tuple[float, ...] = ()
    if "rope_freqs.weight" in gguf.tensors:
        values = gguf.require_tensor("rope_freqs.weight").dequantise().reshape(-1)
        if len(values) != rotated // 2 or not (values > 0).all():
            raise ModelFileError(f"{gguf.path.name} has {len(values)} rope factors where {rotated // 2} positive ones belong")
        factors = tuple(float(value) for value in values)
    return RopeConfig(base=base, rotated=rotated, scale=scale, factors=factors)
