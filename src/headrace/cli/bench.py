"""`headrace bench`: how fast a model prefills and decodes here, and how near that is to the memory's limit."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from headrace import __version__
from headrace.cli import options as o
from headrace.cli.errors import guarded
from headrace.cli.loading import loaded_model
from headrace.engine.bench import BenchResult, check_counts, run_bench
from headrace.engine.kv_bench import DEFAULT_TOKENS, KvBenchResult, check_tokens, run_kv_bench
from headrace.errors import OptionError
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
    kv_memory: o.KvMemory = None,
    kv_disk: o.KvDisk = None,
    kv_formats: o.KvFormats = None,
    kv_dir: o.KvDir = None,
    kv: Annotated[
        bool,
        typer.Option("--kv", help="Measure instead what compressed pages cost: perplexity and bytes by page format."),
    ] = False,
    kv_text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text that --kv reads.", show_default="the help topics of Python"),
    ] = None,
    kv_tokens: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens of it that --kv reads.")] = DEFAULT_TOKENS,
    as_json: o.AsJson = False,
) -> None:
    """Measure prefill and decode speed, as llama-bench does, or with --kv what compressed pages cost."""
    check_counts(prompt, gen, depth, repeat)
    check_tokens(kv_tokens)
    loading = o.LoadOptions.checked(
        model,
        threads,
        kv_tokens if kv else depth + max(prompt, gen),
        no_cache=no_cache,
        kv_memory=kv_memory,
        kv_disk=kv_disk,
        kv_formats=kv_formats,
        kv_dir=kv_dir,
    )
    if kv:
        _measure_kv(loading, kv_text, kv_tokens, as_json=as_json)
        return
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
    _clear_line()
    if as_json:
        _print_document(result, cpu_level)
    else:
        _print_table(result, cpu_level)


def _measure_kv(loading: o.LoadOptions, file: Path | None, num_tokens: int, *, as_json: bool) -> None:
    text = None if file is None else read_text(file, "--kv-text")
    with loaded_model(loading) as loaded:
        result = run_kv_bench(loaded, text, num_tokens=num_tokens, on_format=_show_format if sys.stderr.isatty() else None)
    _clear_line()
    if as_json:
        from headrace.cli.output import write_json

        write_json({**asdict(result), "text": "help topics of Python" if file is None else str(file)})
    else:
        _print_formats(result, "the help topics of Python" if file is None else str(file))


def read_text(file: Path, option: str) -> str:
    """The text of a file.

    Raises:
        OptionError: it is not there, cannot be read or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{option}={str(file)!r} cannot be read ({error.strerror or error}): name another file") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{option}={str(file)!r} is not UTF-8 text at byte {error.start}: convert it first") from None


def _show_run(kind: str, run: int) -> None:
    """One line that overwrites itself: a bar that redraws while a run is timed would slow it down."""
    sys.stderr.write(f"\r\x1b[K{kind}: {f'run {run}' if run else 'warming up'}")
    sys.stderr.flush()


def _show_format(name: str) -> None:
    sys.stderr.write(f"\r\x1b[Kperplexity with {name} pages")
    sys.stderr.flush()


def _clear_line() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")


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


def _print_formats(result: KvBenchResult, source: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("pages")
    for heading in ("perplexity", "change", "bytes per token", "tokens in the same bytes"):
        table.add_column(heading, justify="right")
    for row in result.formats:
        table.add_row(
            row.page_format,
            f"{row.perplexity:.4f}",
            f"{100 * row.change:+.2f} %",
            f"{row.bytes_per_token:,.0f}",
            f"{row.fit_ratio:.2f} x",
        )
    console = Console(highlight=False)
    console.print(f"{result.model}, {result.num_tokens:,} tokens of {source}", markup=False, soft_wrap=True)
    console.print(table)
