"""A text lint for mistakes that only this project can make: `python tools/check_house_rules.py [ROOT]`.

| rule | holds in |
|---|---|
| a file has fewer than 500 lines, a function fewer than 70 | src, tests, tools, bench |
| no print, and nothing written to the standard streams | src, outside cli |
| no wall clock, no unseeded randomness | src |
| environment variables are read in config.py only | src |
| no absolute path of somebody's machine | everything that is text |
| no option of the command line in a text | src, outside cli |
| no module called utils, helpers or misc | src |
| relative links lead to a file, and to a heading in it | Markdown |

An exception is a line in `EXCEPTIONS`, with its reason. Exit code 1 when a rule is broken, one line for each place.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE_LINES_MAX = 499
FUNCTION_LINES_MAX = 69
CODE_FOLDERS = ("src", "tests", "tools", "bench")
TEXT_FOLDERS = (*CODE_FOLDERS, "docs", ".ci")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".json", ".sh", ".txt", ".cfg", ".yaml", ".yml", ""}

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("src/headrace/kernels/library.py", "environment"): "hands the environment on to the process that compiles",
    ("src/headrace/cli/batch.py", "wall-clock"): "OpenAI's answers tell when they were made",
    ("src/headrace/cli/doctor.py", "wall-clock"): "how old an abandoned file is, by the clock of its file system",
    ("src/headrace/engine/model.py", "wall-clock"): "the default of the clock that everything below it is given",
    ("src/headrace/engine/model.py", "randomness"): "the default of where seeds come from that nobody asked for",
    ("src/headrace/kernels/build.py", "option"): "a program of its own: its option is its own",
    ("src/headrace/kernels/library.py", "option"): "starts that program",
    ("src/headrace/weights/gguf.py", "option"): "names the option of another project's program",
    ("src/headrace/kernels/build.py", "output"): "a program of its own: it tells its parent what is done",
}
"""(path, rule) -> reason."""

WALL_CLOCK = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.strftime"}
WALL_CLOCK |= {f"{name}.{call}" for name in ("datetime", "datetime.datetime") for call in ("now", "utcnow", "today")}
WALL_CLOCK |= {"date.today", "datetime.date.today"}
UNSEEDED = {"os.urandom", "uuid.uuid4", "uuid.uuid1", "random.SystemRandom"}
UNSEEDED |= {f"secrets.{call}" for call in ("randbits", "randbelow", "choice", "token_bytes", "token_hex", "token_urlsafe")}
SEEDED_WHEN_CALLED_WITH_ARGUMENTS = {"random.Random"}
SEEDED_WHEN_CALLED_WITH_ARGUMENTS |= {f"{m}.random.{name}" for m in ("np", "numpy") for name in ("default_rng", "Philox")}
SEEDED_TYPES = ("np.random.Generator", "np.random.PCG64", "np.random.SeedSequence", "np.random.BitGenerator")
# Spelled in two parts, so that this file does not break the rule that it checks.
MACHINE_PATH = re.compile(r"(?<![\w.~}>])/" + r"(?:work|root|tmp|home/\w+|Users/\w+)(?:/|\b(?!\.))(?!-)")


OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]+")


@dataclass(frozen=True, order=True)
class Finding:
    """One place where a rule is broken."""

    path: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.what}"


def check(root: Path) -> list[Finding]:
    """Every place below `root` that breaks a rule."""
    findings = [
        finding
        for path in _files(root)
        for finding in _check_file(path.relative_to(root).as_posix(), path, root)
        if (finding.path, finding.rule) not in EXCEPTIONS
    ]
    return sorted(findings)


def _files(root: Path) -> Iterator[Path]:
    candidates = [path for folder in TEXT_FOLDERS for path in (root / folder).rglob("*")]
    for path in (*candidates, *root.glob("*.md"), *root.glob("*.toml")):
        if path.is_file() and path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts:
            yield path


def _check_file(name: str, path: Path, root: Path) -> Iterator[Finding]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return  # not text
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if match := MACHINE_PATH.search(line):
            yield Finding(name, number, "machine-path", f"{match[0]} exists on one machine only")
    if path.suffix == ".py" and name.startswith(CODE_FOLDERS):
        if len(lines) > FILE_LINES_MAX:
            yield Finding(name, len(lines), "file-length", f"{len(lines)} lines, at most {FILE_LINES_MAX}")
        yield from _check_code(name, ast.parse(text, name))
    if path.suffix == ".md":
        yield from _check_links(name, path, lines, root)


def _check_code(name: str, tree: ast.Module) -> Iterator[Finding]:
    in_source, in_cli = name.startswith("src/"), "/cli/" in name
    if in_source and Path(name).stem in ("utils", "helpers", "misc"):
        yield Finding(name, 1, "module-name", "says nothing about what is inside")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield Finding(
                    name, node.lineno, "function-length", f"{node.name} has {length} lines, at most {FUNCTION_LINES_MAX}"
                )
        if in_source and not in_cli:
            yield from _check_texts(name, node)
        if in_source and isinstance(node, ast.Attribute | ast.Name | ast.Call | ast.ImportFrom):
            yield from _check_source_node(name, node, in_cli=in_cli)


def _check_texts(name: str, node: ast.AST) -> Iterator[Finding]:
    """Strings that are no docstring: what an error says is read by users of the library too."""
    parts = [] if isinstance(node, ast.Expr) else ast.iter_child_nodes(node)
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and (match := OPTION.search(part.value)):
            yield Finding(name, part.lineno, "option", f"{match[0]} belongs to the command line: name the argument")


def _check_source_node(name: str, node: ast.expr | ast.ImportFrom, *, in_cli: bool) -> Iterator[Finding]:
    called = _dotted(node.func) if isinstance(node, ast.Call) else ""
    dotted = _dotted(node) if isinstance(node, ast.Attribute) else ""
    if not in_cli and (called == "print" or dotted in ("sys.stdout", "sys.stderr")):
        yield Finding(name, node.lineno, "output", "only the command line writes to the standard streams")
    imported = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
    for used in (dotted, *imported):
        if used in WALL_CLOCK:
            yield Finding(name, node.lineno, "wall-clock", f"{used}: take the time as an argument")
        if used in UNSEEDED or _is_global_generator(used):
            yield Finding(name, node.lineno, "randomness", f"{used}: take a seeded generator as an argument")
        if used in ("os.environ", "os.getenv", "os.environb") and not name.endswith("/config.py"):
            yield Finding(name, node.lineno, "environment", f"{used}: add a setting to config.py instead")
    if isinstance(node, ast.Call) and called in SEEDED_WHEN_CALLED_WITH_ARGUMENTS and not (node.args or node.keywords):
        yield Finding(name, node.lineno, "randomness", f"{called}() has no seed")


def _is_global_generator(dotted: str) -> bool:
    """random.choice, np.random.rand and their like draw from a generator that is shared and unseeded."""
    for module in ("np.random.", "numpy.random.", "random."):
        if dotted.startswith(module):
            known = (*SEEDED_WHEN_CALLED_WITH_ARGUMENTS, *SEEDED_TYPES, *(each.replace("np", "numpy") for each in SEEDED_TYPES))
            return dotted not in known
    return False


def _dotted(node: ast.AST) -> str:
    """'os.environ' for the attribute of that name; '' for what is no plain chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _check_links(name: str, path: Path, lines: list[str], root: Path) -> Iterator[Finding]:
    in_code = False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        if in_code:
            continue
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z]+:", target):
                continue
            file_name, _, anchor = target.partition("#")
            linked = (path.parent / file_name).resolve() if file_name else path.resolve()
            if not linked.exists() or root.resolve() not in (linked, *linked.parents):
                yield Finding(name, number, "link", f"{target} leads nowhere")
            elif anchor and linked.suffix == ".md" and anchor not in _anchors(linked):
                yield Finding(name, number, "link", f"{target}: no such heading")


def _anchors(path: Path) -> set[str]:
    """Anchors of a Markdown file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+\s+(.*?)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def main() -> int:
    """Checks the repository that this file lies in, or the one named."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    findings = check(root)
    for finding in findings:
        print(finding)
    print(f"house rules: {len(findings)} broken" if findings else "house rules: all hold")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
