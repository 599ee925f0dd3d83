"""A loaded model: what `headrace.load` gives.

    >>> with headrace.load("smollm2") as model:
    ...     print(model.generate("Why is the sky blue?", max_tokens=40).text())

One model has one team of threads and one arena of pages; its sequences take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import numpy as np
import numpy.typing as npt

from headrace.config import Config, check_threads
from headrace.engine import machine
from headrace.engine.accounts import Account
from headrace.engine.executor import Executor
from headrace.engine.fit import plan_memory
from headrace.engine.generation import Generation, GenerationPlan, check_room
from headrace.engine.loading import LoadedWeights, load_weights, prepare_kernels
from headrace.engine.records import Places, kernels_of
from headrace.engine.sampler import Sampler, SamplingOptions, SamplingParams
from headrace.engine.sequence import Sequence as TokenSequence
from headrace.errors import OptionError
from headrace.kernels import bandwidth
from headrace.kernels.level import choose_level
from headrace.kernels.library import KernelLibrary
from headrace.kernels.runtime import TEAM_KERNELS
from headrace.kv.pages import PageArena, page_bytes
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
) -> Model:
    """Loads a model, fetching, compiling and packing what is not there yet.

    Args:
        model: an alias (`smollm2`, `gemma3-270m`), a path to a `.gguf`, or `hf:owner/repo/file.gguf`.
        threads: threads of the worker team; all usable cores by default.
        context: tokens of context; what the model was made for and memory allows by default.
        cache: keep packed weights and compiled kernels on disk for the next start.
        progress: is told what takes long.
        config: folders and defaults; from the environment by default.

    Raises:
        HeadraceError: the model cannot be found, fetched, read, or fitted into memory, or an option is wrong.
    """
    start = time.perf_counter()
    settings = config or Config.from_environment()
    team = settings.threads if threads is None else check_threads(threads, "threads")
    level = choose_level(settings.cpu_level)
    shown = progress or NullProgress()
    path = resolve(str(model), settings, shown)
    library = KernelLibrary(settings.kernels_dir if cache else None, level)
    free_bytes = machine.read_memory().free_bytes  # before weights are packed into it

    def check(shape: ModelConfig, weights_bytes: int) -> None:
        plan_memory(shape, weights_bytes, context, free_bytes)

    weights = load_weights(path, settings.packed_dir if cache else None, shown, check)
    loaded = Model(path, weights, library, threads=team, context=context, progress=shown, free_bytes=free_bytes)
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
    ) -> None:
        self.path, self.threads, self.load_s = path, threads, 0.0
        self.config, self.tokenizer = weights.config, weights.tokenizer
        self._weights, self._library = weights, library
        plan = plan_memory(self.config, weights.num_bytes, context, free_bytes)
        self.context_tokens = plan.context_tokens
        self.graph = build_graph(self.config, weights.matrices)
        self._booking_graph = greedy_graph(self.graph)
        prepare_kernels(
            library, [*kernels_of(self._booking_graph, self.config.group), *TEAM_KERNELS, *bandwidth.KERNELS], threads, progress
        )
        self._arena = PageArena(plan.num_pages, page_bytes(self.config))
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
        self._closed = False

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
        """A new, empty sequence of tokens."""
        self._check_open()
        return TokenSequence(self._executor, self._arena, self._account("all"), self.vocab_size, self.context_tokens)

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
        params = sampling_params(sampling, overrides, logprobs)
        sequence = self.sequence()
        return self._start(sequence, ids, max_tokens, params, stop, lambda generation: sequence.close())

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

        What the prompt shares with `sequence`, if there is one, is not computed again; prompt and answer stay there. With
        `ignore_end` the answer goes on behind end tokens, up to `max_tokens`: for measurements.

        Raises:
            OptionError: an option cannot be used.
            ContextOverflowError: the prompt leaves no room for an answer.
        """
        params = sampling_params(sampling, overrides, logprobs)
        own = self.sequence() if sequence is None else sequence
        on_end = (lambda generation: own.close()) if sequence is None else (lambda generation: None)
        return self._start(own, prompt_ids, max_tokens, params, stop, on_end, ignore_end=ignore_end)

    def chat(self, system: str | None = None) -> Chat:
        """A conversation that keeps its past between turns.

        Raises:
            TemplateError: the model has no chat template.
        """
        self.chat_template  # noqa: B018, raises before the conversation starts
        return Chat(self, system)

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
        sequence = self.sequence()
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
        """Stops the worker team and gives memory back."""
        if not self._closed:
            self._closed = True
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

    def _start(
        self,
        sequence: TokenSequence,
        prompt_ids: Sequence[int],
        max_tokens: int,
        params: SamplingParams,
        stop: Sequence[str],
        on_end: Callable[[Generation], None],
        *,
        ignore_end: bool = False,
    ) -> Generation:
        if max_tokens < 1:
            raise OptionError(f"max_tokens={max_tokens} generates nothing: use 1 or more")
        if not prompt_ids:
            raise OptionError("the prompt is empty: say something")
        check_room(len(prompt_ids), self.context_tokens)
        # the last token is always computed anew: its logits are needed
        cached = min(sequence.keep_common(prompt_ids), len(prompt_ids) - 1)
        sequence.truncate(cached)
        ends = frozenset() if ignore_end else self.tokenizer.end_ids
        plan = GenerationPlan(tuple(prompt_ids), cached, max_tokens, self.context_tokens, tuple(stop), self.load_s, ends)
        return Generation(
            plan,
            sequence,
            Sampler(params, self.vocab_size),
            self.tokenizer,
            (self._account("prefill"), self._account("decode")),
            time.perf_counter,
            on_end,
        )


class Chat:
    """A conversation. What an earlier turn computed is never computed again."""

    def __init__(self, model: Model, system: str | None) -> None:
        self._model, self._system = model, system
        self._sequence = model.sequence()
        self._messages: list[Message] = []
        self._token_ids: list[int] = []
        self._answer: Generation | None = None
        self.reset()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All turns so far, the system message included."""
        return tuple(self._messages)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far, the template's included."""
        return tuple(self._token_ids)

    def reset(self) -> None:
        """Forgets all turns, the system message excepted; an answer that is still coming ends."""
        self._end_answer()
        self._messages = [] if self._system is None else [Message("system", self._system)]
        self._token_ids = []

    def close(self) -> None:
        """Gives the conversation's pages back; an answer that is still coming ends."""
        self._end_answer()
        self._sequence.close()

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def send(
        self,
        text: str,
        *,
        max_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        logprobs: int = 0,
        **overrides: Unpack[SamplingOptions],
    ) -> Generation:
        """The answer to `text`; options as for `Model.generate`. A cancelled answer stays as far as it got.

        An answer that is still coming ends here: a conversation has one at a time.

        Raises:
            OptionError: an option cannot be used.
            ContextOverflowError: the conversation leaves no room for an answer; it is as it was before.
        """
        self._end_answer()
        template = self._model.chat_template
        messages = [*self._messages, Message("user", text)]
        added = template.encode_turn(messages, self._token_ids) if self._token_ids else None
        ids = template.encode(messages) if added is None else [*self._token_ids, *added]
        params = sampling_params(sampling, overrides, logprobs)

        def remember(generation: Generation) -> None:
            result = generation.result
            if generation.failed and not result.token_ids:
                return  # an error that left no answer leaves no turn
            self._messages = [*messages, Message("assistant", result.text)]
            self._token_ids = [*ids, *result.token_ids]

        self._answer = self._model._start(self._sequence, ids, max_tokens, params, stop, remember)
        return self._answer


def sampling_params(base: SamplingParams | None, overrides: SamplingOptions, logprobs: int) -> SamplingParams:
    """Sampling parameters with some fields replaced.

    Raises:
        OptionError: a name is no field, or a value cannot be used.
    """
    names = {field.name for field in fields(SamplingParams)}
    for name in overrides:
        if name not in names:
            raise OptionError(f"{name!r} is no sampling option: use {', '.join(sorted(names))}")
    params = replace(base or SamplingParams(), **overrides)
    return replace(params, logprobs=logprobs) if logprobs else params
