"""Anything that can happen to the memory of the past, in any order: the bits stay, the books agree, the bounds hold."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from headrace.engine import streaming
from headrace.engine.chat import Chat
from headrace.engine.generation import Generation
from headrace.engine.model import Model
from headrace.errors import ContextOverflowError
from headrace.kv.pages import pages_for
from headrace.model.step import PAGE_TOKENS
from tiny.memory import Clock, FixedPrices, Reference, Seen, crash, recorded_logits, run_files
from tiny.models import TinySpec
from tiny.runs import disk_bytes

if TYPE_CHECKING:
    from conftest import TinyModels

CONTEXT = 1536
SPECS = {
    "llama": TinySpec(ends=False, context=CONTEXT, layers=8, kv_heads=1, seed=21),
    "gemma3": TinySpec("gemma3", ends=False, context=CONTEXT, layers=8, kv_heads=1, window=72, seed=22),
}
EDGES = (1, 31, 32, 33, 64, 65, 96, 130, 255, 256, 257, 400, 512, 700, 1000)
"""Lengths around the ends of pages and steps."""
DOCUMENTS = [np.random.default_rng(seed).integers(5, 9, CONTEXT).tolist() for seed in range(3)]
MOST_OPEN = 2
NUM_EXAMPLES = int(os.environ.get("HEADRACE_TEST_EXAMPLES", "60"))
NAMES = ("a", "b", "c")
DAMAGES = ("flip", "flip", "cut", "delete", "replace", "empty")
PRICES = {"computing is dear": (1e-3, 1e-10), "as quick as reading": (1e-7, 1e-10), "reading is dear": (1e-7, 1e-8)}

prompts = st.tuples(
    st.sampled_from(DOCUMENTS),
    st.sampled_from(EDGES),
    st.one_of(st.lists(st.integers(5, 8), max_size=3), st.sampled_from(EDGES[:10]).map(lambda size: DOCUMENTS[-1][:size])),
)
damages = st.tuples(st.sampled_from(DAMAGES), st.integers(0, 20), st.integers(0, 10**7))
takes = st.sampled_from((None, None, 0, 1, 5))
one_of_two = st.integers(0, MOST_OPEN - 1)


class Open:
    """An answer that is still coming."""

    def __init__(self, generation: Generation, prompt_ids: list[int]) -> None:
        self.generation, self.prompt_ids, self.seen = generation, prompt_ids, list[Seen]()

    def take(self, num_pieces: int | None) -> bool:
        """Asks for some pieces, or for all; whether it has ended."""
        with recorded_logits() as recorded:
            try:
                while num_pieces is None or num_pieces > 0:
                    next(self.generation)
                    num_pieces = None if num_pieces is None else num_pieces - 1
            except StopIteration:
                return True
            finally:
                self.seen += recorded[self.generation._live]
        return False


class MemoryMachine(RuleBasedStateMachine):
    """One user of a model, with as little memory and disk as may be."""

    formats: tuple[str, ...] = ("f16",)
    open_model: Callable[..., Model]
    check_memory: Callable[[Model], None]
    paths: dict[str, Path]
    references: dict[str, Reference]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        self.clock = Clock()
        self.model: Model | None = None
        self.opened: list[Open] = []
        self.chats: list[Chat] = []
        self.pasts: list[list[int]] = []

    @initialize(
        spec=st.sampled_from(sorted(SPECS)),
        pages=st.sampled_from((16, 24, 48)),
        disk=st.sampled_from((10**8, 2 * 10**6, 0)),
        prices=st.sampled_from(sorted(PRICES)),
        least=st.sampled_from((0, 450)),
    )
    def start(self, spec: str, pages: int, disk: int, prices: str, least: int) -> None:
        self.least = least
        self.spec, self.pages, self.disk_bytes, self.prices = spec, pages, disk, prices
        self.reference = self.references[spec]
        self.model = self.load()

    def load(self) -> Model:
        return self.open_model(
            self.paths[self.spec],
            folder=self.folder if self.disk_bytes else None,
            pages=self.pages,
            disk_bytes=self.disk_bytes,
            wall_clock=self.clock,
            prices=FixedPrices(*PRICES[self.prices]),
            formats=self.formats,
        )

    # answers

    def fits(self, num_tokens: int) -> bool:
        """Whether there is room in memory for a past, beside what is being answered."""
        held = sum(len(each.generation._live.sequence.pages) for each in self.opened if each.generation._live.sequence)
        return pages_for(num_tokens) + held + 2 <= self.pages

    def begin(self, generation: Generation, prompt_ids: list[int]) -> Open:
        each = Open(generation, prompt_ids)
        self.opened.append(each)
        return each

    def go_on(self, each: Open, num_pieces: int | None) -> None:
        """Takes pieces of an answer; one that has ended is right to the bit."""
        plan = each.generation._live.request
        self.opened.remove(each)
        may_fail = not self.fits(len(plan.prompt_ids) + plan.max_tokens)
        try:
            ended = each.take(num_pieces)
        except ContextOverflowError:
            assert may_fail
            return
        if ended:
            self.end(each)
        else:
            self.opened.append(each)

    def end(self, each: Open) -> None:
        answer = list(each.generation.token_ids)
        if self.formats == ("f16",):
            self.reference.check(each.prompt_ids, answer, each.seen)
        reuse = each.generation.result.reuse
        known = reuse.memory_tokens + reuse.disk_tokens
        if each.seen:
            assert known + reuse.computed_tokens == len(each.prompt_ids)
            # every miss has a reason: all but the last token, which is always computed
            misses = [miss for miss in reuse.misses if "for a step" not in miss.detail]
            assert sum(miss.num_tokens for miss in misses) == len(each.prompt_ids) - 1 - known
        self.pasts = [*self.pasts[-5:], [*each.prompt_ids, *answer]]

    def prompt(self, document: list[int], length: int, more: list[int]) -> list[int]:
        return [*document[: self.least + length], *more]

    @rule(prompt=prompts, max_tokens=st.integers(1, 40), every=st.booleans(), take=takes)
    def ask(self, prompt: tuple[list[int], int, list[int]], max_tokens: int, every: bool, take: int | None) -> None:
        self._ask(self.prompt(*prompt), max_tokens, every, take)

    @rule(which=st.integers(0, 5), more=st.sampled_from((1, 2, 30, 70)), max_tokens=st.integers(1, 70), take=takes)
    def follow(self, which: int, more: int, max_tokens: int, take: int | None) -> None:
        if self.pasts:
            self._ask([*self.pasts[which % len(self.pasts)], *DOCUMENTS[which % 2][:more]], max_tokens, bool(which % 2), take)

    @rule(which=st.integers(0, 5))
    def ask_again(self, which: int) -> None:
        if self.pasts:
            self._ask(self.pasts[which % len(self.pasts)], 2, True, None)

    def _ask(self, prompt: list[int], max_tokens: int, every: bool, take: int | None) -> None:
        assert self.model is not None
        if len(self.opened) == MOST_OPEN or len(prompt) + max_tokens > CONTEXT:
            return
        generation = self.model.generate_ids(
            prompt, max_tokens=max_tokens, temperature=0.0, ignore_end=True, logprobs=1 if every else 0
        )
        self.go_on(self.begin(generation, prompt), take)

    @rule(which=one_of_two, num_pieces=st.sampled_from((1, 8, 30, None)))
    def more_of_an_answer(self, which: int, num_pieces: int | None) -> None:
        if self.opened:
            self.go_on(self.opened[which % len(self.opened)], num_pieces)

    @rule(which=one_of_two)
    def cancel(self, which: int) -> None:
        if self.opened:
            each = self.opened.pop(which % len(self.opened))
            each.generation.close()
            self.end(each)

    # conversations

    @rule(which=st.integers(0, 2), text=st.sampled_from(("the", "user and", "in the end " * 9)), max_tokens=st.integers(1, 50))
    def turn(self, which: int, text: str, max_tokens: int) -> None:
        assert self.model is not None
        if which >= len(self.chats):
            chat = self.model.chat("and") if which == 0 else self.model.session(NAMES[which], "and")
            self.chats = [*(each for each in self.chats if each is not chat), chat]
        chat = self.chats[min(which, len(self.chats) - 1)]
        try:
            generation = chat.send(text, max_tokens=max_tokens, temperature=0.0, logprobs=1)
        except ContextOverflowError:
            chat.reset()
            return
        self.go_on(self.begin(generation, list(generation.prompt_ids)), None)

    @rule(
        which=st.integers(0, 2),
        wish=st.sampled_from(("pin", "unpin", "expire", "prioritise", "release", "expect", "reset", "close", "forget", "fork")),
    )
    def wish(self, which: int, wish: str) -> None:
        if not self.chats:
            return
        chat = self.chats[which % len(self.chats)]
        wishes: dict[str, Callable[[], Any]] = {
            "pin": chat.pin,
            "unpin": lambda: chat.pin(False),
            "expire": lambda: chat.expire(10.0),
            "prioritise": lambda: chat.prioritise(3.0),
            "release": chat.release,
            "expect": lambda: chat.expect(5.0),
            "reset": chat.reset,
            "close": chat.close,
            "forget": lambda: chat.close(keep=False),
            "fork": lambda: self.fork(chat),
        }
        wishes[wish]()
        if wish in {"close", "forget"}:
            self.chats.remove(chat)

    def fork(self, chat: Chat) -> None:
        assert self.model is not None
        before = self.model.cache.pool.owned_bytes
        copy = chat.fork()
        assert self.model.cache.pool.owned_bytes == before
        assert copy.token_ids == chat.token_ids
        self.chats = [*self.chats[-2:], copy]

    # time, moves, restarts, damage

    @rule(seconds=st.sampled_from((0.0, 0.5, 7.0, 100.0, 1e5)))
    def wait(self, seconds: float) -> None:
        """Time passes; all that was queued is done by then."""
        assert self.model is not None
        self.clock.ahead_s += seconds
        self.model.cache.flush()

    @rule(
        how=st.sampled_from(("clean", "clean", "crash", "clear")),
        pages=st.sampled_from((16, 24, 48)),
        prices=st.sampled_from(sorted(PRICES)),
        damage=st.one_of(st.none(), damages),
    )
    def restart(self, how: str, pages: int, prices: str, damage: tuple[str, int, int] | None) -> None:
        assert self.model is not None
        for each in self.opened if how != "crash" else []:
            each.generation.close()
        if how == "clear":
            self.model.cache.clear()
        if how == "crash":
            crash(self.model)
        else:
            self.model.close()
        if damage is not None:
            self.harm(*damage)
        self.opened, self.chats, self.pages, self.prices = [], [], pages, prices
        self.model = self.load()

    @rule(damage=damages)
    def damage(self, damage: tuple[str, int, int]) -> None:
        self.harm(*damage)

    def harm(self, what: str, which: int, at: int) -> None:
        """Something happens to one file of a run, or to all."""
        files = run_files(self.folder)
        for path in [files[which % len(files)]] if files and which % 3 else files:
            data = bytearray(path.read_bytes())
            if what == "delete":
                path.unlink()
            elif what == "replace":
                path.unlink()
                path.write_bytes(bytes(data[::-1]))
            elif what == "empty":
                path.write_bytes(b"")
            elif what == "cut":
                with path.open("r+b") as file:
                    file.truncate(at % (1 + len(data)))
            elif data:
                with path.open("r+b") as file:
                    file.seek(at % len(data))
                    file.write(bytes([data[at % len(data)] ^ 0x10]))

    @precondition(lambda self: self.disk_bytes)
    @rule(prompt=prompts)
    def another_process_asks(self, prompt: tuple[list[int], int, list[int]]) -> None:
        prompt_ids = self.prompt(*prompt)[:500]
        other = self.load()
        try:
            each = Open(other.generate_ids(prompt_ids, max_tokens=3, temperature=0.0, ignore_end=True, logprobs=1), prompt_ids)
            each.take(None)
            self.end(each)
            other.cache.check()
        finally:
            other.close()

    # what must hold

    @rule(which=one_of_two, more=st.sampled_from((0, 1, 40)), max_tokens=st.integers(1, 9), take=takes)
    def ask_what_is_being_answered(self, which: int, more: int, max_tokens: int, take: int | None) -> None:
        """The whole pages of a prompt that is being answered are known to others, where nobody had to leave memory."""
        if not self.opened:
            return
        first = self.opened[which % len(self.opened)]
        prompt = [*first.prompt_ids, *DOCUMENTS[0][:more]]
        sequence = first.generation._live.sequence
        if first.seen and sequence is not None and not sequence.cold:
            assert self.model is not None
            found = self.model.cache.find(prompt)
            self.model.cache.let_go(found)
            assert found.num_near >= len(first.prompt_ids) // PAGE_TOKENS
        self._ask(prompt, max_tokens, True, take)

    @invariant()
    def what_live_requests_share_is_known(self) -> None:
        for each in self.opened if self.model is not None else ():
            sequence = each.generation._live.sequence
            if sequence is not None and sequence.shared is not None and sequence.shared.last is not None:
                assert self.model is not None
                pages = sequence.shared.num_pages
                assert self.model.cache.tree.match(sequence.token_ids[: pages * PAGE_TOKENS]).last is sequence.shared.last
                assert sequence.shared.last.pins

    @invariant()
    def books_agree_and_bounds_hold(self) -> None:
        if self.model is not None:
            self.model.cache.check()
            assert self.model.cache.pool.limit_bytes == self.pages * self.model.page_bytes()
            assert disk_bytes(self.folder) <= self.disk_bytes

    def teardown(self) -> None:
        if self.model is not None:
            for each in self.opened:
                each.generation.close()
            for chat in self.chats:
                chat.close()
            self.check_memory(self.model)
            self.model.close()
        shutil.rmtree(self.folder)


@pytest.fixture
def machine(tiny_models: TinyModels, open_path: Callable[..., Model], checked_memory: Callable[[Model], None]) -> Any:
    class Machine(MemoryMachine):
        open_model = staticmethod(open_path)
        check_memory = staticmethod(checked_memory)

    Machine.paths = {name: tiny_models.path(spec) for name, spec in SPECS.items()}
    Machine.references = {name: Reference(tiny_models.load(spec)) for name, spec in SPECS.items()}
    return Machine


@pytest.mark.parametrize(("formats", "num_examples"), [("f16", NUM_EXAMPLES), ("f16,q8,q4", NUM_EXAMPLES // 3)])
def test_whatever_happens_to_the_past_changes_no_bit_and_breaks_no_bound(
    machine: Any, monkeypatch: pytest.MonkeyPatch, formats: str, num_examples: int
) -> None:
    """Bits are compared where pages are exact; where they are compressed, books and bounds hold all the same."""
    # what reading takes is in proportion to memory, as with models of real size
    monkeypatch.setattr(streaming, "_PAGES_STEP", 2)
    monkeypatch.setattr(streaming, "_GROUP_BYTES", 4096)
    machine.formats = tuple(formats.split(","))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
