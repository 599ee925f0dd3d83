from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.text.tokenizer import Tokenizer

KEY = "tokenizer.ggml."
FIXTURES = ["byte_level_metadata", "score_metadata"]
shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=FIXTURES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_metadata(request.getfixturevalue(request.param))


@pytest.fixture
def texts_of() -> Callable[..., list[str]]:
    def tokens(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
        return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text, **options)]

    return tokens


def test_byte_level_merges_in_the_order_of_the_list(byte_level_metadata: dict[str, Any], texts_of: Callable[..., Any]) -> None:
    tokenizer = Tokenizer.from_metadata(byte_level_metadata)
    assert texts_of(tokenizer, "hello hello helo\n\n") == ["hello", "Ġhello", "Ġ", "he", "l", "o", "ĊĊ"]
    assert texts_of(tokenizer, "é\x00") == ["Ã", "©", "Ā"]


def test_scores_merge_the_best_pair_first(score_metadata: dict[str, Any], texts_of: Callable[..., Any]) -> None:
    tokenizer = Tokenizer.from_metadata(score_metadata)
    assert texts_of(tokenizer, "hello world") == ["▁hello", "▁w", "o", "r", "l", "d"]
    assert texts_of(tokenizer, "hello", continues=True) == ["hello"]
    assert texts_of(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]


def test_scores_put_a_space_at_the_start_and_after_marked_tokens_only(
    score_metadata: dict[str, Any], texts_of: Callable[..., Any]
) -> None:
    tokenizer = Tokenizer.from_metadata(score_metadata)
    assert texts_of(tokenizer, "he<tool>he", add_bos=True) == ["<s>", "▁", "he", "<tool>", "▁", "he"]
    assert texts_of(tokenizer, "") == []
    bare = Tokenizer.from_metadata(score_metadata | {KEY + "add_space_prefix": False})
    assert texts_of(bare, "he<tool>he") == ["he", "<tool>", "he"]


def test_scores_without_byte_tokens_fall_back_to_the_unknown_token(score_metadata: dict[str, Any]) -> None:
    score_metadata[KEY + "token_type"] = [2, 3, 3] + [1] * 256 + [4] + [1] * 15
    score_metadata[KEY + "tokens"] = [token.replace("<0x", "<x") for token in score_metadata[KEY + "tokens"]]
    assert Tokenizer.from_metadata(score_metadata).encode("xé!", continues=True) == [0, 0, 268]


def test_tokenizer_recognises_control_tokens_only_when_asked(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_id in tokenizer.encode("<s>hello</s>", parse_special=True)
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(tokenizer.encode("<s>hello</s>"))


def test_tokenizer_always_recognises_user_defined_tokens(tokenizer: Tokenizer, texts_of: Callable[..., Any]) -> None:
    assert "<tool>" in texts_of(tokenizer, "he<tool>he")


def test_tokenizer_prefers_the_longest_marked_token(byte_level_metadata: dict[str, Any], texts_of: Callable[..., Any]) -> None:
    byte_level_metadata[KEY + "tokens"] += ["ll<", "l<s>x"]
    byte_level_metadata[KEY + "token_type"] = [1] * 262 + [3, 3, 4, 4, 4]
    tokenizer = Tokenizer.from_metadata(byte_level_metadata)
    assert texts_of(tokenizer, "ll<s>x", parse_special=True) == ["l", "l<s>x"]
    assert texts_of(tokenizer, "ll<s>", parse_special=True) == ["ll", "<s>"]  # of equals the first in the vocabulary
    assert tokenizer.split_special("ll<s>xy<s>a<tool>b") == ["ll<s>xy", 262, "a<tool>b"]


def test_merges_never_lead_to_a_control_token(byte_level_metadata: dict[str, Any]) -> None:
    byte_level_metadata[KEY + "token_type"] = [1] * 259 + [3, 1, 1, 3, 3, 4]  # 259 is hello
    tokenizer = Tokenizer.from_metadata(byte_level_metadata)
    assert 259 not in tokenizer.encode("hello")
    assert tokenizer.encode("hello", parse_special=True) == [259]


def test_scores_never_lead_to_a_control_token(score_metadata: dict[str, Any]) -> None:
    score_metadata[KEY + "token_type"][272] = 3
    tokenizer = Tokenizer.from_metadata(score_metadata)
    assert tokenizer.token_text(272) == "hello"
    assert 272 not in tokenizer.encode("hello", continues=True)
    assert tokenizer.encode("hello", parse_special=True) == [272]


def test_tokenizer_adds_bos_only_where_the_model_wants_it(byte_level_metadata: dict[str, Any]) -> None:
    wants = Tokenizer.from_metadata(byte_level_metadata | {KEY + "add_bos_token": True})
    assert wants.encode("he", add_bos=True) == [262, *wants.encode("he")]
    assert wants.encode("", add_bos=True) == [262]
    refuses = Tokenizer.from_metadata(byte_level_metadata)
    assert refuses.encode("he", add_bos=True) == refuses.encode("he")
    llama3 = Tokenizer.from_metadata(byte_level_metadata | {KEY + "pre": "llama-bpe"})
    assert llama3.encode("", add_bos=True) == [262]


@pytest.mark.parametrize("token_id", [-1, 265, 10**12])
def test_tokenizer_refuses_ids_outside_the_vocabulary(byte_level_metadata: dict[str, Any], token_id: int) -> None:
    tokenizer = Tokenizer.from_metadata(byte_level_metadata)
    for use in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.is_special, lambda i: tokenizer.decode([i])):
        with pytest.raises(OptionError, match=f"{token_id} is not in the vocabulary: use ids from 0 to 264"):
            use(token_id)


def test_tokenizer_refuses_a_lone_surrogate(tokenizer: Tokenizer) -> None:
    with pytest.raises(OptionError, match="at character 2"):
        tokenizer.encode("ab\udc80")


def test_decode_leaves_special_tokens_out_unless_asked(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.bos_id, *tokenizer.encode("<tool>", continues=True), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "<tool>"
    assert tokenizer.decode(ids, skip_special=False) == "<s><tool></s>"


def test_decode_replaces_bytes_that_are_not_utf8(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_metadata(byte_level_metadata)
    e_acute = tokenizer.encode("é")
    assert tokenizer.token_bytes(e_acute[0]) == b"\xc3"
    assert tokenizer.decode([e_acute[0], *tokenizer.encode("a"), *e_acute]) == "\ufffdaé"


def test_unused_tokens_stand_for_nothing(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    metadata = request.getfixturevalue(request.node.callspec.params["tokenizer"])
    types = list(metadata[KEY + "token_type"])
    types[261] = 5
    assert Tokenizer.from_metadata(metadata | {KEY + "token_type": types}).token_bytes(261) == b""
    assert tokenizer.token_bytes(261) != b""


def test_source_text_leaves_out_the_spaces_that_encode_put_in(tokenizer: Tokenizer) -> None:
    for text in ("hello<tool> hello</s>he", " hello", "<s><s>  <tool>he", "he"):
        assert tokenizer.source_text(tokenizer.encode(text, parse_special=True)) == text


@shared
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("helo \n<s>/tol"))
def test_byte_level_round_trip_gives_the_text(byte_level_metadata: dict[str, Any], text: str) -> None:
    tokenizer = Tokenizer.from_metadata(byte_level_metadata)
    assert tokenizer.decode(tokenizer.encode(text)) == text


# SmolLM2 has no tokens for six control characters nor for bytes that begin characters of the planes from 4 on: it drops them.
@settings(deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF))
)
def test_real_byte_level_round_trip_gives_the_text(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text
    assert smollm2.decode(smollm2.encode(text, parse_special=True), skip_special=False) == text


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_real_score_round_trip_gives_the_text(gemma3: Tokenizer, text: str) -> None:
    assert gemma3.decode(gemma3.encode(text)) == text


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_tokenizer_out_of_json_encodes_the_same(model: str, texts: list[str], request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(model)
    again = Tokenizer.from_json(tokenizer.to_json())
    assert (again.end_ids, again.bos_id, again.eos_id, again.adds_bos, again.vocab_size) == (
        *(tokenizer.end_ids, tokenizer.bos_id, tokenizer.eos_id),
        *(tokenizer.adds_bos, tokenizer.vocab_size),
    )
    for text in texts[::5]:
        assert again.encode(text, parse_special=True) == tokenizer.encode(text, parse_special=True)


def test_real_models_have_their_special_tokens(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id, smollm2.adds_bos) == (49152, 1, 2, False)
    assert (gemma3.vocab_size, gemma3.bos_id, gemma3.eos_id, gemma3.adds_bos) == (262144, 2, 1, True)
    assert {smollm2.token_text(token_id) for token_id in smollm2.end_ids} == {"<|im_end|>", "<|endoftext|>", "<reponame>"}
    assert {gemma3.token_text(token_id) for token_id in gemma3.end_ids} == {"<eos>", "<end_of_turn>"}
