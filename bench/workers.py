"""One engine in one process, driven by JSON lines: a request on standard input, an answer on standard output.

    python bench/workers.py headrace | llama.cpp | openvino

Each engine has a process of its own, so that its memory can be measured and its threads sleep while another engine runs.
Requests: load, prefill, decode, account, memory. Every engine computes the same random tokens, call by call. No two
prefills have the same ones: an engine that keeps the past of old prompts (OpenVINO GenAI does) would only look it up.

Does not know: what is compared with what, how often, and what the figures are for.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

SEED = 20_240_229
ORPHAN_GRACE_S = 5.0
"""How long a worker may take to end by itself once nobody can ask it any more."""
TOKEN_RANGE = (1_000, 40_000)  # ordinary tokens in every vocabulary here

E = TypeVar("E")


class Engine(Protocol):
    """What a worker can do with an engine. Speeds are tokens per second."""

    def load(self, path: str, threads: int, context: int) -> dict[str, Any]:
        """Loads a model, after closing the one before."""

    def prefill(self, tokens: list[int]) -> float:
        """Computes a prompt from nothing."""

    def decode(self, depth: int, num_tokens: int) -> float:
        """Generates greedily on top of `depth` tokens, which are computed once and kept from call to call."""

    def account(self, num_tokens: int) -> dict[str, Any]:
        """What the engine says of its own decoding; empty where it keeps no account."""
        assert num_tokens > 0
        return {}


def prompt(num_tokens: int, number: int = 0) -> list[int]:
    """The first `num_tokens` of the `number`-th sequence of random tokens: speed does not depend on what they say."""
    drawn: list[int] = np.random.default_rng([SEED, number]).integers(*TOKEN_RANGE, num_tokens).tolist()
    return drawn


class Headrace(Engine):
    """This project, as its users drive it: greedy answers on top of a sequence."""

    def __init__(self) -> None:
        self._model: Any = None
        self._sequence: Any = None

    def load(self, path: str, threads: int, context: int) -> dict[str, Any]:
        """Loads a model, after closing the one before."""
        import headrace

        if self._model is not None:
            self._model.close()
        self._model = headrace.load(path, threads=threads, context=context)
        self._sequence = self._model.sequence()
        return {"version": headrace.__version__, "build": f"kernels {self._model.cpu_level}"}

    def prefill(self, tokens: list[int]) -> float:
        """Computes a prompt from nothing."""
        sequence = self._model.sequence()
        start = time.perf_counter()
        sequence.append(tokens)
        seconds = time.perf_counter() - start
        sequence.close()
        return len(tokens) / seconds

    def decode(self, depth: int, num_tokens: int) -> float:
        """Generates greedily on top of `depth` tokens."""
        answer = self._model.generate_ids(prompt(depth), sequence=self._sequence, max_tokens=num_tokens + 1, ignore_end=True)
        answer.text()
        return float(num_tokens / answer.result.timings.decode_s)

    def account(self, num_tokens: int) -> dict[str, Any]:
        """What Headrace's own benchmark says, and what its memory is made of."""
        from headrace.engine.bench import run_bench
        from headrace.kv.pages import page_bytes, pages_for

        result = run_bench(self._model, prompt_tokens=0, gen_tokens=num_tokens, depth_tokens=0, repeat=3)
        return {
            "bandwidth_fraction": result.bandwidth_fraction,
            "gb_s": result.gb_s,
            "read_bandwidth_gb_s": result.read_bandwidth_gb_s,
            "weights_mb": self._model.weights_bytes / 1e6,
            "kv_mb": pages_for(self._sequence.num_tokens) * page_bytes(self._model.config) / 1e6,
        }


def llama_params(path: str, threads: int, context: int, flash_attention: str) -> Any:
    """How llama.cpp is set up for every comparison.

    One slot, memory-mapped weights, 16-bit keys and values, its own warm-up, no copies of old prompts in memory. Flash
    attention is a setting: with smollm2 it gained with a short past and lost by far with a long one, with gemma3 it gained.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash_attention}")
    params.swa_full = True  # or the past of sliding-window layers is computed anew before every run
    params.cache_ram_mib = 0
    params.ui = False
    params.verbosity = 0
    return params


def llama_timings(server: Any, tokens: list[int], num_tokens: int, **options: Any) -> dict[str, Any]:
    """Answers a prompt greedily; what llama.cpp says it took.

    Raises:
        RuntimeError: it has not answered.
    """
    request = {
        "prompt": tokens,
        "max_tokens": num_tokens,
        "temperature": 0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        **options,
    }
    answer = server.handle_completions(request)
    if "timings" not in answer:
        raise RuntimeError(f"llama.cpp answers {answer}")
    timings: dict[str, Any] = answer["timings"]
    return timings


class LlamaCpp(Engine):
    """llama.cpp as the wheel xllamacpp builds it, through its server's own Python entry (no HTTP)."""

    def __init__(self, flash_attention: str = "AUTO") -> None:
        self._flash_attention = flash_attention
        self._server: Any = None

    def load(self, path: str, threads: int, context: int) -> dict[str, Any]:
        """Loads a model, after closing the one before."""
        import importlib.metadata

        import xllamacpp

        self._server = None
        self._server = xllamacpp.Server(llama_params(path, threads, context, self._flash_attention))
        build = " ".join(part for part in xllamacpp.get_system_info().split(" | ") if part.endswith("= 1"))
        return {"version": importlib.metadata.version("xllamacpp"), "build": build.replace(" = 1", "").replace("CPU : ", "")}

    def prefill(self, tokens: list[int]) -> float:
        """Computes a prompt from nothing."""
        timings = llama_timings(self._server, tokens, 1, cache_prompt=False)
        assert timings["prompt_n"] == len(tokens)  # none of them came from a cache
        return float(timings["prompt_per_second"])

    def decode(self, depth: int, num_tokens: int) -> float:
        """Generates greedily on top of `depth` tokens."""
        # The first token belongs to the prompt's time: llama.cpp counts one token less than it predicts.
        timings = llama_timings(self._server, prompt(depth), num_tokens + 1, cache_prompt=True)
        return float(timings["predicted_per_second"])


class OpenVino(Engine):
    """OpenVINO GenAI on the same GGUF file, with its own choices of precision for activations, keys and values."""

    def __init__(self) -> None:
        self._pipeline: Any = None

    def load(self, path: str, threads: int, context: int) -> dict[str, Any]:
        """Loads a model, after closing the one before."""
        import openvino_genai

        del context  # it takes what a prompt needs
        self._pipeline = None
        self._pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, PERFORMANCE_HINT="LATENCY")
        return {"version": openvino_genai.__version__, "build": ""}

    def _metrics(self, tokens: list[int], num_generated: int) -> Any:
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_generated
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([tokens], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(tokens)), dtype=np.int64))
        return self._pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config).perf_metrics

    def prefill(self, tokens: list[int]) -> float:
        """Computes a prompt from nothing."""
        return float(len(tokens) / self._metrics(tokens, 2).get_ttft().mean * 1e3)

    def decode(self, depth: int, num_tokens: int) -> float:
        """Generates greedily on top of `depth` tokens."""
        return float(1e3 / self._metrics(prompt(depth), num_tokens).get_tpot().mean)


ENGINES = {
    "headrace": Headrace,
    "llama.cpp": LlamaCpp,
    "llama.cpp-no-fa": lambda: LlamaCpp("DISABLED"),
    "openvino": OpenVino,
}


def resident_mb() -> float | None:
    """Resident memory of this process, mapped files included, in 10^6 bytes; None where /proc is not to be had."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123, no import of pathlib for one line
            return next(int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith("VmRSS:"))
    except (OSError, StopIteration):
        return None


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Does what one request asks for."""
    match request["op"]:
        case "load":
            start = time.perf_counter()
            about = engine.load(request["path"], request["threads"], request["context"])
            return {**about, "load_s": time.perf_counter() - start}
        case "prefill":
            return {"tok_s": engine.prefill(prompt(request["tokens"], request["number"]))}
        case "decode":
            return {"tok_s": engine.decode(request["depth"], request["tokens"])}
        case "account":
            return engine.account(request["tokens"])
        case "memory":
            return {"rss_mb": resident_mb()}
        case unknown:
            raise ValueError(f"unknown request {unknown!r}")


def end_with_parent(descriptor: int = 0, grace_s: float = ORPHAN_GRACE_S) -> None:
    """Ends this process soon after the other end of a pipe was closed, whatever it is computing then.

    A parent that was killed cannot end its workers, and a request may take minutes: without this, workers would go on
    computing beside the next measurement. Whoever ends by itself within `grace_s` is not disturbed.
    """
    if not hasattr(select, "poll"):  # Windows has none: there a worker ends after its request
        return
    closed = select.poll()
    closed.register(descriptor, 0)  # no events are asked for: a closed pipe is always told

    def wait() -> None:
        while not any(event & (select.POLLHUP | select.POLLERR) for _, event in closed.poll()):
            pass
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def serve(engine: E, act: Callable[[E, dict[str, Any]], dict[str, Any]]) -> None:
    """Has an engine `act` on requests until standard input ends. Whatever it prints goes to standard error."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = act(engine, json.loads(line))
        except Exception as error:  # noqa: BLE001, the parent decides what a failure of an engine means
            lines = str(error).strip().splitlines() or ["it said nothing"]  # the last line is the nearest to the cause
            reply = {"error": f"{type(error).__name__}: {lines[-1]}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(ENGINES[sys.argv[1]](), answer)
