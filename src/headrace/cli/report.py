"""Speeds out of a result: the closing line, the JSON document, the table of operations.

Knows results only. A speed is None where nothing was measured, never infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from headrace.engine.results import GenerationResult, KeptPast, Reuse, reason_text
from headrace.model.step import LedgerTotals
from headrace.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from headrace.cli.protocols import OperationRow


SAVED_WORTH_SAYING_S = 0.01


@dataclass(frozen=True)
class Speeds:
    """What an answer reached. Decoding is what the bandwidth is compared with."""

    prefill_tok_s: float | None
    decode_tok_s: float | None
    gb_s: float | None
    read_bandwidth_gb_s: float | None
    bandwidth_fraction: float | None

    @classmethod
    def of(cls, result: GenerationResult, read_bandwidth: Callable[[], float]) -> Speeds:
        """Speeds of one answer: prompt tokens that were computed, without the wait for others to be read, and generated ones.

        `read_bandwidth` measures bytes per second; it is called only if there is something to compare with it.
        """
        usage, timings = result.usage, result.timings
        bytes_per_s = _rate(result.decode_ledger.total_bytes, timings.decode_s)
        bandwidth = None if bytes_per_s is None else read_bandwidth()
        return cls(
            prefill_tok_s=_rate(usage.prompt_tokens - usage.cached_tokens, timings.prefill_s - result.reuse.load_s),
            decode_tok_s=_rate(usage.completion_tokens - 1, timings.decode_s),
            gb_s=None if bytes_per_s is None else bytes_per_s / 1e9,
            read_bandwidth_gb_s=None if bandwidth is None else bandwidth / 1e9,
            bandwidth_fraction=None if bytes_per_s is None or bandwidth is None else bytes_per_s / bandwidth,
        )


def closing_line(result: GenerationResult, speeds: Speeds) -> str:
    """'prompt 24 tokens (20 known, 0.42 s saved) at 1,234 tok/s, generated 128 tokens at 211 tok/s, 20.1 GB/s'."""
    usage, reuse = result.usage, result.reuse
    parts = [
        f"prompt {_tokens(usage.prompt_tokens)}{_known(usage.cached_tokens, reuse)}{_at(speeds.prefill_tok_s)}",
        f"generated {_tokens(usage.completion_tokens)}{_at(speeds.decode_tok_s)}",
    ]
    if reuse.streamed_bytes:
        parts.append(f"{format_bytes(reuse.streamed_bytes)} of the past read from disk in {format_seconds(reuse.streamed_s)}")
    if speeds.gb_s is not None and speeds.bandwidth_fraction is not None:
        parts += [f"{speeds.gb_s:.3g} GB/s", f"{100 * speeds.bandwidth_fraction:.0f} % of the machine's read bandwidth"]
    return ", ".join(parts)


def miss_lines(reuse: Reuse) -> list[str]:
    """'computed 35 tokens from token 20 on: diverged, ...', one for each stretch of the prompt that was not found."""
    return [
        f"computed {_tokens(miss.num_tokens)} from token {miss.at_token:,} on: "
        + ", ".join(part for part in (reason_text(miss.reason), " ".join(miss.detail.split())) if part)
        for miss in reuse.misses
    ]


def seed_lines(result: GenerationResult) -> list[str]:
    """['seed 1234'], or nothing where no token was drawn."""
    return [] if result.seed is None else [f"seed {result.seed}"]


def result_document(result: GenerationResult, speeds: Speeds) -> dict[str, object]:
    """A result and its speeds as JSON has them."""
    document: dict[str, object] = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "usage": asdict(result.usage),
        "timings": asdict(result.timings),
        "speeds": asdict(speeds),
        "reuse": asdict(result.reuse),
        "ledger": {
            "prefill": ledger_document(result.prefill_ledger),
            "decode": ledger_document(result.decode_ledger),
            "total": ledger_document(result.prefill_ledger + result.decode_ledger),
        },
    }
    if result.logprobs:
        document["logprobs"] = [
            {
                "token_id": token.token_id,
                "text": token.text,
                "logprob": token.logprob,
                "top": [{"token_id": other, "text": text, "logprob": logprob} for other, text, logprob in token.top],
            }
            for token in result.logprobs
        ]
    return document


def ledger_document(ledger: LedgerTotals) -> dict[str, int]:
    """Ledger totals with their sum."""
    return {**asdict(ledger), "total_bytes": ledger.total_bytes}


def operations_document(rows: Sequence[OperationRow]) -> list[dict[str, object]]:
    """Rows of the table of operations."""
    return [
        {
            "phase": row.phase,
            "operation": row.operation,
            "calls": row.calls,
            "macs": row.macs,
            "total_bytes": row.total_bytes,
            "time_s": row.time_s,
        }
        for row in rows
    ]


def print_operations(rows: Sequence[OperationRow]) -> None:
    """The table of operations, on standard error."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("phase", "operation"):
        table.add_column(heading)
    for heading in ("calls", "time", "share", "bytes", "GB/s", "GMAC/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        phase_s = sum(other.time_s for other in rows if other.phase == row.phase)
        table.add_row(
            row.phase,
            row.operation,
            f"{row.calls:,}",
            format_seconds(row.time_s),
            f"{100 * row.time_s / phase_s:.1f} %" if phase_s else "-",
            format_bytes(row.total_bytes),
            _giga(row.total_bytes, row.time_s),
            _giga(row.macs, row.time_s),
        )
    Console(stderr=True).print(table)


def print_line(line: str) -> None:
    """A line about an answer, on standard error, so that the answer stands out: dimmed on a terminal."""
    import sys

    if sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True).print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
    else:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def kept_line(kept: KeptPast) -> str:
    """'the past: 12 pages f16 in memory, 8.85 MB of 755 MB; 44.3 MB on disk'."""
    pages = ", ".join(f"{count:,} pages {name}" for name, count in kept.memory_pages.items() if count) or "no pages"
    disk = "nothing on disk" if kept.disk_bytes is None else f"{format_bytes(kept.disk_bytes)} on disk"
    return f"the past: {pages} in memory, {format_bytes(kept.memory_bytes)} of {format_bytes(kept.memory_limit_bytes)}; {disk}"


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if amount > 0 and seconds > 0 else None


def _giga(amount: float, seconds: float) -> str:
    rate = _rate(amount, seconds)
    return "-" if rate is None else f"{rate / 1e9:.3g}"


def _known(cached_tokens: int, reuse: Reuse) -> str:
    """' (20 known, 4 from disk in 3 ms, 0.42 s saved)', or nothing when nothing was known."""
    if not cached_tokens:
        return ""
    parts = [f"{cached_tokens:,} known"]
    if reuse.disk_tokens:
        parts.append(f"{reuse.disk_tokens:,} from disk in {format_seconds(reuse.load_s)}")
    if reuse.saved_s > SAVED_WORTH_SAYING_S:
        parts.append(f"{reuse.saved_s:.3g} s saved" if reuse.saved_s >= 1 else f"{reuse.saved_s:.2f} s saved")
    return f" ({', '.join(parts)})"


def _tokens(count: int) -> str:
    return f"{count:,} token" if count == 1 else f"{count:,} tokens"


def _at(tok_s: float | None) -> str:
    if tok_s is None:
        return ""
    return f" at {tok_s:,.0f} tok/s" if tok_s >= 100 else f" at {tok_s:.3g} tok/s"
