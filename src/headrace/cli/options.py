"""Options that several verbs share: how they are written, and what they become."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from headrace.errors import OptionError

if TYPE_CHECKING:
    from headrace.engine.sampler import SamplingOptions

MODEL_HELP = "An alias ([cyan]headrace models[/] lists them), a path to a .gguf file, or hf:owner/repo/file.gguf."
DEFAULT_MODEL = "smollm2"
DEFAULT_MAX_TOKENS = 256

# The sampler's own defaults, written again so that the help can show them without importing NumPy; a test compares them.
TEMPERATURE = 0.0
TOP_K = 40
TOP_P = 0.95
MIN_P = 0.05
REPEAT_PENALTY = 1.0
PRESENCE_PENALTY = 0.0
FREQUENCY_PENALTY = 0.0
SEED = None

_MODEL, _LENGTH, _SAMPLING, _MEMORY, _OUTPUT = "Model", "Prompt and length", "Sampling", "Memory of the past", "Output"

Model = Annotated[str, typer.Option("-m", "--model", metavar="MODEL", help=MODEL_HELP, rich_help_panel=_MODEL)]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", help="Threads of the worker team.", show_default="all usable cores", rich_help_panel=_MODEL),
]
Context = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Tokens of context to make room for.",
        show_default="the model's own, within free memory",
        rich_help_panel=_MODEL,
    ),
]
NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Neither read nor write packed weights or the past on disk.", rich_help_panel=_MODEL),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Most bytes of pages in memory.", show_default="chosen by free memory", rich_help_panel=_MEMORY
    ),
]
KvDisk = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Most bytes of the kept past on disk; 0 keeps nothing there.",
        show_default="20GB",
        rich_help_panel=_MEMORY,
    ),
]
KvFormats = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Page formats, in this order: f16 (exact), q8, q4. Behind f16, pages are compressed before they leave memory; "
        "without it, at once.",
        show_default="f16",
        rich_help_panel=_MEMORY,
    ),
]
KvDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the kept past.", show_default="kv in HEADRACE_HOME", rich_help_panel=_MEMORY),
]
Session = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Go on with the conversation of this name, and keep it for the next time.",
        show_default=False,
        rich_help_panel=_MEMORY,
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Most tokens to generate.", rich_help_panel=_LENGTH)]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="End before this text; may be given several times.", show_default=False, rich_help_panel=_LENGTH
    ),
]
System = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="System message put before the prompt.", show_default=False, rich_help_panel=_LENGTH),
]
Temperature = Annotated[
    float,
    typer.Option(metavar="X", help="0 takes the likeliest token; above, draw.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int,
    typer.Option(metavar="N", help="Draw among the N likeliest; 0 for all.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Draw among the fewest tokens that together reach probability X.",
        rich_help_panel=_SAMPLING,
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Drop tokens less likely than X times the likeliest.",
        rich_help_panel=_SAMPLING,
    ),
]
RepeatPenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Divide the logits of recent tokens by X; 1 is off.",
        rich_help_panel=_SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(metavar="X", help="Subtract X from recent tokens, once.", rich_help_panel=_SAMPLING),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Subtract X from recent tokens, for each time they occur.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Seed of the draws: the same seed gives the same text.",
        show_default="drawn, and told by --stats and --json",
        rich_help_panel=_SAMPLING,
    ),
]
Stats = Annotated[bool, typer.Option("--stats", help="Show time and bytes by class of operation.", rich_help_panel=_OUTPUT)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.", rich_help_panel=_OUTPUT)]
Logprobs = Annotated[
    int,
    typer.Option(metavar="N", help="Log-probabilities of each token and its N likeliest rivals.", rich_help_panel=_OUTPUT),
]


@dataclass(frozen=True)
class LoadOptions:
    """Which model to load, and how. None stands for what the environment sets, or for the default."""

    model: str
    threads: int | None = None
    context_tokens: int | None = None
    cache: bool = True
    kv_memory_bytes: int | None = None
    kv_disk_bytes: int | None = None
    kv_formats: tuple[str, ...] | None = None
    kv_dir: Path | None = None

    def __post_init__(self) -> None:
        from headrace.config import check_threads

        if self.threads is not None:
            check_threads(self.threads, "--threads")
        if self.context_tokens is not None and self.context_tokens < 1:
            raise OptionError(f"--context={self.context_tokens} is not a number of tokens: use 1 or more")

    @classmethod
    def checked(
        cls,
        model: str,
        threads: int | None,
        context_tokens: int | None,
        *,
        no_cache: bool,
        kv_memory: str | None,
        kv_disk: str | None,
        kv_formats: str | None,
        kv_dir: Path | None,
    ) -> LoadOptions:
        """Options out of what the command line says, checked before the model is loaded.

        Raises:
            OptionError: a value cannot be used.
        """
        from headrace.config import parse_formats, parse_memory, parse_size

        return cls(
            model,
            threads,
            context_tokens,
            cache=not no_cache,
            kv_memory_bytes=None if kv_memory is None else parse_memory(kv_memory, "--kv-memory"),
            kv_disk_bytes=None if kv_disk is None else parse_size(kv_disk, "--kv-disk"),
            kv_formats=None if kv_formats is None else parse_formats(kv_formats, "--kv-formats"),
            kv_dir=None if kv_dir is None else kv_dir.expanduser(),
        )

    def check_session(self, name: str) -> None:
        """Checks that a session of this name can be kept.

        Raises:
            OptionError: the name is empty or too long, or nothing may be kept on disk.
        """
        from headrace.config import Config
        from headrace.kv.sessions import check_name

        check_name(name, "--session")
        if not self.cache:
            raise OptionError(f"--session={name!r} is kept on disk, which --no-cache forbids: leave one of them out")
        disk_bytes = Config.from_environment().kv_disk_bytes if self.kv_disk_bytes is None else self.kv_disk_bytes
        if disk_bytes == 0:
            raise OptionError(f"--session={name!r} is kept on disk, where 0 bytes are allowed: give --kv-disk a size")


@dataclass(frozen=True)
class AnswerOptions:
    """How to answer. `sampling` holds fields of SamplingParams."""

    max_tokens: int
    stop: tuple[str, ...]
    logprobs: int
    sampling: SamplingOptions

    @classmethod
    def checked(
        cls, *, max_tokens: int, stop: list[str] | None, logprobs: int = 0, **sampling: Unpack[SamplingOptions]
    ) -> AnswerOptions:
        """Options that the sampler accepts, checked before the model is loaded.

        Raises:
            OptionError: a value cannot be used.
        """
        from headrace.engine.sampler import SamplingParams

        if max_tokens < 1:
            raise OptionError(f"--max-tokens={max_tokens} is not a number of tokens: use 1 or more")
        if "" in (stop or ()):
            raise OptionError("--stop='' would end every answer at once: give it some text, or leave it out")
        SamplingParams(**sampling, logprobs=logprobs)  # it checks its values itself
        return cls(max_tokens=max_tokens, stop=tuple(stop or ()), logprobs=logprobs, sampling=sampling)
