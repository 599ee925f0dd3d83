"""llama.cpp's values for both real models, computed once per session, and the same models loaded by Headrace.

llama.cpp runs with one thread: its threads wait for each other at every operation, so that two of them on a machine that is
doing something else can be ten times slower than one. Its values do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import xllamacpp

import headrace

CONTEXT_TOKENS = 4096
TOP = 20
GREEDY_TOKENS = 64
FORCING_BIAS = 1000.0  # added to one logit, it beats every other; the log-probabilities are those from before the bias
TEXT_PATH = Path(__file__).parent.parent / "data" / "alice.txt"

GREEDY_PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village at the foot of a mountain,",
    "To make a good cup of tea, you first",
    "The three laws of motion state that",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Dear Sir or Madam,\n\n",
    "1, 2, 3, 4, 5,",
    "The difference between a frog and a toad is",
    "In 1969, for the first time,",
    "Les oiseaux chantent dans",
    "Question: What do bees make?\nAnswer:",
)


@dataclass(frozen=True)
class Place:
    """What llama.cpp says of the token at one place: its log-probability and those of the most likely ones there."""

    token_id: int
    logprob: float
    top: dict[int, float]


class Reference:
    """One model in llama.cpp, driven through its server's own Python entry, no HTTP."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = CONTEXT_TOKENS
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        # flash attention takes two to three times as long with a long past of smollm2
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.swa_full = True  # otherwise the past of sliding-window layers is dropped and every call starts anew
        params.cache_ram_mib = 0
        params.ui = False
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def _places(self, token_ids: Sequence[int], num_tokens: int, top: int, bias: list[list[float]]) -> list[Place]:
        request = {
            "prompt": list(token_ids),
            "max_tokens": num_tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "cache_prompt": True,
            "logprobs": top,
            "logit_bias": bias,
        }
        answer = self._server.handle_completions(request)
        assert "choices" in answer, answer
        return [
            Place(entry["id"], entry["logprob"], {other["id"]: other["logprob"] for other in entry["top_logprobs"]})
            for entry in answer["choices"][0]["logprobs"]["content"]
        ]

    def greedy(self, token_ids: Sequence[int]) -> list[Place]:
        """The most likely continuation, up to GREEDY_TOKENS or the end token."""
        return self._places(token_ids, GREEDY_TOKENS, 2, [])

    def forced(self, token_ids: Sequence[int]) -> list[Place]:
        """Place i is that of token i + 1, given tokens 0 to i: one step per token, the past kept from call to call."""
        places = []
        for index, token_id in enumerate(token_ids[1:], start=1):
            (place,) = self._places(token_ids[:index], 1, TOP, [[token_id, FORCING_BIAS]])
            assert place.token_id == token_id
            places.append(place)
        return places


@dataclass(frozen=True)
class Pair:
    """A model in Headrace, and what llama.cpp says of the same tokens."""

    name: str
    model: headrace.Model
    text: str
    text_ids: list[int]
    forced: list[Place]
    prompt_ids: dict[str, list[int]]
    greedy: dict[str, list[Place]]


@pytest.fixture(scope="session", params=["smollm2", "gemma3"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both engines on one model; the token ids are Headrace's, and tests/text compares the tokenizers."""
    path: Path = request.getfixturevalue(f"{request.param}_path")
    text = TEXT_PATH.read_text(encoding="utf-8")
    with headrace.load(str(path), context=CONTEXT_TOKENS) as model:
        text_ids = _encode(model, text)
        prompt_ids = {prompt: _encode(model, prompt) for prompt in GREEDY_PROMPTS}
        reference = Reference(path)
        forced = reference.forced(text_ids)
        greedy = {prompt: reference.greedy(ids) for prompt, ids in prompt_ids.items()}
        del reference
        yield Pair(request.param, model, text, text_ids, forced, prompt_ids, greedy)


def _encode(model: headrace.Model, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_bos=model.tokenizer.adds_bos)
