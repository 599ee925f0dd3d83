"""Fetching a GGUF file from Hugging Face: hf:owner/repo/file.gguf, through the optional package `huggingface_hub`.

The file stays in that package's own cache (HF_HOME), so that it is shared with other tools, and so do its progress bar,
its access tokens and its offline mode. Does not know aliases.
"""

from __future__ import annotations

from pathlib import Path

from headrace.errors import DownloadError, ModelNotFoundError

_FORM = "hf:owner/repo/file.gguf"


def fetch(name: str) -> Path:
    """The local file of a hub name, fetched unless it is there already.

    Args:
        name: hf:owner/repo/file.gguf, where the file may lie in folders of the repository.

    Raises:
        ModelNotFoundError: the name has another form, or the hub knows no such repository or file.
        DownloadError: `huggingface_hub` is not installed, access is refused, or the hub cannot be reached.
    """
    owner, _, rest = name.removeprefix("hf:").partition("/")
    repository, _, file_name = rest.partition("/")
    if not (owner and repository and file_name.endswith(".gguf")):
        raise ModelNotFoundError(
            f"{name!r} is not of the form {_FORM}: name the owner, the repository and one .gguf file in it"
        )
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise DownloadError(
            f"{name!r} needs the package huggingface_hub: pip install 'headrace[hub]', or name a path to a .gguf file"
        ) from error
    page = f"https://huggingface.co/{owner}/{repository}"
    try:
        return Path(huggingface_hub.hf_hub_download(repo_id=f"{owner}/{repository}", filename=file_name))
    except errors.GatedRepoError as error:
        raise DownloadError(f"{name!r} is gated: accept its terms at {page} and log in with 'hf auth login'") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFoundError(
            f"{name!r} is in no repository that you may read: check {page}, or log in with 'hf auth login'"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise DownloadError(f"{name!r} is not in the local cache and the hub cannot be reached: check the network") from error
    except errors.EntryNotFoundError as error:
        raise ModelNotFoundError(f"{name!r} names no file of that repository: see {page}/tree/main for those it has") from error
    except Exception as error:  # the HTTP client below differs between versions, and so do its errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DownloadError(
            f"{name!r} cannot be fetched from the hub ({reason}): try again, or name a path to a .gguf file"
        ) from error
