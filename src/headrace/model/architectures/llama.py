"""Llama and what shares its shape (Mistral, SmolLM2, Llama 2 and 3): RMS norm, rope over neighbouring pairs, SwiGLU."""

from __future__ import annotations

import math

from headrace.errors import UnsupportedModelError
from headrace.model.architectures.common import read_rope, read_shape
from headrace.model.config import LayerConfig, ModelConfig
from headrace.weights.gguf import GgufFile


def read_config(gguf: GgufFile) -> ModelConfig:
    """The shape of a `llama` file; mixtures of experts are refused."""
    experts = gguf.get_int("llama.expert_count", 0)
    if experts:
        raise UnsupportedModelError(f"{gguf.path.name} is a mixture of {experts} experts, which Headrace does not run yet")
    shape = read_shape(gguf)
    return ModelConfig(
        architecture="llama",
        name=shape.name,
        context_tokens=shape.context_tokens,
        vocabulary=shape.vocabulary,
        embedding_width=shape.embedding_width,
        feed_forward_width=shape.feed_forward_width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_width=shape.head_width,
        norm_epsilon=shape.norm_epsilon,
        layers=(LayerConfig(),) * shape.layers,
        ropes=(read_rope(gguf, shape.head_width, "llama.rope.freq_base", 10000.0),),
        query_scale=1 / math.sqrt(shape.head_width),
        neighbour_pairs=True,
    )
