"""What pages on disk belong to: a model's content, and all else that changes their bits.

Each key has a folder, `pages/<model>-<digest>`, whose `key.json` says for people and for later versions what the key was.
Knows nothing of the files beside it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from headrace.kv.folder import PAGES_FOLDER, read_json, write_json

_KEY_FILE = "key.json"
_FOLDER_NAME = re.compile(r"[a-z0-9.]+(?:-[a-z0-9.]+)*-[0-9a-f]{16}")


@dataclass(frozen=True)
class StoreKey:
    """`model` is a name, for people; `model_digest` the hash of its content; `numbers` all else that changes a page's bits."""

    model: str
    model_digest: str
    numbers: str

    @property
    def digest(self) -> str:
        """32 hex digits; the model's name is not part of it."""
        return hashlib.blake2b(f"{self.model_digest}\n{self.numbers}".encode(), digest_size=16).hexdigest()


def key_folder(folder: Path, key: StoreKey) -> Path:
    """Where the pages of a key lie in a kv folder, or will: a model that was renamed keeps its folder."""
    suffix = key.digest[:16]
    for each in key_folders(folder):
        if each.name.endswith(f"-{suffix}"):
            return each
    slug = re.sub(r"[^a-z0-9.]+", "-", key.model.lower())[:48].strip("-.") or "model"
    return folder / PAGES_FOLDER / f"{slug}-{suffix}"


def key_folders(folder: Path) -> Iterator[Path]:
    """The folders of all keys, by name."""
    try:
        with os.scandir(folder / PAGES_FOLDER) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in names:
        if _FOLDER_NAME.fullmatch(name):
            yield folder / PAGES_FOLDER / name


def write_key(folder: Path, key: StoreKey) -> None:
    """Says in a key's folder what the key is, unless it is said already.

    Raises:
        OSError: the file cannot be written.
    """
    if read_key(folder) is None:
        content = {"model": key.model, "model_digest": key.model_digest, "numbers": key.numbers}
        write_json(folder / _KEY_FILE, content)


def read_key(folder: Path) -> StoreKey | None:
    """The key of a folder; None if its file is missing, damaged or of another key."""
    content = read_json(folder / _KEY_FILE)
    if not isinstance(content, dict):
        return None
    fields = [content.get(name) for name in ("model", "model_digest", "numbers")]
    if not all(isinstance(field, str) for field in fields):
        return None
    key = StoreKey(*map(str, fields))
    return key if folder.name.endswith(f"-{key.digest[:16]}") else None


class Difference(NamedTuple):
    """What keeps pages of one key from being used under another; `text` is the end of a sentence."""

    what: Literal["model", "format"]
    text: str


def difference(theirs: StoreKey | None, ours: StoreKey) -> Difference:
    """How one key differs from another."""
    if theirs is None:
        return Difference("model", "of another model or version")
    if theirs.model_digest != ours.model_digest:
        same_name = f", with content {theirs.model_digest[:8]} instead of {ours.model_digest[:8]}"
        return Difference("model", f"of another model ({theirs.model}{same_name if theirs.model == ours.model else ''})")
    return Difference("format", f"of other numbers ({_words_that_differ(theirs.numbers, ours.numbers)})")


def _words_that_differ(theirs: str, ours: str) -> str:
    """'kernels 1a2b width 64', 'kernels 3c4d width 64' -> 'kernels 1a2b instead of 3c4d'."""
    one, other = (re.split(r"[\s,;]+", text) for text in (theirs, ours))
    if len(one) != len(other):
        return f"{theirs} instead of {ours}"
    found = []
    for index, (left, right) in enumerate(zip(one, other, strict=True)):
        if left != right:
            label = f"{one[index - 1]} " if index and one[index - 1] == other[index - 1] else ""
            found.append(f"{label}{left} instead of {right}")
    return ", ".join(found)
