"""A forward pass in NumPy, float64 throughout, from the weights that the `gguf` package dequantises.

Written from the models' definitions, one position's attention at a time, with nothing of Headrace in it. It rounds where
Headrace rounds on purpose (keys and values to float16, inputs of quantised matrices to signed bytes), so that what is
left to differ is the rounding of float32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

_FLOATS = {Kind.F32, Kind.F16, Kind.BF16}
_GLOBAL_EVERY = 6  # layers of Gemma 3: every sixth sees all


class SlowModel:
    """One model file; `logits` computes a whole sequence."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self._kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
        self._weights = {t.name: dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
        self.architecture = self._fields["general.architecture"]
        self._gemma = self.architecture == "gemma3"

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits after each token, float64 [T, V]."""
        weights = self._weights
        x = weights["token_embd.weight"][list(token_ids)]
        if self._gemma:
            x = x * np.sqrt(x.shape[1])
        for layer in range(self._number("block_count")):
            x = x + self._attention(x, layer)
            x = x + self._feed_forward(x, layer)
        name = "output.weight" if "output.weight" in weights else "token_embd.weight"
        return self._times(self._norm(x, "output_norm.weight"), name)

    def _attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        heads, kv_heads, width = (self._number(f"attention.{key}") for key in ("head_count", "head_count_kv", "key_length"))
        block, tokens = f"blk.{layer}.", len(x)
        h = self._norm(x, f"{block}attn_norm.weight")
        q = self._times(h, f"{block}attn_q.weight").reshape(tokens, heads, width)
        k = self._times(h, f"{block}attn_k.weight").reshape(tokens, kv_heads, width)
        v = self._times(h, f"{block}attn_v.weight").reshape(tokens, kv_heads, width)
        if self._gemma:
            q, k = self._norm(q, f"{block}attn_q_norm.weight"), self._norm(k, f"{block}attn_k_norm.weight")
        local = self._gemma and (layer + 1) % _GLOBAL_EVERY != 0
        q, k = self._rotate(q, local), self._rotate(k, local)
        k, v = (part.astype(np.float16).astype(np.float64) for part in (k, v))
        attended = np.zeros((tokens, heads, width))
        for t in range(tokens):
            first = max(0, t - self._number("attention.sliding_window") + 1) if local else 0
            for head in range(heads):
                g = head // (heads // kv_heads)
                scores = k[first : t + 1, g] @ q[t, head] / np.sqrt(width)
                shares = np.exp(scores - scores.max())
                attended[t, head] = shares @ v[first : t + 1, g] / shares.sum()
        out = self._times(attended.reshape(tokens, -1), f"{block}attn_output.weight")
        return self._norm(out, f"{block}post_attention_norm.weight") if self._gemma else out

    def _feed_forward(self, x: np.ndarray, layer: int) -> np.ndarray:
        block = f"blk.{layer}."
        h = self._norm(x, f"{block}ffn_norm.weight")
        gate = self._times(h, f"{block}ffn_gate.weight")
        if self._gemma:
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        out = self._times(gate * self._times(h, f"{block}ffn_up.weight"), f"{block}ffn_down.weight")
        return self._norm(out, f"{block}post_ffw_norm.weight") if self._gemma else out

    def _rotate(self, x: np.ndarray, local: bool) -> np.ndarray:
        """Turns pairs of dimensions of [T, heads, D]: neighbours for llama, as its files are written, halves for gemma3."""
        rotated = self._number("rope.dimension_count")
        base = self._fields.get(f"{self.architecture}.rope.freq_base", 10000.0) if not local else 10000.0
        frequencies = base ** (-2 * np.arange(rotated // 2) / rotated)
        if not local:
            frequencies = frequencies / self._fields.get(f"{self.architecture}.rope.scaling.factor", 1.0)
            frequencies = frequencies / self._weights.get("rope_freqs.weight", 1.0)
        angles = np.arange(len(x))[:, None, None] * frequencies
        half = rotated // 2
        first = slice(0, half) if self._gemma else slice(0, rotated, 2)
        second = slice(half, rotated) if self._gemma else slice(1, rotated, 2)
        turned = x.copy()
        turned[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
        turned[..., second] = x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles)
        return turned

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        epsilon = self._fields[f"{self.architecture}.attention.layer_norm_rms_epsilon"]
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * self._weights[name]

    def _times(self, x: np.ndarray, name: str) -> np.ndarray:
        """x times a matrix's transpose; x is rounded to 255 levels per 32 columns if the matrix is quantised."""
        if self._kinds[name] not in _FLOATS:
            blocks = x.reshape(len(x), -1, 32)
            scale = np.abs(blocks).max(axis=2, keepdims=True) / 127
            x = (np.round(blocks / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape)
        return x @ self._weights[name].T

    def _number(self, key: str) -> int:
        return int(self._fields[f"{self.architecture}.{key}"])
