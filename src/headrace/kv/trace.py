"""Request traces: which blocks of prompt each request of a service had, in the order of arrival.

One JSON object per line, plain or gzip, in the form of Mooncake's release (FAST'25):

    timestamp       ms since the start
    input_length    tokens of the prompt
    output_length   tokens of the answer
    hash_ids        one id per block of the prompt; equal ids mean equal prompts up to the end of the block
    hash_id_runs    instead of hash_ids: inclusive runs [first, last] of consecutive ids
    block_tokens    tokens of a block, 512 if absent
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import OptionError

DEFAULT_BLOCK_TOKENS = 512
MAX_BLOCKS = 1 << 20
"""Blocks of one request: a run beyond it is a mistake in the file, not a prompt."""
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class TraceRequest:
    """One request: when it came, its blocks, and the tokens of its answer."""

    time_s: float
    block_ids: tuple[int, ...]
    num_answer_tokens: int
    block_tokens: int


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a file.

    Raises:
        OptionError: the file cannot be read, or a line of it is no request.
    """
    requests: list[TraceRequest] = []
    try:
        for number, line in enumerate(_lines(path), 1):
            if line.strip():
                requests.append(_request(line, f"{path} line {number}"))
                if len(requests) > 1 and requests[-1].time_s < requests[-2].time_s:
                    raise OptionError(f"{path} line {number} is earlier than the line before: sort the trace by timestamp")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError(f"the trace {path} cannot be read ({reason}): name a .jsonl file, plain or gzip") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"the trace {path} is no text: name a .jsonl file, plain or gzip") from error
    if not requests:
        raise OptionError(f"the trace {path} holds no request: name a file with one JSON object per line")
    return requests


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP_MAGIC
    with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as text:
        yield from text


def _request(line: str, where: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{where} is no JSON ({error}): write one object per line") from error
    if not isinstance(fields, dict):
        raise OptionError(f"{where} is no JSON object: write one object per line")
    return TraceRequest(
        time_s=_number(fields, "timestamp", where) / 1000.0,
        block_ids=_block_ids(fields, where),
        num_answer_tokens=int(_number(fields, "output_length", where, 0)),
        block_tokens=max(1, int(_number(fields, "block_tokens", where, DEFAULT_BLOCK_TOKENS))),
    )


def _number(fields: dict[str, Any], name: str, where: str, default: float | None = None) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise OptionError(f"{where} has {name}={value!r}: it must be a number from 0 on")
    return value


def _block_ids(fields: dict[str, Any], where: str) -> tuple[int, ...]:
    if ("hash_ids" in fields) == ("hash_id_runs" in fields):
        raise OptionError(f"{where} must have either hash_ids or hash_id_runs")
    if "hash_ids" in fields:
        ids = fields["hash_ids"]
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise OptionError(f"{where} has hash_ids that are no list of whole numbers: write [0, 1, 2]")
    else:
        runs, ids = fields["hash_id_runs"], []
        if not isinstance(runs, list):
            raise OptionError(f"{where} has hash_id_runs that are no list: write [[first, last], ...]")
        for run in runs:
            pair = isinstance(run, list) and len(run) == 2 and all(type(each) is int for each in run)
            if not pair or not run[0] <= run[1] < run[0] + MAX_BLOCKS:
                raise OptionError(f"{where} has the run {run!r}: write [first, last] with first <= last, {MAX_BLOCKS} at most")
            ids.extend(range(run[0], run[1] + 1))
    if len(ids) > MAX_BLOCKS:
        raise OptionError(f"{where} has {len(ids)} blocks: {MAX_BLOCKS} at most")
    return tuple(ids)
