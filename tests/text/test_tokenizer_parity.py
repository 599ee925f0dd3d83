"""Token ids equal to llama.cpp's, on both real models, on every family of pre-tokenizers, on random vocabularies."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.text import pretokenizers
from headrace.text.tokenizer import Tokenizer

FAMILIES = [names.split()[0] for names, _ in pretokenizers.FAMILIES]


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_tokenizer_agrees_with_llama_cpp_on_real_models(
    model: str, texts: list[str], load_reference: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(model)
    path: Path = request.getfixturevalue(f"{model}_path")
    reference = load_reference(path)
    assert len(texts) >= 500
    assert reference.differences(tokenizer, texts) == []
    assert tokenizer.encode("hello", add_bos=True) == reference.encode("hello", add_bos=True)


@pytest.mark.parametrize("pre", FAMILIES)
def test_pre_tokenizer_agrees_with_llama_cpp(
    pre: str, smollm2_metadata: dict[str, Any], texts: list[str], vocabulary_reference: Callable[..., Any]
) -> None:
    metadata = {**smollm2_metadata, "tokenizer.ggml.pre": pre}
    del metadata["tokenizer.ggml.add_bos_token"]  # so that the pre-tokenizer decides
    tokenizer = Tokenizer.from_metadata(metadata)
    reference = vocabulary_reference(metadata)
    assert reference.differences(tokenizer, texts[::2]) == []
    assert tokenizer.encode("hello", add_bos=True) == reference.encode("hello", add_bos=True)


@pytest.mark.parametrize("seed", range(3))
def test_scores_agree_with_llama_cpp_on_random_vocabularies(
    seed: int, score_metadata: dict[str, Any], vocabulary_reference: Callable[..., Any]
) -> None:
    """Few letters, equal scores, tokens of characters that are no tokens, spaces inside of tokens."""
    source = random.Random(seed)
    words = {"".join(source.choices("ab▁é", k=source.randrange(2, 6))) for _ in range(60)}
    tokens = [
        *score_metadata["tokenizer.ggml.tokens"][:259],
        "aa",
        "<ab>",
        "<a",
        "b>",
        "a",
        "b",
        "▁",
        "<",
        *sorted(words - {"aa"}),
    ]
    metadata = score_metadata | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [4, 4] + [1] * (len(tokens) - 261),
        "tokenizer.ggml.scores": [float(source.randrange(-5, 3)) for _ in tokens],
        "tokenizer.ggml.add_space_prefix": seed != 1,
    }
    texts = ["".join(source.choices("aabb é▁<>", k=source.randrange(40))) for _ in range(200)]
    texts += [f"<s>{text}</s>{text}<unk>" for text in texts[:50]]
    assert vocabulary_reference(metadata).differences(Tokenizer.from_metadata(metadata), texts) == []


def test_byte_level_agrees_with_llama_cpp_on_a_vocabulary_without_all_bytes(
    byte_level_metadata: dict[str, Any], texts: list[str], vocabulary_reference: Callable[..., Any]
) -> None:
    """A byte without a token is dropped after merging, so that h, e around it are not merged."""
    byte_level_metadata["tokenizer.ggml.tokens"][ord("a")] = "unused"
    tokenizer = Tokenizer.from_metadata(byte_level_metadata)
    assert vocabulary_reference(byte_level_metadata).differences(tokenizer, ["hae", "haello", "aa", *texts[:100]]) == []
