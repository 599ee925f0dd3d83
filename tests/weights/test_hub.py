"""Names on Hugging Face, with the hub's client replaced: it is an extra, and tests stay off the network."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.errors import DownloadError, HeadraceError, ModelNotFoundError
from headrace.weights import hub

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "hf:owner/repo/folder/m.gguf"


class Errors(types.ModuleType):
    """The part of `huggingface_hub.errors` that is caught, with its inheritance."""

    class RepositoryNotFoundError(Exception): ...

    class GatedRepoError(RepositoryNotFoundError): ...

    class RevisionNotFoundError(Exception): ...

    class HFValidationError(ValueError): ...

    class EntryNotFoundError(Exception): ...

    class LocalEntryNotFoundError(EntryNotFoundError): ...


@pytest.fixture
def hub_answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes `hf_hub_download` return a path or raise."""

    def install(answer: Any) -> None:
        def download(*, repo_id: str, filename: str) -> str:
            assert (repo_id, filename) == ("owner/repo", "folder/m.gguf")
            if isinstance(answer, BaseException):
                raise answer
            return str(answer)

        package = types.ModuleType("huggingface_hub")
        package.hf_hub_download = download  # type: ignore[attr-defined]
        package.errors = Errors("huggingface_hub.errors")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "huggingface_hub", package)
        monkeypatch.setitem(sys.modules, "huggingface_hub.errors", package.errors)  # type: ignore[attr-defined]

    return install


def test_fetch_returns_the_hubs_file(hub_answers: Callable[[Any], None], tmp_path: Path) -> None:
    hub_answers(tmp_path / "m.gguf")
    assert hub.fetch(NAME) == tmp_path / "m.gguf"


@pytest.mark.parametrize("name", ["hf:", "hf:owner", "hf:owner/repo", "hf:owner/repo/", "hf:owner/repo/m.bin", "hf:/r/m.gguf"])
def test_fetch_rejects_other_forms(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"is not of the form hf:owner/repo/file\.gguf"):
        hub.fetch(name)


def test_fetch_names_the_extra_when_the_client_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # makes the import fail
    with pytest.raises(DownloadError, match=r"pip install 'headrace\[hub\]'"):
        hub.fetch(NAME)


@pytest.mark.parametrize(
    ("raised", "kind", "problem"),
    [
        (Errors.GatedRepoError(), DownloadError, "is gated: accept its terms at https://huggingface.co/owner/repo"),
        (Errors.RepositoryNotFoundError(), ModelNotFoundError, "is in no repository that you may read"),
        (Errors.RevisionNotFoundError(), ModelNotFoundError, "is in no repository that you may read"),
        (Errors.HFValidationError(), ModelNotFoundError, "is in no repository that you may read"),
        (Errors.EntryNotFoundError(), ModelNotFoundError, "names no file of that repository"),
        (Errors.LocalEntryNotFoundError(), DownloadError, "is not in the local cache and the hub cannot be reached"),
        (ConnectionError("refused\nat length"), DownloadError, "cannot be fetched from the hub (refused)"),
        (TimeoutError(), DownloadError, "cannot be fetched from the hub (TimeoutError)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_fetch_translates_the_hubs_errors(
    hub_answers: Callable[[Any], None], raised: Exception, kind: type[HeadraceError], problem: str
) -> None:
    hub_answers(raised)
    with pytest.raises(kind) as caught:
        hub.fetch(NAME)
    assert problem in str(caught.value)
    assert NAME in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fetch_lets_ctrl_c_through(hub_answers: Callable[[Any], None]) -> None:
    hub_answers(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(NAME)
