"""Gemma 3: five sliding-window layers to one that sees all, norms on heads and around blocks, GeGLU, scaled embeddings."""

from __future__ import annotations

import math

from headrace.model.architectures.common import read_rope, read_shape
from headrace.model.config import LayerConfig, ModelConfig
from headrace.weights.gguf import GgufFile

_PATTERN = 6  # every sixth layer sees the whole context
_LOCAL_BASE = 10000.0  # rope base of the sliding-window layers, which the file does not name
_LARGE_LAYERS = 62  # Gemma 3 27B, which scales queries by its embedding width instead of its head width


def read_config(gguf: GgufFile) -> ModelConfig:
    """The shape of a `gemma3` file."""
    shape = read_shape(gguf)
    window = gguf.require_int("gemma3.attention.sliding_window", minimum=1)
    whole = read_rope(gguf, shape.head_width, "gemma3.rope.freq_base", 1e6)
    local = read_rope(gguf, shape.head_width, "gemma3.rope.freq_base_swa", _LOCAL_BASE)
    # position scaling stretches the layers that see all; a window is never stretched
    local = type(local)(base=local.base, rotated=local.rotated)
    width = shape.embedding_width // shape.heads if shape.layers == _LARGE_LAYERS else shape.head_width
    return ModelConfig(
        architecture="gemma3",
        name=shape.name,
        context_tokens=shape.context_tokens,
        vocabulary=shape.vocabulary,
        embedding_width=shape.embedding_width,
        feed_forward_width=shape.feed_forward_width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_width=shape.head_width,
        norm_epsilon=shape.norm_epsilon,
        layers=tuple(
            LayerConfig(window=0, rope=0) if (layer + 1) % _PATTERN == 0 else LayerConfig(window=window, rope=1)
            for layer in range(shape.layers)
        ),
        ropes=(whole, local),
        activation="gelu",
        embedding_scale=math.sqrt(shape.embedding_width),
        query_scale=1 / math.sqrt(width),
        head_norms=True,
        post_norms=True,
    )
