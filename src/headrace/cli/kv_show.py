"""What `headrace kv status` and `list` show of a kv folder: as a JSON document, and as tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headrace.config import KV_FORMATS, Config
from headrace.engine.results import reason_text
from headrace.kv.counters import Counters
from headrace.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from headrace.kv.inventory import Inventory, KeyInventory, SessionInventory


def model_name(session: SessionInventory, found: Inventory) -> str:
    """Name of the session's model; the beginning of its digest if no pages say which it is."""
    digest = session.record.model_digest
    return next((key.model for key in found.keys if key.key is not None and key.key.model_digest == digest), digest[:8])


def total_counters(found: Inventory) -> Counters:
    """Counts of all keys together."""
    total = Counters()
    for key in found.keys:
        total.add(key.counters)
    return total


def status_document(found: Inventory, config: Config) -> dict[str, object]:
    """All that is known of a folder. Times are in seconds since 1970."""
    return {
        "kv_dir": found.folder,
        "memory_limit_bytes": config.kv_memory_bytes,
        "formats": config.kv_formats,
        "disk_bytes": found.total_bytes,
        "disk_limit_bytes": config.kv_disk_bytes,
        "disk_pages": sum(key.num_pages for key in found.keys),
        "disk_tokens": sum(key.num_tokens for key in found.keys),
        "written_day": found.written_day or None,
        "written_bytes": found.written_bytes,
        "daily_limit_bytes": config.kv_daily_bytes,
        "sessions": len(found.sessions),
        "damaged_files": found.num_problems,
        "counters": _counters_document(total_counters(found)),
        "keys": [_key_document(key) for key in found.keys],
    }


def session_document(session: SessionInventory, found: Inventory) -> dict[str, object]:
    """A session. Times are in seconds since 1970."""
    record = session.record
    return {
        "name": record.name,
        "model": model_name(session, found),
        "messages": len(record.messages),
        "tokens": session.num_tokens,
        "disk_tokens": session.disk_tokens,
        "pinned": record.pinned,
        "priority": record.priority,
        "expires_s": record.expires_s,
        "updated_s": record.updated_s,
    }


def print_status(found: Inventory, config: Config) -> None:
    """The folder against its bounds, what is kept of each model, and what all processes that have ended counted."""
    if not found.keys and not found.sessions:
        sys.stdout.write(f"nothing is kept yet in {found.folder}\n")
        return
    num_pages, num_tokens = sum(key.num_pages for key in found.keys), sum(key.num_tokens for key in found.keys)
    lines = [
        f"{format_bytes(found.total_bytes)} of {format_bytes(config.kv_disk_bytes)} in {found.folder}",
        f"{_count(num_pages, 'page')} of {_count(num_tokens, 'token')}, {_count(len(found.sessions), 'session')}",
    ]
    if found.written_day:
        daily = f"{format_bytes(found.written_bytes)} of {format_bytes(config.kv_daily_bytes)} a day"
        lines.append(f"written on {found.written_day} (UTC): {daily}")
    if found.num_problems:
        lines.append(f"{_count(found.num_problems, 'damaged file')}: headrace kv verify --repair keeps what is sound")
    sys.stdout.write("\n".join(lines) + "\n\n")
    told_apart = len({key.model for key in found.keys}) < len(found.keys)
    rows = [
        (
            key.model,
            f"{key.num_pages:,}",
            f"{key.num_tokens:,}",
            format_bytes(key.total_bytes),
            ", ".join(f"{pages:,} {_format_name(code)}" for code, pages in key.pages_by_format.items()) or "-",
            _time(key.newest_s),
            "yes" if key.in_use else "no",
            *([key.numbers] if told_apart else []),
        )
        for key in found.keys
    ]
    headings = ("model", "pages", "tokens", "bytes", "formats", "last used", "in use", *(["made by"] if told_apart else []))
    _print_table(headings, rows, right=(1, 2, 3))
    total = total_counters(found)
    if total.lookups:
        sys.stdout.write("\n" + "\n".join(_counter_lines(total)) + "\n")


def print_sessions(found: Inventory) -> None:
    """The table of sessions, the last used first."""
    if not found.sessions:
        sys.stdout.write(f"no session is kept yet in {found.folder}\n")
        return
    rows = [
        (
            each.record.name,
            model_name(each, found),
            f"{len(each.record.messages):,}",
            f"{each.num_tokens:,}",
            f"{each.disk_tokens:,}",
            "yes" if each.record.pinned else "no",
            _time(each.record.expires_s, "never"),
            _time(each.record.updated_s),
        )
        for each in found.sessions
    ]
    headings = ("session", "model", "messages", "tokens", "on disk", "pinned", "expires", "last used")
    _print_table(headings, rows, right=(2, 3, 4))


def _counter_lines(total: Counters) -> list[str]:
    rates = _rates(total)
    missed = sum(total.missed_tokens.values())
    reasons = sorted(total.missed_tokens.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"{_count(total.lookups, 'lookup')} of {_count(total.prompt_tokens, 'token')}"]
    compressed = f"{100 * rates['compressed']:.1f} % there in compressed pages, " if total.compressed_tokens else ""
    lines[0] += f": {100 * rates['memory']:.1f} % found in memory, {compressed}{100 * rates['disk']:.1f} % on disk"
    if total.saved_s:
        lines[0] += f", {format_seconds(total.saved_s)} saved"
    if missed:
        lines.append(
            f"{_count(missed, 'token')} missed: " + ", ".join(f"{count:,} {reason_text(reason)}" for reason, count in reasons)
        )
    moved = (("read", total.read_bytes), ("written", total.written_bytes), ("compressed", total.compressed_bytes))
    lines.append(", ".join(f"{format_bytes(num_bytes)} {verb}" for verb, num_bytes in moved))
    return lines


def _rates(counters: Counters) -> dict[str, float]:
    """Share of the tokens of prompts that was found, by tier: exact in memory, compressed there, on disk."""
    exact_tokens = counters.memory_tokens - counters.compressed_tokens
    found = {"memory": exact_tokens, "compressed": counters.compressed_tokens, "disk": counters.disk_tokens}
    return {tier: num_tokens / max(1, counters.prompt_tokens) for tier, num_tokens in found.items()}


def _counters_document(counters: Counters) -> dict[str, object]:
    return {**asdict(counters), "hit_rates": _rates(counters)}


def _key_document(key: KeyInventory) -> dict[str, object]:
    return {
        "model": key.model,
        "model_digest": None if key.key is None else key.key.model_digest,
        "numbers": key.numbers,
        "folder": key.folder,
        "disk_bytes": key.total_bytes,
        "runs": key.num_runs,
        "pages": key.num_pages,
        "pages_by_format": {_format_name(code): pages for code, pages in key.pages_by_format.items()},
        "tokens": key.num_tokens,
        "oldest_s": key.oldest_s,
        "newest_s": key.newest_s,
        "in_use": key.in_use,
        "counters": _counters_document(key.counters),
    }


def _format_name(code: int) -> str:
    return KV_FORMATS[code] if code < len(KV_FORMATS) else f"format {code}"


def _time(time_s: float | None, none: str = "-") -> str:
    """A time in the zone of this machine, to the minute."""
    return none if time_s is None else datetime.fromtimestamp(time_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _print_table(headings: tuple[str, ...], rows: Sequence[Sequence[str]], *, right: tuple[int, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, heading in enumerate(headings):
        named = heading in {"session", "model", "formats", "made by"}
        table.add_column(heading, justify="right" if at in right else "left", overflow="fold", no_wrap=not named)
    for row in rows:
        table.add_row(*map(Text, row))  # names are not markup
    Console(highlight=False).print(table)
