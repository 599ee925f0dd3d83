"""The command line: one module per verb.

| module | knows |
|---|---|
| `app` | the list of verbs, and how a command line finds its own |
| `run` `chat` `bench` `pull` `models` `doctor` | one verb each: its options, what it does, what it prints |
| `batch` | the verb that answers a file of requests; `batch_files` its files, `batch_window` what is on its way |
| `kv` | the verbs that look at the past on disk and tidy it; `kv_show` what they print, `kv_simulate` the replay of traces |
| `session` | how a conversation with a name is opened |
| `options` | options that verbs share, and what they become |
| `errors` | how an error becomes one sentence and an exit code |
| `progress` | bars on standard error |
| `report` | speeds out of a result: the closing line, the JSON document, the table of operations |
| `stored` | what lies in the cache folder, and which of it is not used any more |
| `loading` | the one place that loads a model, so that tests can put another in its stead |
| `protocols` | what the verbs need of a model |

Invariant: standard output holds the answer, one JSON document or one JSON object a line, and nothing else; all the rest goes
to standard error.
Nothing is imported before it is needed: a verb imports the engine when it runs.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line of this process and exits.

    0 done, 2 for bad input, 3 for a batch with errors in it, 130 for Ctrl-C, 141 for a closed pipe.
    """
    try:
        from headrace.cli.app import build_app, verbs_needed

        build_app(verbs_needed(sys.argv[1:]))(prog_name="headrace")
    except KeyboardInterrupt:
        sys.stderr.write("headrace: interrupted\n")
        sys.exit(130)
