"""`headrace bench`: how fast a model prefills and decodes here, and how near that is to the memory's limit."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated

import typer

from headrace import __version__
from headrace.cli import options as o
from headrace.cli.errors import guarded
from headrace.cli.loading import loaded_model
from headrace.engine.bench import BenchResult, check_counts, run_bench
from headrace.units import format_bytes, format_seconds

_MEASURED_PACKAGES = ("numpy", "numba", "llvmlite", "tokenizers")


@guarded
def bench(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help=o.MODEL_HELP)] = o.DEFAULT_MODEL,
    prompt: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens of a prefill run; 0 for none.")] = 512,
    gen: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens of a decode run; 0 for none.")] = 128,
    depth: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens that are there before each run.")] = 0,
    threads: o.Threads = None,
    repeat: Annotated[int, typer.Option(metavar="N", help="Runs of each kind, after one to warm up.")] = 5,
    no_cache: o.NoCache = False,
    as_json: o.AsJson = False,
) -> None:
    """Measure prefill and decode speed, as llama-bench does."""
    check_counts(prompt, gen, depth, repeat)
    loading = o.LoadOptions(model, threads, depth + max(prompt, gen), not no_cache)
    with loaded_model(loading) as loaded:
        result = run_bench(
            loaded,
            prompt_tokens=prompt,
            gen_tokens=gen,
            depth_tokens=depth,
            repeat=repeat,
            on_run=_show_run if sys.stderr.isatty() else None,
        )
        cpu_level = loaded.cpu_level
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if as_json:
        _print_document(result, cpu_level)
    else:
        _print_table(result, cpu_level)


def _show_run(kind: str, run: int) -> None:
    """One line that overwrites itself: a bar that redraws while a run is timed would slow it down."""
    sys.stderr.write(f"\r\x1b[K{kind}: {f'run {run}' if run else 'warming up'}")
    sys.stderr.flush()


def _print_document(result: BenchResult, cpu_level: str) -> None:
    from headrace.cli.output import write_json
    from headrace.engine.machine import describe

    write_json(
        {
            **asdict(result),
            "cpu_level": cpu_level,
            "machine": asdict(describe()),
            "versions": {
                "headrace": __version__,
                "python": platform.python_version(),
                **{name: version(name) for name in _MEASURED_PACKAGES},
            },
        }
    )


def _print_table(result: BenchResult, cpu_level: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from headrace.engine.machine import describe

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("test")
    for heading in ("tok/s", "lowest", "highest"):
        table.add_column(heading, justify="right")
    depth = f" at depth {result.depth_tokens}" if result.depth_tokens else ""
    for name, median, runs in (
        (f"prefill {result.prompt_tokens}{depth}", result.prefill_tok_s, result.prefill_tok_s_runs),
        (f"decode {result.gen_tokens}{depth}", result.decode_tok_s, result.decode_tok_s_runs),
    ):
        if median is not None:
            table.add_row(name, f"{median:.1f}", f"{min(runs):.1f}", f"{max(runs):.1f}")
    console = Console(highlight=False)
    threads = "1 thread" if result.threads == 1 else f"{result.threads} threads"
    console.print(f"{result.model}, {threads}, {cpu_level}, {describe().cpu}", markup=False)
    console.print(table)
    if result.bytes_per_token is not None and result.gb_s is not None and result.bandwidth_fraction is not None:
        classes = ", ".join(f"{name.replace('_', ' ')} {format_bytes(count)}" for name, count in result.bytes_per_token.items())
        console.print(f"bytes per token: {classes}")
        console.print(
            f"decode reads {result.gb_s:.3g} GB/s of {result.read_bandwidth_gb_s:.3g} GB/s measured: "
            f"{100 * result.bandwidth_fraction:.0f} %"
        )
    resident = "" if result.rss_mb is None else f", {result.rss_mb:.0f} MB resident"
    first = "" if result.first_token_s is None else f", first token after {format_seconds(result.first_token_s)}"
    console.print(f"loaded in {format_seconds(result.load_s)}{first}{resident}")
