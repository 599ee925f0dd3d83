"""A loaded model: what `headrace.load` gives.

    >>> with headrace.load("smollm2") as model:
    ...     print(model.generate("Why is the sky blue?", max_tokens=40).text())

One model has one team of threads and one arena of pages; its sequences take turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import numpy as np
import numpy.typing as npt

from headrace.config import Config, check_threads
from headrace.engine import machine
from headrace.engine.accounts import Account
from headrace.engine.chat import Chat, Session
from headrace.engine.executor import Executor
from headrace.engine.fit import plan_memory
from headrace.engine.generation import Generation, GenerationPlan, check_prompt
from headrace.engine.loading import LoadedWeights, load_weights, prepare_kernels
from headrace.engine.memory import MemorySettings, check_room, open_memory
from headrace.engine.past import count_reuse
from headrace.engine.records import Places, kernels_of
from headrace.engine.results import KeptPast
from headrace.engine.sampler import Sampler, SamplingOptions, SamplingParams, sampling_params
from headrace.engine.sequence import Sequence as TokenSequence
from headrace.errors import OptionError
from headrace.kernels import bandwidth
from headrace.kernels.level import choose_level
from headrace.kernels.library import KernelLibrary
from headrace.kernels.narrow import NARROW_KERNELS
from headrace.kernels.page_formats import FORMAT_NAMES
from headrace.kernels.runtime import TEAM_KERNELS
from headrace.kv.pages import page_bytes
from headrace.kv.residency import DEFAULT_STANDING, Standing
from headrace.kv.sessions import check_name
from headrace.model.angles import AngleTables
from headrace.model.config import ModelConfig
from headrace.model.graph import build_graph, greedy_graph
from headrace.model.step import StepLedger
from headrace.text.chat_template import ChatTemplate, Message
from headrace.weights.progress import NullProgress, Progress
from headrace.weights.sources import DEFAULT_MODEL, resolve


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    threads: int | None = None,
    context: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
    config: Config | None = None,
    kv_dir: str | Path | None = None,
    kv_memory: int | str | None = None,
    kv_disk: int | str | None = None,
    kv_formats: Sequence[str] | str | None = None,
) -> Model:
    """Loads a model, fetching, compiling and packing what is not there yet.

    Args:
        model: an alias (`smollm2`, `gemma3-270m`), a path to a `.gguf`, or `hf:owner/repo/file.gguf`.
        threads: threads of the worker team; all usable cores by default.
        context: tokens of context; what the model was made for and memory allows by default.
        cache: keep packed weights, compiled kernels and the past of conversations on disk for the next start.
        progress: is told what takes long.
        config: folders and defaults; from the environment by default.
        kv_dir: folder of the past of conversations.
        kv_memory: bound of the past in memory, bytes or text such as "2GB"; by default room for a few contexts.
        kv_disk: bound of `kv_dir`, bytes or text; 0 keeps nothing on disk.
        kv_formats: formats of pages in memory, "f16" (exact) by default; see README.

    Raises:
        HeadraceError: the model cannot be found, fetched, read, or fitted into memory, or an option is wrong.
    """
    start = time.perf_counter()
    settings = config or Config.from_environment()
    memory = MemorySettings.resolve(settings, kv_dir, kv_memory, kv_disk if cache else 0, kv_formats)
    team = settings.threads if threads is None else check_threads(threads, "threads")
    level = choose_level(settings.cpu_level)
    shown = progress or NullProgress()
    path = resolve(str(model), settings, shown)
    library = KernelLibrary(settings.kernels_dir if cache else None, level)
    free_bytes = machine.read_memory().free_bytes  # before weights are packed into it

    def check(shape: ModelConfig, weights_bytes: int) -> None:
        plan_memory(shape, weights_bytes, context, free_bytes, memory.memory_bytes)

    weights = load_weights(path, settings.packed_dir if cache else None, shown, check)
    check_room(memory, page_bytes(weights.config))
    loaded = Model(path, weights, library, threads=team, context=context, progress=shown, free_bytes=free_bytes, memory=memory)
    loaded.load_s = time.perf_counter() - start
    return loaded


class Model:
    """A model in memory, ready to run. Close it, or use it in a `with` block."""

    def __init__(
        self,
        path: Path,
        weights: LoadedWeights,
        library: KernelLibrary,
        *,
        threads: int,
        context: int | None,
        progress: Progress,
        free_bytes: int | None = None,
        memory: MemorySettings | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.path, self.threads, self.load_s = path, threads, 0.0
        self.config, self.tokenizer = weights.config, weights.tokenizer
        self._weights, self._library = weights, library
        bound = None if memory is None else memory.memory_bytes
        plan = plan_memory(self.config, weights.num_bytes, context, free_bytes, bound)
        self.context_tokens = plan.context_tokens
        self.graph = build_graph(self.config, weights.matrices)
        self._booking_graph = greedy_graph(self.graph)
        exact = memory is None or memory.formats == ("f16",)
        compressing = [] if exact else list(NARROW_KERNELS)
        prepare_kernels(
            library,
            [*kernels_of(self._booking_graph, self.config.group), *TEAM_KERNELS, *bandwidth.KERNELS, *compressing],
            threads,
            progress,
        )
        opened = open_memory(self.config, library, weights.digest, plan.kv_memory_bytes, memory, threads, wall_clock)
        self.cache, self._session_files = opened.cache, opened.sessions
        self.digest = weights.digest or ""
        places = Places(
            {name: weights.address(name) for name in weights.matrices.matrices},
            {name: weights.address(name) for name in weights.matrices.vectors},
            AngleTables(self.config.ropes, plan.context_tokens),
        )
        self._executor = Executor(self.config, self.graph, places, library, threads, plan.context_tokens)
        self.step_ledger = StepLedger(self.config, self.graph, threads)
        self._booking_ledger = StepLedger(self.config, self._booking_graph, threads)
        self._template: ChatTemplate | None = None
        self._bandwidth: float | None = None
        self._sessions: dict[str, Session] = {}
        self._closed = False
        self._apply_standings()

    @property
    def name(self) -> str:
        """Name for people."""
        return self.config.name

    @property
    def vocab_size(self) -> int:
        """V, the number of token ids."""
        return self.config.vocabulary

    @property
    def cpu_level(self) -> str:
        """Level of the kernels in use."""
        return self._library.level.name

    @property
    def weights_bytes(self) -> int:
        """Bytes of packed weights."""
        return self._weights.num_bytes

    def sequence(self) -> TokenSequence:
        """A new, empty sequence of tokens, which neither knows others' past nor lets them know its own."""
        self._check_open()
        return self._sequence(None)

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        system: str | None = None,
        raw: bool = False,
        logprobs: int = 0,
        **overrides: Unpack[SamplingOptions],
    ) -> Generation:
        """An answer to a prompt, as an iterator of pieces; nothing runs before the first piece is asked for.

        Args:
            prompt: what the user says, or with `raw` the text to continue.
            max_tokens: tokens to generate at most.
            sampling: how tokens are chosen; greedy by default.
            overrides: fields of `sampling` by name: temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty,
                frequency_penalty, penalty_window, seed.
            stop: texts that end the answer and are left out of it.
            system: a system message; the template's own by default.
            raw: no chat template.
            logprobs: report each token's log-probability and this many alternatives.

        Raises:
            OptionError: an option cannot be used.
            ContextOverflowError: the prompt leaves no room for an answer.
            TemplateError: the model has no chat template and `raw` is not set.
        """
        if raw:
            if system is not None:
                raise OptionError("a system message needs the chat template: leave out --system or --raw")
            ids = self.tokenizer.encode(prompt, add_bos=self.tokenizer.adds_bos)
        else:
            messages = [Message("system", system)] if system is not None else []
            ids = self.chat_template.encode([*messages, Message("user", prompt)])
        return self.answer(ids, max_tokens, sampling_params(sampling, overrides, logprobs), stop, lambda generation: None)

    def generate_ids(
        self,
        prompt_ids: Sequence[int],
        *,
        sequence: TokenSequence | None = None,
        max_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        ignore_end: bool = False,
        logprobs: int = 0,
        **overrides: Unpack[SamplingOptions],
    ) -> Generation:
        """An answer to a prompt of token ids; options that are not named here are those of `generate`.

        With a `sequence`, what the prompt shares with it is not computed again, prompt and answer stay there, and the memory
        of the past has no part in it. With `ignore_end` the answer goes on behind end tokens, up to `max_tokens`: for
        measurements.

        Raises:
            OptionError: an option cannot be used.
            ContextOverflowError: the prompt leaves no room for an answer.
        """
        params = sampling_params(sampling, overrides, logprobs)
        if sequence is None:
            return self.answer(prompt_ids, max_tokens, params, stop, lambda generation: None, ignore_end=ignore_end)
        return self._start(sequence, prompt_ids, max_tokens, params, stop, lambda generation: None, ignore_end=ignore_end)

    def chat(self, system: str | None = None) -> Chat:
        """A conversation that keeps its past between turns.

        Raises:
            TemplateError: the model has no chat template.
        """
        self.chat_template  # noqa: B018, raises before the conversation starts
        return Chat(self, system)

    def session(self, name: str, system: str | None = None) -> Session:
        """The conversation of this name, as it was left; a new one, with this system message, if there is none.

        Raises:
            OptionError: the name cannot be used.
            TemplateError: the model has no chat template.
        """
        self.chat_template  # noqa: B018
        check_name(name)
        if name not in self._sessions:
            record = None if self._session_files is None else self._session_files.load(name)
            self._sessions[name] = Session(self, name, system, self._session_files, record)
        return self._sessions[name]

    def new_session(self, name: str, system: str | None) -> Session:
        """A session of a name that there is none of yet.

        Raises:
            OptionError: there is one, or the name cannot be used.
        """
        files = self._session_files
        if check_name(name) in self._sessions or (files is not None and files.load(name) is not None):
            raise OptionError(f"there is a session {name!r} already: take another name")
        return self.session(name, system)

    def session_names(self) -> list[str]:
        """Names of the sessions that can be gone on with, sorted."""
        kept = [] if self._session_files is None else [record.name for record in self._session_files.all()]
        return sorted({*kept, *self._sessions})

    def kept(self) -> KeptPast:
        """What is kept of the past now, in memory and on disk."""
        cache, pool = self.cache, self.cache.pool
        store = None if cache.disk is None else cache.disk.store
        return KeptPast(
            memory_pages={name: pool.num_owned(code) for code, name in enumerate(FORMAT_NAMES)},
            memory_bytes=pool.owned_bytes + pool.reserved_bytes,
            memory_limit_bytes=pool.limit_bytes,
            disk_bytes=None if store is None else store.used_bytes,
            disk_limit_bytes=0 if store is None else store.used_bytes + store.room_bytes,
        )

    def drop_session(self, name: str) -> None:
        """Forgets the object of a session that was closed."""
        self._sessions.pop(name, None)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits after each token: float32 [T, V]."""
        sequence = self.sequence()
        try:
            return sequence.append_all(token_ids)
        finally:
            sequence.close()

    def perplexity(self, text: str) -> float:
        """e to the mean negative log-probability of each token of a text given those before it.

        Raises:
            OptionError: the text has fewer than two tokens.
            ContextOverflowError: it does not fit into the context.
        """
        ids = self.tokenizer.encode(text, add_bos=self.tokenizer.adds_bos)
        if len(ids) < 2:
            raise OptionError(f"the text has {len(ids)} token, and perplexity needs at least 2")
        return self.perplexity_of(ids)

    def perplexity_of(self, token_ids: Sequence[int], *, page_format: str = "f16") -> float:
        """`perplexity` of tokens, read from pages of a format: those that are whole when a chunk of tokens begins.

        Raises:
            ContextOverflowError: they do not fit into the context.
        """
        ids = list(token_ids)
        sequence = self._sequence(FORMAT_NAMES.index(page_format))
        total, at = 0.0, 0
        try:
            for rows in sequence.steps(ids[:-1], outputs=64):
                scores = rows.astype(np.float64)
                top = scores.max(axis=1)
                spread = np.log(np.exp(scores - top[:, None]).sum(axis=1)) + top
                chosen = scores[np.arange(len(rows)), ids[at + 1 : at + 1 + len(rows)]]
                total += float((spread - chosen).sum())
                at += len(rows)
        finally:
            sequence.close()
        return float(np.exp(total / at))

    def page_bytes(self, page_format: str = "f16") -> int:
        """Bytes of a page of 32 tokens in a format."""
        return page_bytes(self.config, FORMAT_NAMES.index(page_format))

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text; nothing in it is taken as a special token."""
        return self.tokenizer.encode(text)

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self.tokenizer.decode(token_ids)

    @property
    def chat_template(self) -> ChatTemplate:
        """The template of conversations.

        Raises:
            TemplateError: the model has none.
        """
        if self._template is None:
            self._template = ChatTemplate(self._weights.template, self.tokenizer)
        return self._template

    def read_bandwidth(self) -> float:
        """Bytes per second that the team reads from memory, measured at the first call: some 0.1 s."""
        if self._bandwidth is None:
            self._check_open()
            last_cache = max((cache.size_bytes for cache in machine.read_caches()), default=0)
            num_bytes = bandwidth.memory_bytes(last_cache)
            self._bandwidth = bandwidth.measure_with(self._library, self._executor.team, num_bytes)
        return self._bandwidth

    def close(self) -> None:
        """Writes what is to be kept, stops the worker team and gives memory back."""
        if not self._closed:
            self._closed = True
            try:
                self.cache.close()
            finally:
                self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _account(self, phase: str) -> Account:
        return Account(self._booking_ledger, self._booking_graph, self._executor.team.ticks_per_us, phase)

    def _check_open(self) -> None:
        if self._closed:
            raise OptionError(f"{self.name} is closed: load it again")

    def _sequence(self, page_format: int | None) -> TokenSequence:
        return TokenSequence(
            self._executor, self.cache, self._account("all"), self.vocab_size, self.context_tokens, page_format
        )

    def _apply_standings(self) -> None:
        """What the owners of sessions asked for in earlier runs holds on."""
        for record in [] if self._session_files is None else self._session_files.all():
            if record.pinned or record.priority != 1.0 or record.expires_s is not None:
                expires_s = math.inf if record.expires_s is None else record.expires_s
                self.cache.set_standing(record.token_ids, Standing(record.priority, record.pinned, expires_s))

    def answer(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        params: SamplingParams,
        stop: Sequence[str],
        on_end: Callable[[Generation], None],
        *,
        standing: Callable[[], Standing] = lambda: DEFAULT_STANDING,
        ignore_end: bool = False,
    ) -> Generation:
        """An answer that begins with what is known of the prompt, and is known itself afterwards.

        What the others are made of. `on_end` is told of the end, before what was computed becomes known; `standing` is asked
        then for what the owner of this past wishes.
        """
        self._check_open()
        sequence = self._sequence(None)

        def end(generation: Generation) -> None:
            try:
                on_end(generation)
                # an error leaves no answer that anybody would go on from
                count_reuse(self.cache.counters, generation.result.reuse)
                if not generation.failed and not self._closed:
                    sequence.commit(len(generation.token_ids), standing())
            finally:
                sequence.close()

        return self._start(sequence, prompt_ids, max_tokens, params, stop, end, recalls=True, ignore_end=ignore_end)

    def _start(
        self,
        sequence: TokenSequence,
        prompt_ids: Sequence[int],
        max_tokens: int,
        params: SamplingParams,
        stop: Sequence[str],
        on_end: Callable[[Generation], None],
        *,
        recalls: bool = False,
        ignore_end: bool = False,
    ) -> Generation:
        if max_tokens < 1:
            raise OptionError(f"max_tokens={max_tokens} generates nothing: use 1 or more")
        if not prompt_ids:
            raise OptionError("the prompt is empty: say something")
        check_prompt(len(prompt_ids), self.context_tokens)
        if not recalls:
            # the last token is always computed anew: its logits are needed
            sequence.truncate(min(sequence.keep_common(prompt_ids), len(prompt_ids) - 1))
        ends = frozenset() if ignore_end else self.tokenizer.end_ids
        plan = GenerationPlan(tuple(prompt_ids), recalls, max_tokens, self.context_tokens, tuple(stop), self.load_s, ends)
        return Generation(
            plan,
            sequence,
            Sampler(params, self.vocab_size),
            self.tokenizer,
            (self._account("prefill"), self._account("decode")),
            time.perf_counter,
            on_end,
        )
