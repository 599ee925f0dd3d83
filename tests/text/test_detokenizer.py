from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.text.detokenizer import StreamingDetokenizer, stop_strings
from headrace.text.tokenizer import Tokenizer


class Pieces(Tokenizer):
    """Token i stands for the i-th of some byte strings; token 0 is special."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = [b"<special>", *pieces]
        self.vocab_size = len(self.pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == 0


def _stream(pieces: list[bytes], stop: list[str] | None = None) -> list[str]:
    """What each piece gives, then what the end gives."""
    detokenizer = StreamingDetokenizer(Pieces(pieces), stop or [])
    return [*(detokenizer.push(index + 1) for index in range(len(pieces))), detokenizer.finish()]


def test_detokenizer_waits_for_whole_characters() -> None:
    assert _stream([b"a\xf0\x9f", b"\x98", b"\x80b"]) == ["a", "", "😀b", ""]


def test_detokenizer_replaces_what_never_becomes_a_character() -> None:
    assert _stream([b"\xc3", b"a", b"\xff", b"\xe2\x82"]) == ["", "\ufffda", "\ufffd", "", "\ufffd"]


def test_detokenizer_skips_special_tokens_even_inside_a_character() -> None:
    detokenizer = StreamingDetokenizer(Pieces([b"\xc3", b"\xa9"]))
    assert [detokenizer.push(token_id) for token_id in (0, 1, 0, 2, 0)] == ["", "", "", "é", ""]


def test_detokenizer_holds_back_what_may_become_a_stop_string() -> None:
    assert _stream([b"ab\n", b"\nU", b"ser", b"x"], ["\n\nUser:"]) == ["ab", "", "", "\n\nUserx", ""]
    assert _stream([b"a\n", b"\n"], ["\n\nUser:"]) == ["a", "", "\n\n"]


def test_detokenizer_stops_before_the_stop_string() -> None:
    detokenizer = StreamingDetokenizer(Pieces([b"one tw", b"o three", b"more"]), ["two"])
    assert (detokenizer.push(1), detokenizer.stopped) == ("one ", False)
    assert (detokenizer.push(2), detokenizer.stopped) == ("", True)
    assert (detokenizer.push(3), detokenizer.finish()) == ("", "")


def test_detokenizer_stops_at_the_first_completed_of_several() -> None:
    assert _stream([b"xabcd"], ["abcd", "bc", "d"]) == ["xa", ""]
    assert _stream([b"x", b"a", b"b", b"c", b"d"], ["abcd", "bc", "d"]) == ["x", "", "", "a", "", ""]
    assert _stream([b"xabc"], ["bc", "abc"]) == ["x", ""]  # both at once: the longer one


def test_detokenizer_stops_at_a_stop_string_that_the_end_completes() -> None:
    detokenizer = StreamingDetokenizer(Pieces([b"a\xc3"]), ["\ufffd"])
    assert (detokenizer.push(1), detokenizer.finish(), detokenizer.stopped) == ("a", "", True)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [b"a"], [1]])
def test_detokenizer_refuses_stop_strings_that_are_empty_or_no_text(stop: list[str]) -> None:
    with pytest.raises(OptionError, match="stop="):
        StreamingDetokenizer(Pieces([]), stop)


def test_one_stop_string_is_the_whole_text_and_not_its_letters() -> None:
    detokenizer = StreamingDetokenizer(Pieces([b"NODE, ", b"THEN E", b"ND."]), "END")
    assert "".join(detokenizer.push(token_id) for token_id in (1, 2, 3)) == "NODE, THEN "
    assert stop_strings("END") == stop_strings(["END", "END"]) == ("END",)
    assert stop_strings(None) == stop_strings([]) == ()


some_bytes = st.lists(st.binary(max_size=6) | st.text("aé€😀", max_size=3).map(str.encode), max_size=20)


@given(pieces=some_bytes)
def test_streamed_pieces_are_the_whole_text(pieces: list[bytes]) -> None:
    assert "".join(_stream(pieces)) == b"".join(pieces).decode(errors="replace")


@settings(max_examples=400)
@given(
    text=st.text("abé", max_size=30),
    cuts=st.lists(st.integers(0, 60), max_size=10),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
)
def test_stopping_does_not_depend_on_how_the_text_is_cut(text: str, cuts: list[int], stop: list[str]) -> None:
    data = text.encode()
    edges = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    pieces = [data[start:end] for start, end in pairwise(edges)]
    ends = [(end, -len(one)) for one in stop for end in range(len(text) + 1) if text[:end].endswith(one)]
    end, length = min(ends, default=(len(text), 0))
    streamed = _stream(pieces, stop)
    assert "".join(streamed) == text[: end + length]


def test_streaming_real_tokens_gives_the_whole_text(smollm2: Tokenizer, gemma3: Tokenizer, texts: list[str]) -> None:
    for tokenizer in (smollm2, gemma3):
        for text in texts[::4]:
            ids = tokenizer.encode(text, parse_special=True)
            detokenizer = StreamingDetokenizer(tokenizer)
            pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
            assert "".join(pieces) == tokenizer.decode(ids)
