"""A loaded model: what `headrace.load` gives.

    >>> with headrace.load("smollm2") as model:
    ...     print(model.generate("Why is the sky blue?", max_tokens=40).text())

One model has one team of threads, one arena of pages and one loop that owns both: requests made of it, from any thread, are
computed together.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import numpy as np
import numpy.typing as npt

from headrace.engine import evaluate, machine
from headrace.engine.accounts import Account
from headrace.engine.chat import Chat, Session
from headrace.engine.executor import Executor
from headrace.engine.fit import plan_memory
from headrace.engine.generation import Generation, check_max_tokens, check_prompt
from headrace.engine.loading import LoadedWeights, prepare_kernels
from headrace.engine.loop import Loop
from headrace.engine.many import answer_all, check_prompts
from headrace.engine.memory import MemorySettings, open_memory
from headrace.engine.records import Places, kernels_of
from headrace.engine.request import OUTBOX_TOKENS, Request
from headrace.engine.results import GenerationResult, KeptPast
from headrace.engine.sampler import SamplingOptions, SamplingParams, sampling_params
from headrace.engine.scheduler import Limits, Scheduler, StepCosts
from headrace.engine.sequence import Sequence as TokenSequence
from headrace.engine.sessions import Sessions
from headrace.errors import OptionError
from headrace.kernels import bandwidth
from headrace.kernels.library import KernelLibrary
from headrace.kernels.narrow import NARROW_KERNELS
from headrace.kernels.page_formats import FORMAT_NAMES
from headrace.kernels.runtime import TEAM_KERNELS
from headrace.kv.pages import page_bytes
from headrace.kv.residency import DEFAULT_STANDING, Standing
from headrace.model.angles import AngleTables
from headrace.model.graph import build_graph, choosing_graph
from headrace.model.step import StepLedger
from headrace.text.chat_template import ChatTemplate
from headrace.text.detokenizer import Stop, stop_strings
from headrace.text.messages import Prompt, conversation
from headrace.weights.progress import Progress

SEED_BITS = 32
"""Of seeds that are drawn: every reader of JSON keeps them exact, and people can type them."""


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
        draw_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`wall_clock` gives seconds since the epoch, `timer` seconds that only grow, `draw_seed` seeds nobody asked for."""
        self.path, self.threads, self.load_s = path, threads, 0.0
        self.config, self.tokenizer = weights.config, weights.tokenizer
        self._weights, self._library, self._timer = weights, library, timer
        bound = None if memory is None else memory.memory_bytes
        plan = plan_memory(self.config, weights.num_bytes, context, free_bytes, bound)
        self.context_tokens = plan.context_tokens
        self.graph = build_graph(self.config, weights.matrices)
        self._booking_graph = choosing_graph(self.graph)
        exact = memory is None or memory.formats == ("f16",)
        compressing = [] if exact else list(NARROW_KERNELS)
        prepare_kernels(
            library,
            [*kernels_of(self._booking_graph, self.config.group), *TEAM_KERNELS, *bandwidth.KERNELS, *compressing],
            threads,
            progress,
        )
        opened = open_memory(self.config, library, weights.digest, plan.kv_memory_bytes, memory, threads, wall_clock)
        self.cache, self._sessions = opened.cache, Sessions(opened.sessions)
        self._not_kept = opened.not_kept
        self.digest = weights.digest or ""
        places = Places(
            {name: weights.address(name) for name in weights.matrices.matrices},
            {name: weights.address(name) for name in weights.matrices.vectors},
            AngleTables(self.config.ropes, plan.context_tokens),
        )
        self._executor = Executor(self.config, self.graph, places, library, threads, plan.context_tokens)
        self.step_ledger = StepLedger(self.config, self.graph, threads)
        self._booking_ledger = StepLedger(self.config, self._booking_graph, threads)
        self._loop = self._new_loop()
        self._template: ChatTemplate | None = None
        self._bandwidth: float | None = None
        self._draw_seed = draw_seed
        self._closed = False
        self._sessions.apply_standings(self.cache)

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
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Stop = (),
        system: str | None = None,
        raw: bool = False,
        logprobs: int = 0,
        **overrides: Unpack[SamplingOptions],
    ) -> Generation:
        """An answer to a prompt, as an iterator of pieces; nothing runs before the first piece is asked for.

        Args:
            prompt: what the user says, or with `raw` the text to continue; or a conversation, as a list of messages
                {"role": "system" | "user" | "assistant" | ..., "content": "..."} or `Message`.
            max_tokens: tokens to generate at most.
            sampling: how tokens are chosen; greedy by default.
            overrides: fields of `sampling` by name: temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty,
                frequency_penalty, penalty_window, seed.
            stop: a text, or several, that end the answer and are left out of it.
            system: a system message; the template's own by default.
            raw: no chat template.
            logprobs: report each token's log-probability and this many alternatives.

        Raises:
            OptionError: an option or a message cannot be used.
            ContextOverflowError: the prompt leaves no room for an answer.
            TemplateError: the model has no chat template and `raw` is not set.
        """
        ids = self._prompt_ids(prompt, system, raw=raw)
        return self.answer(ids, max_tokens, sampling_params(sampling, overrides, logprobs), stop, lambda generation: None)

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Stop = (),
        system: str | None = None,
        raw: bool = False,
        logprobs: int = 0,
        **overrides: Unpack[SamplingOptions],
    ) -> list[GenerationResult]:
        """The answers to several prompts, computed together, in their order; options as for `generate`, the same for all.

        A prompt that cannot be answered costs none of the others: its result has `finish_reason` "error", and in `error` what
        `generate` would have raised. Without a seed, each answer draws its own.

        Raises:
            OptionError: an option cannot be used, or `prompts` is a single prompt; nothing has run then.
        """
        self._check_open()
        check_prompts(prompts)
        check_max_tokens(max_tokens)
        params, stops = sampling_params(sampling, overrides, logprobs), stop_strings(stop)

        def generate(prompt: Prompt) -> Generation:
            ids = self._prompt_ids(prompt, system, raw=raw)
            # answers are read in the order of their prompts: none waits for its reader while others are read
            return self.answer(ids, max_tokens, params, stops, lambda generation: None, outbox_tokens=max_tokens + 1)

        return answer_all(prompts, generate)

    def _prompt_ids(self, prompt: Prompt, system: str | None, *, raw: bool) -> list[int]:
        if not raw:
            return self.chat_template.encode(conversation(prompt, system))
        if system is not None:
            raise OptionError("a system message needs the chat template: leave out system or raw", arguments=("system", "raw"))
        if not isinstance(prompt, str):
            raise OptionError("messages need the chat template, and raw continues a text: leave out raw, or give a text")
        return self.tokenizer.encode(prompt, add_bos=self.tokenizer.adds_bos)

    def generate_ids(
        self,
        prompt_ids: Sequence[int],
        *,
        sequence: TokenSequence | None = None,
        max_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Stop = (),
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
        request = self._request(prompt_ids, max_tokens, params, stop, recalls=False, ignore_end=ignore_end)
        return self._generation(request, sequence, lambda generation: None)

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
        files = self._sessions.files
        return self._sessions.open(name, lambda record: Session(self, name, system, files, record, self._not_kept))

    def new_session(self, name: str, system: str | None) -> Session:
        """A session of a name that there is none of yet.

        Raises:
            OptionError: there is one, or the name cannot be used.
        """
        self._sessions.check_new(name)
        return self.session(name, system)

    def session_names(self) -> list[str]:
        """Names of the sessions that can be gone on with, sorted."""
        return self._sessions.names()

    def kept(self) -> KeptPast:
        """What is kept of the past now, in memory and on disk."""
        self._loop.settle()
        cache, pool = self.cache, self.cache.pool
        store = None if cache.disk is None else cache.disk.store
        return KeptPast(
            memory_pages={name: pool.num_owned(code) for code, name in enumerate(FORMAT_NAMES)},
            memory_bytes=pool.owned_bytes + pool.reserved_bytes,
            memory_limit_bytes=pool.limit_bytes,
            disk_bytes=None if store is None else store.used_bytes,
            disk_limit_bytes=0 if store is None else store.used_bytes + store.room_bytes,
        )

    def set_standing(self, token_ids: Sequence[int], standing: Standing) -> None:
        """What the owner of a past wishes of the memory of the past."""
        with self._loop.hold():
            self.cache.set_standing(token_ids, standing)

    def expect(self, token_ids: Sequence[int], in_s: float, standing: Standing) -> None:
        """These tokens will be asked for in about so many seconds: what is on disk of them is read meanwhile."""
        with self._loop.hold():
            self.cache.expect(token_ids, in_s, standing)

    def drop_session(self, name: str) -> None:
        """Forgets the object of a session that was closed."""
        self._sessions.drop(name)

    def rename_session(self, name: str, new_name: str) -> None:
        """A session goes on under another name."""
        self._sessions.rename(name, new_name)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits after each token: float32 [T, V]."""
        return evaluate.logits_of(self.sequence(), token_ids)

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
        return evaluate.perplexity_of(self._sequence(FORMAT_NAMES.index(page_format)), token_ids)

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
            with self._loop.hold():
                self._bandwidth = bandwidth.measure_with(self._library, self._executor.team, num_bytes)
        return self._bandwidth

    def close(self) -> None:
        """Writes what is to be kept, stops the worker team and gives memory back."""
        with self._loop.hold():
            if not self._closed:
                self._sessions.end_answers()
                self._closed = True
                try:
                    self._loop.close()
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
        account = self._account("all")
        return TokenSequence(
            self._executor, self.cache, (account,), self.vocab_size, self.context_tokens, page_format, self._loop.hold
        )

    def answer(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        params: SamplingParams,
        stop: Stop,
        on_end: Callable[[Generation], None],
        *,
        standing: Callable[[], Standing] = lambda: DEFAULT_STANDING,
        ignore_end: bool = False,
        outbox_tokens: int = OUTBOX_TOKENS,
    ) -> Generation:
        """An answer that begins with what is known of the prompt, and is known itself afterwards.

        What the others are made of. `on_end` is told when its reader has come to the end, or wants no more; `standing` is
        asked, when what was computed becomes known, for what the owner of this past wishes. `outbox_tokens` may wait for the
        reader before the answer does.
        """
        request = self._request(
            prompt_ids, max_tokens, params, stop, standing=standing, ignore_end=ignore_end, outbox_tokens=outbox_tokens
        )
        return self._generation(request, None, on_end)

    def _request(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        params: SamplingParams,
        stop: Stop,
        *,
        recalls: bool = True,
        standing: Callable[[], Standing] = lambda: DEFAULT_STANDING,
        ignore_end: bool = False,
        outbox_tokens: int = OUTBOX_TOKENS,
    ) -> Request:
        self._check_open()
        check_max_tokens(max_tokens)
        if not prompt_ids:
            raise OptionError("the prompt is empty: say something")
        check_prompt(len(prompt_ids), self.context_tokens)
        for token in prompt_ids:
            if not 0 <= token < self.vocab_size:
                raise OptionError(f"token {token} is outside the vocabulary of {self.vocab_size}: use ids from 0 on")
        if params.seed is None and params.temperature > 0:
            params = replace(params, seed=self._draw_seed())
        ends = frozenset() if ignore_end else self.tokenizer.end_ids
        return Request(
            tuple(prompt_ids),
            max_tokens,
            params,
            stop_strings(stop),
            ends,
            self.context_tokens,
            recalls=recalls,
            outbox_tokens=outbox_tokens,
            standing=standing,
        )

    def _generation(self, request: Request, sequence: TokenSequence | None, on_end: Callable[[Generation], None]) -> Generation:
        return Generation(self._loop, self._loop.submit(request, sequence), self.load_s, on_end)

    def _new_loop(self) -> Loop:
        pool = self.cache.pool
        limits = Limits(
            total_pages=pool.limit_bytes // pool.format_bytes[0],
            may_spill=self.cache.disk is not None or len(self.cache.formats) > 1,
        )
        return Loop(
            self._executor,
            self.cache,
            Scheduler(limits, StepCosts()),
            self.tokenizer,
            new_sequence=lambda: TokenSequence(self._executor, self.cache, (), self.vocab_size, self.context_tokens),
            new_account=self._account,
            vocab_size=self.vocab_size,
            clock=self._timer,
        )
