"""`headrace kv simulate`: replays a request trace against the rule that decides which of the past stays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import options as o
from headrace.cli.errors import guarded
from headrace.errors import OptionError
from headrace.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from headrace.kv.simulator import Policy, SimulationResult

MAX_TIERS = 4
SMOLLM2_SIZE = "23040"
"""Keys and values of one token of smollm2: 30 layers, 3 KV heads, 64 wide, float16."""


@guarded
def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Requests as JSON lines in Mooncake's form, plain or gzip.")],
    capacity: Annotated[
        str, typer.Option(metavar="N[,M...]", help="Blocks that each tier holds, the nearest first: 1000 or 1000,10000.")
    ],
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="What decides which blocks stay: headrace, lru or best.")
    ] = "headrace",
    token_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes of keys and values per token, for what is moved and written.")
    ] = SMOLLM2_SIZE,
    as_json: o.AsJson = False,
) -> None:
    """Replay a request trace and count which blocks are found."""
    from headrace.kv.simulator import simulate as replay
    from headrace.kv.simulator import timed
    from headrace.kv.trace import read_trace

    capacities = parse_capacities(capacity)
    num_token_bytes = parse_bytes(token_bytes)
    requests = read_trace(trace)
    checked = replay_policy(policy)
    result, requests_per_s = timed(requests, capacities, checked, time.perf_counter)
    references = {
        name: result if name == checked else replay(requests, capacities, replay_policy(name)) for name in ("lru", "best")
    }
    document = {
        "trace": str(trace),
        "policy": policy,
        "capacity_blocks": capacities,
        "block_tokens": requests[0].block_tokens,
        "requests": result.num_requests,
        "blocks": result.num_blocks,
        **_rates(result, num_token_bytes * requests[0].block_tokens),
        "lru_hit_rate": references["lru"].hit_rate,
        "best_hit_rate": references["best"].hit_rate,
        "requests_per_s": requests_per_s,
    }
    if as_json:
        from headrace.cli.output import write_json

        write_json(document)
    else:
        _show(result, references, num_token_bytes * requests[0].block_tokens, requests_per_s)


def parse_capacities(text: str) -> list[int]:
    """'1000,10000' as numbers.

    Raises:
        OptionError: it is no list of positive whole numbers, or there are more than MAX_TIERS.
    """
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and 0 < int(part) < 2**40 for part in parts):
        raise OptionError(f"--capacity={text!r} is no list of capacities: write blocks per tier, such as 1000 or 1000,10000")
    if len(parts) > MAX_TIERS:
        raise OptionError(f"--capacity={text!r} has {len(parts)} tiers: give {MAX_TIERS} at most")
    return [int(part) for part in parts]


def replay_policy(name: str) -> Policy:
    """The policy of this name.

    Raises:
        OptionError: there is none.
    """
    from headrace.kv.simulator import POLICIES

    for policy in POLICIES:
        if name == policy:
            return policy
    raise OptionError(f"--policy={name!r} is not a policy: use one of {', '.join(POLICIES)}")


def _rates(result: SimulationResult, num_block_bytes: int) -> dict[str, object]:
    """What the simulation counted. The best possible is only counted, so it moves nothing that could be told."""
    counted = result.policy != "best"
    return {
        "hit_rate": result.hit_rate,
        "tier_hit_rates": result.tier_hit_rates,
        "promoted_bytes": result.promoted_blocks * num_block_bytes if counted else None,
        "written_bytes": result.written_blocks * num_block_bytes if counted else None,
        "moved_bytes": (result.promoted_blocks + result.written_blocks) * num_block_bytes if counted else None,
        "dropped_blocks": result.dropped_blocks if counted else None,
    }


def _show(
    result: SimulationResult, references: dict[str, SimulationResult], num_block_bytes: int, requests_per_s: float
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("policy", "hit rate", *(f"tier {tier}" for tier in range(len(result.tier_hit_blocks))), "moved", "written"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    rows = {result.policy: result, **{each.policy: each for each in references.values()}}
    for row in rows.values():
        moved = [row.promoted_blocks + row.written_blocks, row.written_blocks]
        table.add_row(
            row.policy,
            f"{row.hit_rate:.4f}",
            *(f"{rate:.4f}" for rate in row.tier_hit_rates),
            *("-" if row.policy == "best" else format_bytes(blocks * num_block_bytes) for blocks in moved),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"\n{result.num_requests} requests, {result.num_blocks} blocks; {requests_per_s:.0f} requests per second",
        markup=False,
        soft_wrap=True,
    )
