"""Sessions: conversations with a name, which go on in this process and the next."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.engine.model import Model
from headrace.errors import ContextOverflowError, OptionError
from headrace.kv.sessions import MAX_NAME_CHARACTERS
from headrace.text.chat_template import Message
from tiny.memory import Clock, FixedPrices
from tiny.models import TinySpec

SPEC = TinySpec(seed=5, ends=False)

Open = Callable[..., Model]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def model(open_tiny: Open, folder: Path, checked_memory: Callable[[Model], None]) -> Iterator[Model]:
    model = open_tiny(SPEC, folder=folder, context=512, prices=FixedPrices())
    yield model
    if not model._closed:
        checked_memory(model)


def _file(folder: Path, name: str = "plan") -> Path:
    (found,) = folder.glob(f"sessions/*/{name}*.json")
    return found


def test_session_goes_on_after_a_restart_with_the_same_bits(open_tiny: Open, folder: Path, model: Model) -> None:
    session = model.session("plan", "and")
    session.send("the", max_tokens=8).text()
    messages, ids = session.messages, session.token_ids
    session.close()
    model.close()
    again = open_tiny(SPEC, folder=folder, context=256, threads=2, prices=FixedPrices())  # neither is part of the key
    resumed = again.session("plan")
    assert (resumed.messages, resumed.token_ids) == (messages, ids)
    answer = resumed.send("user", max_tokens=8)
    answer.text()
    # all that was computed is found; the last token of the answer was sampled and never computed
    assert answer.result.reuse.disk_tokens == answer.result.usage.cached_tokens == len(ids) - 1
    best = again.logits(resumed.token_ids).argmax(axis=1).tolist()
    assert best[answer.result.usage.prompt_tokens - 1 : -1] == list(answer.result.token_ids)


def test_session_survives_a_process_that_ends_without_closing_it(open_tiny: Open, folder: Path, model: Model) -> None:
    session = model.session("plan")
    session.send("the", max_tokens=8).text()
    assert json.loads(_file(folder).read_text())["token_ids"] == list(session.token_ids)
    other = open_tiny(SPEC, folder=folder, context=512)
    assert other.session("plan").token_ids == session.token_ids


def test_session_is_one_object_per_name(model: Model) -> None:
    assert model.session("plan") is model.session("plan")
    assert model.session("plan") is not model.session("other")


def test_fork_shares_the_past_and_parts_from_it(model: Model, folder: Path) -> None:
    session = model.session("plan")
    session.send("the user and the", max_tokens=40).text()
    ids, owned = session.token_ids, model.cache.pool.owned_bytes
    copy = session.fork("copy")
    assert model.cache.pool.owned_bytes == owned, "no page is copied"
    assert (copy.messages, copy.token_ids) == (session.messages, ids)
    answer = copy.send("in the end", max_tokens=4)
    answer.text()
    assert answer.result.usage.cached_tokens == len(ids) - 1
    assert session.token_ids == ids
    assert model.session_names() == ["copy", "plan"]
    assert json.loads(_file(folder, "copy").read_text())["token_ids"] == list(copy.token_ids)


def test_fork_of_a_name_that_is_taken_is_refused(model: Model) -> None:
    session = model.session("plan")
    session.fork("copy").close()
    with pytest.raises(OptionError, match="there is a session 'copy' already"):
        session.fork("copy")
    with pytest.raises(OptionError, match="there is a session 'plan' already"):
        session.fork("plan")


def test_fork_of_a_long_session_takes_no_time(model: Model) -> None:
    chat = model.chat()
    chat.send("z" * 300, max_tokens=100).text()
    assert len(chat.token_ids) > 400
    times = []
    for _ in range(50):
        start = time.perf_counter()
        chat.fork()
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 1e-3


def test_session_without_a_folder_lives_as_long_as_the_model(open_tiny: Open) -> None:
    model = open_tiny(SPEC, context=256)
    session = model.session("plan")
    session.send("the", max_tokens=4).text()
    assert model.session("plan") is session
    assert model.session_names() == ["plan"]


def test_closed_session_is_kept_or_forgotten_as_asked(model: Model, folder: Path) -> None:
    kept, forgotten = model.session("kept"), model.session("forgotten")
    for session in (kept, forgotten):
        session.send("the", max_tokens=4).text()
    kept.close()
    forgotten.close(keep=False)
    assert model.session_names() == ["kept"]
    assert model.session("kept").token_ids == kept.token_ids
    assert model.session("forgotten").token_ids == ()


@pytest.mark.parametrize("name", ["", "   ", "x" * (MAX_NAME_CHARACTERS + 1)])
def test_name_that_is_none_is_refused(model: Model, name: str) -> None:
    with pytest.raises(OptionError, match="a session's name has 1 to"):
        model.session(name)


def test_pin_and_expiry_hold_after_a_restart(open_tiny: Open, folder: Path, model: Model) -> None:
    session = model.session("plan")
    session.send("the", max_tokens=8).text()
    session.pin()
    session.prioritise(2.0)
    session.expire(3600.0)
    model.close()
    clock = Clock()
    again = open_tiny(SPEC, folder=folder, context=512, wall_clock=clock, prices=FixedPrices())
    last = again.cache.tree.match(session.token_ids[:-1]).nodes[-1]
    standing = last.use.standing
    assert (standing.pinned, standing.priority) == (True, 2.0)
    assert standing.expires_s == pytest.approx(clock() + 3600, abs=60)
    assert again.session("plan")._standing == standing


@pytest.mark.parametrize(("method", "value"), [("prioritise", 0.0), ("prioritise", float("nan")), ("expire", -1.0)])
def test_wish_that_makes_no_sense_is_refused(model: Model, method: str, value: float) -> None:
    with pytest.raises(OptionError, match=str(value)):
        getattr(model.session("plan"), method)(value)


def test_expected_session_is_read_ahead(open_tiny: Open, folder: Path, model: Model) -> None:
    session = model.session("plan")
    session.send("z" * 100, max_tokens=4).text()
    model.close()
    again = open_tiny(SPEC, folder=folder, context=512, prices=FixedPrices())
    resumed = again.session("plan")
    resumed.expect(5.0)
    again.cache.flush()
    answer = resumed.send("the", max_tokens=2)
    answer.text()
    whole_pages = (len(session.token_ids) - 1) // 32 * 32
    assert answer.result.reuse.memory_tokens >= whole_pages
    assert answer.result.reuse.disk_tokens < 32


def test_tokens_of_the_history_are_kept_exactly_as_they_were_generated(model: Model) -> None:
    """As with two line breaks that were generated one by one, and are one token when the text is read back."""
    chat = model.chat()
    chat.send("user", max_tokens=3).text()
    generated = [token for letter in "the" for token in model.tokenize(letter)]
    assert model.detokenize(generated) == "the"
    assert model.tokenize("the") != generated
    chat._messages[-1] = Message("assistant", "the")
    chat._token_ids = [*chat._token_ids[:-3], *generated]
    past = len(chat._token_ids)
    model.generate_ids([*chat._token_ids, 10], max_tokens=1).text()  # their keys and values are known now
    answer = chat.send("user", max_tokens=2)
    answer.text()
    assert list(chat.token_ids[past - 3 : past]) == generated
    assert answer.result.usage.cached_tokens >= past


def test_turn_that_does_not_fit_leaves_the_session_on_disk_as_it_was(model: Model, folder: Path) -> None:
    session = model.session("plan")
    session.send("the", max_tokens=4).text()
    before = _file(folder).read_bytes()
    with pytest.raises(ContextOverflowError):
        session.send("z" * 600)
    assert _file(folder).read_bytes() == before


def test_model_says_what_it_keeps(model: Model, folder: Path) -> None:
    before = model.kept()
    assert (before.memory_pages, before.memory_bytes) == ({"f16": 0, "q8": 0, "q4": 0}, 0)
    model.session("plan").send("z" * 100, max_tokens=4).text()
    model.cache.flush()
    kept = model.kept()
    assert kept.memory_pages["f16"] * model.page_bytes() == kept.memory_bytes > 0
    assert kept.memory_bytes <= kept.memory_limit_bytes
    assert kept.disk_bytes is not None
    assert kept.memory_bytes < kept.disk_bytes <= kept.disk_limit_bytes


@pytest.mark.parametrize(("formats", "compressed"), [(("f16",), 0), (("q8",), 96), (("q4",), 96)])
def test_result_and_counts_say_how_much_was_found_in_compressed_pages(
    open_tiny: Open, formats: tuple[str, ...], compressed: int
) -> None:
    model = open_tiny(SPEC, context=256, pages=20, formats=formats)
    prompt = [7] * 40 + [8] * 60
    model.generate_ids(prompt, max_tokens=1).text()
    again = model.generate_ids([*prompt[:96], 9, 9], max_tokens=1)
    again.text()
    reuse = again.result.reuse
    assert (reuse.memory_tokens, reuse.compressed_tokens) == (96, compressed)
    assert model.cache.counters.compressed_tokens == compressed
    assert {name: count for name, count in model.kept().memory_pages.items() if count and name != "f16"} == (
        {formats[0]: 3} if compressed else {}
    )


def test_time_saved_is_known_in_a_process_that_computes_next_to_nothing(open_tiny: Open, folder: Path) -> None:
    prompt = [7] * 300
    first = open_tiny(SPEC, folder=folder, context=512)
    first.generate_ids(prompt, max_tokens=1).text()
    first.close()
    again = open_tiny(SPEC, folder=folder, context=512)
    answer = again.generate_ids(prompt, max_tokens=1)
    answer.text()
    assert answer.result.usage.cached_tokens == 299
    assert again.cache.prices.compute_s(299, 0) is not None
    other = open_tiny(SPEC, folder=folder, context=512, threads=2)
    assert other.cache.prices.compute_s(299, 0) is None
