"""Writes small GGUF files with random weights: two architectures, any tensor format, a byte-level tokenizer.

Files are written by the `gguf` package, so that nothing here shares a mistake with Headrace's reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize

END = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MERGES = ("h e", "t he", "Ġ t", "Ġt he", "a n", "an d", "Ġ a", "i n", "e r", "o u", "Ġ w", "u s", "us er", "o n", "r e", "l l")
# bytes of a block, where its float16 scales lie, and scales that make weights of about 1 / sqrt(256), centred on zero
_RANDOM_BLOCKS = {
    Kind.Q2_K: (84, {80: 2**-8, 82: 1.5 * 2**-8}),
    Kind.Q3_K: (110, {108: 2**-10}),
    Kind.Q4_K: (144, {0: 2**-12, 2: 7.5 * 2**-12}),
    Kind.Q5_K: (176, {0: 2**-13, 2: 15.5 * 2**-13}),
    Kind.Q6_K: (210, {208: 2**-14}),
}


@dataclass
class Tensor:
    """Rows of raw bytes of one format, or values that are not quantised yet."""

    kind: Kind
    data: np.ndarray


@dataclass(frozen=True)
class TinySpec:
    """A model to write. `formats` gives a format to every tensor whose name contains the key, the longest key first.

    Without `ends` the model never prefers a special token, so that greedy answers go on.
    """

    architecture: str = "llama"
    format: str = "F32"
    formats: Mapping[str, str] = field(default_factory=dict)
    embedding: int = 64
    feed_forward: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 32
    layers: int = 2
    context: int = 512
    tied: bool = True
    rope_factors: bool = False
    rope_scaling: float | None = None
    rotated: int | None = None
    window: int = 16
    seed: int = 0
    ends: bool = True
    template: str | None = TEMPLATE
    metadata: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        return len(vocabulary_tokens())


def vocabulary_tokens() -> list[str]:
    """256 bytes, the results of the merges, special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in printable}
    for number, byte in enumerate(byte for byte in range(256) if byte not in names):
        names[byte] = chr(256 + number)
    return [*(names[byte] for byte in range(256)), *(merge.replace(" ", "") for merge in _MERGES), *SPECIAL]


def write_model(path: Path, spec: TinySpec, edit: Callable[[dict[str, Tensor]], None] | None = None) -> Path:
    """Writes a model file; `edit` may change, add and remove tensors before they are written."""
    tensors = _tensors(spec)
    if edit is not None:
        edit(tensors)
    writer = gguf.GGUFWriter(path, spec.architecture)
    writer.add_name(f"tiny {spec.architecture}")
    _write_shape(writer, spec)
    _write_vocabulary(writer, spec)
    for key, value in spec.metadata.items():
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        kinds[type(value)](key, value)
    for name, tensor in tensors.items():
        if tensor.data.dtype == np.float32 and tensor.kind not in {Kind.F32, Kind.F16}:
            tensor.data = quantize(tensor.data, tensor.kind)
        elif tensor.kind == Kind.F16:
            tensor.data = tensor.data.astype(np.float16)
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_shape(writer: gguf.GGUFWriter, spec: TinySpec) -> None:
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.embedding)
    writer.add_feed_forward_length(spec.feed_forward)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_width)
    writer.add_value_length(spec.head_width)
    writer.add_rope_dimension_count(spec.rotated or spec.head_width)
    writer.add_layer_norm_rms_eps(1e-5)
    if spec.architecture == "gemma3":
        writer.add_sliding_window(spec.window)
        writer.add_rope_freq_base(1e6)
    if spec.rope_scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope_scaling)


def _write_vocabulary(writer: gguf.GGUFWriter, spec: TinySpec) -> None:
    tokens = vocabulary_tokens()
    normal = len(tokens) - len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * normal + [gguf.TokenType.CONTROL] * len(SPECIAL))
    writer.add_token_merges(list(_MERGES))
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index(END))
    writer.add_add_bos_token(False)
    if spec.template is not None:
        writer.add_chat_template(spec.template)


def _tensors(spec: TinySpec) -> dict[str, Tensor]:
    rng = np.random.default_rng(spec.seed)
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        chosen = max((key for key in spec.formats if key in name), key=len, default="")
        kind = Kind[spec.formats.get(chosen, spec.format)]
        if kind in _RANDOM_BLOCKS:
            tensors[name] = Tensor(kind, _random_blocks(rng, kind, rows, columns))
        else:
            values = rng.normal(size=(rows, columns)) * scale / np.sqrt(columns)
            tensors[name] = Tensor(kind, values.astype(np.float32))

    def norm(name: str, width: int) -> None:
        tensors[name] = Tensor(Kind.F32, (1 + 0.2 * rng.normal(size=width)).astype(np.float32))

    matrix("token_embd.weight", spec.vocabulary, spec.embedding, 4.0 if spec.architecture == "llama" else 1.0)
    if not spec.ends:
        tensors["token_embd.weight"].data[-len(SPECIAL) :] = 0
    if not spec.tied:
        matrix("output.weight", spec.vocabulary, spec.embedding, 4.0)
    norm("output_norm.weight", spec.embedding)
    if spec.rope_factors:
        factors = rng.uniform(1, 4, (spec.rotated or spec.head_width) // 2)
        tensors["rope_freqs.weight"] = Tensor(Kind.F32, factors.astype(np.float32))
    queries, keys = spec.heads * spec.head_width, spec.kv_heads * spec.head_width
    for layer in range(spec.layers):
        block = f"blk.{layer}."
        matrix(f"{block}attn_q.weight", queries, spec.embedding, 2.0)
        matrix(f"{block}attn_k.weight", keys, spec.embedding, 2.0)
        matrix(f"{block}attn_v.weight", keys, spec.embedding)
        matrix(f"{block}attn_output.weight", spec.embedding, queries)
        matrix(f"{block}ffn_gate.weight", spec.feed_forward, spec.embedding)
        matrix(f"{block}ffn_up.weight", spec.feed_forward, spec.embedding)
        matrix(f"{block}ffn_down.weight", spec.embedding, spec.feed_forward)
        norm(f"{block}attn_norm.weight", spec.embedding)
        norm(f"{block}ffn_norm.weight", spec.embedding)
        if spec.architecture == "gemma3":
            norm(f"{block}attn_q_norm.weight", spec.head_width)
            norm(f"{block}attn_k_norm.weight", spec.head_width)
            norm(f"{block}post_attention_norm.weight", spec.embedding)
            norm(f"{block}post_ffw_norm.weight", spec.embedding)
    return tensors


def _random_blocks(rng: np.random.Generator, kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Blocks of random bits with small scales, for formats that the `gguf` package does not quantise to."""
    block_bytes, scales = _RANDOM_BLOCKS[kind]
    blocks = rng.integers(0, 256, (rows, columns // 256, block_bytes), dtype=np.uint8)
    for offset, scale in scales.items():
        values = (scale * rng.uniform(0.5, 1.0, blocks.shape[:2])).astype(np.float16)
        blocks[:, :, offset : offset + 2] = values[:, :, None].view(np.uint8)
    return blocks.reshape(rows, -1)
