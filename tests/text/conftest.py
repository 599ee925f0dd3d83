"""Texts on which tokenizers disagree when one of them is wrong, llama.cpp to compare with, and small vocabularies."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.text.byte_level import CHARACTERS
from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GgufFile

Metadata = dict[str, Any]

FIXED: list[str] = json.loads(Path(__file__).with_name("corpus.json").read_text(encoding="utf-8"))

_RANGES = [
    (0x20, 0x7F),
    (0x20, 0x7F),
    (0xA0, 0x180),
    (0x300, 0x370),
    (0x370, 0x530),
    (0x590, 0x700),
    (0x900, 0xA00),
    (0xE00, 0xF00),
    (0x2000, 0x2070),
    (0x2190, 0x2400),
    (0x2600, 0x27C0),
    (0x3000, 0x3100),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A0),
    (0xE000, 0xE100),
    (0xFE00, 0x10000),
    (0x1F300, 0x1FA00),
    (0x20000, 0x2A000),
    (0xE0100, 0xE01F0),
    (0x10000, 0x11000),
    (0x0, 0x20),
]
_BITS = [
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", " \n", "a", "the", " the", "ing", "A", "Z", "é", "ß", "1", "23", "456"),
    *(".", ",", "!", "'s", "'ll", "'", "<", ">", "|", "<|im_end|>", "<bos>", "</", "<b>", "_", "▁", "=", "()", "//"),
    *("中", "文字", "あ", "한", "ا", "ل", "न", "\u094d", "\u0301", "\u200d", "😀", "👩", "\ufe0f", "\u00a0", "\u3000"),
    *("\x00", "\x1c", "\x85", "$", "+", "`", "^", "~", "-", "/", "½", "²"),
]


def _random_texts(count: int, seed: int) -> list[str]:
    """Half of the texts are random characters of many scripts, half are random sequences of awkward bits."""
    source = random.Random(seed)
    texts = []
    for index in range(count):
        length = source.randrange(1, 60)
        if index % 2:
            texts.append("".join(source.choice(_BITS) for _ in range(length)))
            continue
        ranges = source.sample(_RANGES, source.randrange(1, 5))
        texts.append("".join(chr(source.randrange(*source.choice(ranges))) for _ in range(length)))
    return texts


class Reference:
    """llama.cpp's tokenizer: the endpoint /tokenize of the server that the package xllamacpp runs in this process."""

    def __init__(self, path: Path) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 64
        params.n_parallel = 1
        params.warmup = False
        self._server = xllamacpp.Server(params)

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        body = {"content": text, "parse_special": parse_special, "add_special": add_bos}
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]

    def differences(self, tokenizer: Tokenizer, texts: list[str]) -> list[tuple[bool, str, list[str], list[str]]]:
        """Whether special texts were recognised, the text, our tokens, llama.cpp's tokens."""
        found = []
        for text in texts:
            for parse_special in (False, True):
                ours = tokenizer.encode(text, parse_special=parse_special)
                theirs = self.encode(text, parse_special=parse_special)
                if ours != theirs:
                    named = ([tokenizer.token_text(token_id) for token_id in ids] for ids in (ours, theirs))
                    found.append((parse_special, text, *named))
        return found


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Over 500 texts."""
    return [*FIXED, *_random_texts(300, seed=1)]


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> Metadata:
    with GgufFile.open(smollm2_path) as file:
        return dict(file.metadata)


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: Metadata) -> Tokenizer:
    return Tokenizer.from_metadata(smollm2_metadata)


@pytest.fixture(scope="session")
def gemma3(gemma3_path: Path) -> Tokenizer:
    with GgufFile.open(gemma3_path) as file:
        return Tokenizer.from_metadata(file.metadata)


@pytest.fixture(scope="session")
def load_reference() -> Callable[[Path], Reference]:
    return Reference


@pytest.fixture
def vocabulary_reference(tmp_path: Path) -> Callable[[Mapping[str, Any]], Reference]:
    """llama.cpp with a vocabulary of choice and a model of one layer of zeros."""

    def load(metadata: Mapping[str, Any]) -> Reference:
        path = tmp_path / "vocabulary.gguf"
        _write_gguf(path, metadata)
        return Reference(path)

    return load


def _write_gguf(path: Path, metadata: Mapping[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    width, vocab_size = 32, len(metadata["tokenizer.ggml.tokens"])
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width)
    for key, value in metadata.items():
        if key.startswith("tokenizer.ggml."):
            add = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32}.get(type(value))
            if add is not None:
                add(key, value)
            elif key.endswith("scores"):
                writer.add_array(key, [float(score) for score in value])
            else:
                writer.add_array(key, [item if isinstance(item, str) else int(item) for item in value])
    writer.add_tensor("token_embd.weight", np.zeros((vocab_size, width), np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.zeros(width, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((width, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def byte_level_metadata() -> Metadata:
    """256 bytes, six merged tokens, two control tokens, one user-defined token."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ċ Ċ"]
    tokens = [*CHARACTERS, *(merge.replace(" ", "") for merge in merges), "<s>", "</s>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * 262 + [3, 3, 4], np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 262,
        "tokenizer.ggml.eos_token_id": 263,
    }


@pytest.fixture
def score_metadata() -> Metadata:
    """The unknown token, BOS, EOS, 256 bytes, a user-defined token, nine characters, six merged tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tool>", *"▁helowrd!"]
    merged = ["he", "ll", "hell", "hello", "▁hello", "▁w"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + merged,
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [4] + [1] * 15, np.int32),
        "tokenizer.ggml.scores": np.array([0.0] * 269 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
