from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import ModelFileError, UnsupportedModelError
from headrace.text.tokenizer import Tokenizer
from headrace.text.vocabulary import Vocabulary

KEY = "tokenizer.ggml."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": None}, "tokenizer.ggml.model"),
        ({"model": 7}, "7"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": []}, "is empty"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens"),
        ({"tokens": ["a", "a"]}, "'a'"),
        ({"tokens": ["a", b"b"]}, "token 1"),
        ({"tokens": ["a", "\udcff"]}, "token 1"),
        ({"token_type": [1, 1]}, "2 entries for 265 tokens"),
        ({"token_type": [9] * 265}, "9"),
        ({"token_type": [-1] * 265}, "-1"),
        ({"token_type": [1.5] * 265}, "1.5"),
        ({"token_type": [6] * 265}, "byte token"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": ["h e", "he"]}, "merge 1"),
        ({"merges": ["h e", 3]}, "merge 1"),
        ({"merges": ["he xx"]}, "'xx'"),
        ({"merges": ["e h"]}, "'eh'"),
        ({"bos_token_id": 265}, "265"),
        ({"eos_token_id": -1}, "-1"),
        ({"eot_token_id": 9999}, "9999"),
        ({"eos_token_id": "2"}, "'2'"),
        ({"add_bos_token": 3}, "3"),
    ],
)
def test_vocabulary_refuses_inconsistent_metadata(
    byte_level_metadata: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    for key, value in change.items():
        byte_level_metadata[KEY + key] = value
    with pytest.raises(ModelFileError, match="file") as caught:
        Tokenizer.from_metadata(byte_level_metadata)
    assert words in str(caught.value)
    assert not isinstance(caught.value, UnsupportedModelError)


@pytest.mark.parametrize("scores", [None, [0.0], [float("nan")] * 275, ["x"] * 275, [1e300] * 275])
def test_vocabulary_refuses_damaged_scores(score_metadata: dict[str, Any], scores: list[Any] | None) -> None:
    score_metadata[KEY + "scores"] = scores
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.scores"):
        Tokenizer.from_metadata(score_metadata)


@pytest.mark.parametrize(("key", "name"), [("model", "bert"), ("pre", "never-heard-of")])
def test_vocabulary_names_what_it_does_not_support(byte_level_metadata: dict[str, Any], key: str, name: str) -> None:
    byte_level_metadata[KEY + key] = name
    with pytest.raises(UnsupportedModelError, match=name):
        Tokenizer.from_metadata(byte_level_metadata)


def test_vocabulary_without_a_pre_tokenizer_uses_the_default_one(byte_level_metadata: dict[str, Any]) -> None:
    del byte_level_metadata[KEY + "pre"]
    assert Vocabulary.from_metadata(byte_level_metadata).pre == "default"


def test_vocabulary_knows_the_tokens_that_end_a_generation(byte_level_metadata: dict[str, Any]) -> None:
    tokens = byte_level_metadata[KEY + "tokens"]
    tokens += ["<|im_end|>", "<|end|>", "<end_of_turn>", "other"]
    byte_level_metadata |= {KEY + "token_type": [1] * 262 + [3, 3, 4, 1, 3, 3, 3], KEY + "eot_token_id": 268}
    tokenizer = Tokenizer.from_metadata(byte_level_metadata)
    assert tokenizer.end_ids == {263, 265, 266, 267, 268}  # </s> by its id and text, then the four above
    assert tokenizer.is_special(265)  # though the file calls it normal


def test_vocabulary_takes_end_for_the_end_of_a_part_beside_return_and_call(byte_level_metadata: dict[str, Any]) -> None:
    byte_level_metadata[KEY + "tokens"] += ["<|end|>", "<|return|>", "<|call|>"]
    byte_level_metadata[KEY + "token_type"] = [1] * 262 + [3, 3, 4, 3, 3, 3]
    tokenizer = Tokenizer.from_metadata(byte_level_metadata)
    assert tokenizer.end_ids == {263, 266, 267}
    assert tokenizer.encode("<|end|>") == [265]


def test_vocabulary_takes_a_tag_of_html_for_no_end(byte_level_metadata: dict[str, Any]) -> None:
    byte_level_metadata |= {KEY + "token_type": [1] * 262 + [3, 4, 4], KEY + "eos_token_id": 0}
    assert Tokenizer.from_metadata(byte_level_metadata).end_ids == {0}


def test_vocabulary_gives_empty_tokens_a_name(byte_level_metadata: dict[str, Any]) -> None:
    byte_level_metadata[KEY + "tokens"][264] = ""
    assert Tokenizer.from_metadata(byte_level_metadata).token_text(264) == "[EMPTY_264]"


def test_vocabulary_has_score_defaults_for_missing_ids(score_metadata: dict[str, Any]) -> None:
    for key in ("bos_token_id", "eos_token_id", "unknown_token_id"):
        del score_metadata[KEY + key]
    tokenizer = Tokenizer.from_metadata(score_metadata)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (1, 2, True)


def test_vocabulary_without_bos_adds_none(byte_level_metadata: dict[str, Any]) -> None:
    del byte_level_metadata[KEY + "bos_token_id"]
    byte_level_metadata[KEY + "add_bos_token"] = True
    tokenizer = Tokenizer.from_metadata(byte_level_metadata)
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (None, False)
    assert tokenizer.encode("", add_bos=True) == []


@pytest.mark.parametrize("fixture", ["byte_level_metadata", "score_metadata"])
def test_vocabulary_comes_back_out_of_json(fixture: str, request: pytest.FixtureRequest) -> None:
    vocabulary = Vocabulary.from_metadata(request.getfixturevalue(fixture))
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary


def test_vocabulary_with_a_separator_inside_comes_back_out_of_json(score_metadata: dict[str, Any]) -> None:
    score_metadata[KEY + "tokens"][270] = "\uffff\ufffe"
    vocabulary = Vocabulary.from_metadata(score_metadata)
    assert Vocabulary.from_json(vocabulary.to_json()).tokens[270] == "\uffff\ufffe"


@pytest.mark.parametrize(
    "change", [{"format": 0}, {"types": "1"}, {"tokens": 5}, {"scores": "x"}, {"end_ids": None}, {"separator": ""}]
)
def test_vocabulary_refuses_damaged_json(byte_level_metadata: dict[str, Any], change: dict[str, Any]) -> None:
    data = Vocabulary.from_metadata(byte_level_metadata).to_json()
    fields = json.loads(data)
    for damaged in (json.dumps(fields | change).encode(), json.dumps([fields]).encode(), data[:-9], b"\xff"):
        with pytest.raises(ModelFileError, match="stored tokenizer"):
            Tokenizer.from_json(damaged)
