"""The rule that decides which pages stay, against LRU and the best possible, on request traces.

    python bench/kv_policies.py TRACES                     every trace of the folder that is in the table below
    python bench/kv_policies.py TRACES --only agent_sessions
    python bench/kv_policies.py TRACES --json-out kv.json

Prints a table and ends in one JSON line. `share` is how much of the distance from LRU to the best possible is closed. One
rule with one set of settings replays all traces, each from nothing. Exits with 1 if a goal is missed: nowhere more than
0.005 below LRU, at least 10 % of the distance on average.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from headrace.kv.simulator import POLICIES, timed
from headrace.kv.trace import read_trace

CAPACITIES = {
    "mooncake_conversation": (1000, 3000, 10000, 30000),
    "mooncake_synthetic": (1000, 3000, 10000, 30000),
    "agent_sessions": (2000, 8000, 32000),
}
"""Blocks, by trace."""
MOST_BELOW_LRU = 0.005
LEAST_MEAN_SHARE = 0.10


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, help="folder of the traces, named <trace>.jsonl.gz")
    parser.add_argument("--only", action="append", choices=list(CAPACITIES), metavar="TRACE", help=", ".join(CAPACITIES))
    parser.add_argument("--json-out", type=Path, help="also write the JSON line to this file")
    return parser.parse_args(argv)


def measure(path: Path, capacities: Sequence[int]) -> list[dict[str, float]]:
    """Hit rates of each policy at each capacity, the share of the distance closed, and requests per second."""
    requests = read_trace(path)
    rows = []
    for capacity in capacities:
        timings = {policy: timed(requests, [capacity], policy, time.process_time) for policy in POLICIES}
        rates = {policy: result.hit_rate for policy, (result, _) in timings.items()}
        distance = rates["best"] - rates["lru"]
        share = (rates["headrace"] - rates["lru"]) / distance if distance else 0.0
        rows.append({"capacity_blocks": capacity, **rates, "share": share, "requests_per_s": timings["headrace"][1]})
    return rows


def main() -> int:
    """Prints the table; 1 if a goal is missed."""
    options = arguments()
    print(f"{'trace':<22} {'blocks':>7} {'LRU':>7} {'headrace':>8} {'best':>7} {'share':>7} {'requests/s':>11}")
    found: dict[str, list[dict[str, float]]] = {}
    for name in options.only or CAPACITIES:
        found[name] = measure(options.traces / f"{name}.jsonl.gz", CAPACITIES[name])
        for row in found[name]:
            print(
                f"{name:<22} {row['capacity_blocks']:>7} {row['lru']:>7.4f} {row['headrace']:>8.4f} {row['best']:>7.4f} "
                f"{row['share']:>7.1%} {row['requests_per_s']:>11.0f}",
                flush=True,
            )
    rows = [row for each in found.values() for row in each]
    mean_share = fmean(row["share"] for row in rows)
    worst = min(row["headrace"] - row["lru"] for row in rows)
    print(f"\nmean share {mean_share:.1%}; worst against LRU {worst:+.4f}")
    line = json.dumps(
        {
            "bench": "kv_policies",
            "python": platform.python_version(),
            "machine": platform.machine(),
            "mean_share": mean_share,
            "worst_against_lru": worst,
            "traces": found,
        }
    )
    print(line)
    if options.json_out:
        options.json_out.write_text(line + "\n", encoding="utf-8")
    return 0 if worst >= -MOST_BELOW_LRU and mean_share >= LEAST_MEAN_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
