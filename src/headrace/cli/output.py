"""What goes to standard output: the one JSON document of a verb."""

from __future__ import annotations

import json
import sys


def write_json(document: object) -> None:
    """One document and a newline. Not finite numbers are a mistake of ours, so they raise."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False, default=str) + "\n")
