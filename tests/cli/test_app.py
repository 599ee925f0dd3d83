from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import headrace as package
from headrace.cli.app import VERBS, verbs_needed

FAKE = """
    import sys
    from headrace.cli import loading, main
    import importlib.util
    spec = importlib.util.spec_from_file_location("fakes", {fakes!r})
    fakes = importlib.util.module_from_spec(spec)
    sys.modules["fakes"] = fakes
    spec.loader.exec_module(fakes)
    model = fakes.FakeModel(answers=[{answer}])
    loading.load_model = lambda options, progress: model
    sys.argv = ["headrace", *{arguments!r}]
    main()
"""


def _start(answer: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The command line in a process of its own, with a scripted model."""
    fakes = str(Path(__file__).with_name("conftest.py"))
    code = textwrap.dedent(FAKE).format(fakes=fakes, answer=answer, arguments=arguments)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], **(pipes | options))


def test_help_lists_every_verb_with_its_summary(headrace: Any) -> None:
    ending = headrace("--help")
    assert ending.code == 0
    for verb in VERBS:
        line = next(line for line in ending.out.splitlines() if line.strip("│ ").startswith(verb))
        assert len(line.strip("│ ").split()) > 3


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_explains_every_option(headrace: Any, verb: str) -> None:
    ending = headrace(verb, "--help")
    assert (ending.code, ending.err) == (0, "")
    assert f"Usage: headrace {verb}" in ending.out
    assert "None" not in ending.out
    assert "--json" in ending.out or verb == "batch"  # whose output is JSON in any case


def test_no_arguments_show_the_help(headrace: Any) -> None:
    ending = headrace()
    assert "Usage: headrace" in ending.out + ending.err


def test_version_is_the_package_version(headrace: Any) -> None:
    assert headrace("--version").out == f"headrace {package.__version__}\n"


def test_unknown_verb_is_a_usage_error(headrace: Any) -> None:
    ending = headrace("fly")
    assert (ending.code, ending.out) == (2, "")
    assert "fly" in ending.err


def test_verbs_needed_is_the_named_one_or_all() -> None:
    assert verbs_needed(["run", "--help"]) == ("run",)
    assert [verbs_needed(["--help"]), verbs_needed([]), verbs_needed(["fly"])] == [VERBS] * 3


def test_run_imports_only_what_it_needs_before_it_loads() -> None:
    code = (
        "import sys\n"
        "from headrace.cli import loading, main\n"
        "def load(options, progress):\n"
        "    print(sorted(name for name in sys.modules))\n"
        "    raise KeyboardInterrupt\n"
        "loading.load_model = load\n"
        "sys.argv = ['headrace', 'run', 'hi']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    imported = {name.split(".")[0] for name in eval(done.stdout)}
    assert imported.isdisjoint({"numba", "llvmlite", "tokenizers", "jinja2", "rich", "urllib3", "huggingface_hub"})


def test_ctrl_c_of_a_process_exits_130_and_says_so() -> None:
    process = _start("['Hel'] + ['lo'] * 10**7", "run", "hi")
    assert process.stdout is not None
    assert process.stdout.read(3) == "Hel"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "headrace: interrupted\n")


def test_closed_pipe_of_a_process_exits_141_and_says_nothing() -> None:
    process = _start("['Hel'] + ['lo'] * 10**7", "run", "hi")
    assert process.stdout is not None
    process.stdout.read(3)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=30), err) == (141, "")


def test_stdout_that_knows_ascii_only_does_not_stop_the_answer() -> None:
    process = _start("['caf\\u00e9']", "run", "hi", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "caf?\n")


def test_python_dash_m_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "headrace", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"headrace {package.__version__}\n"
