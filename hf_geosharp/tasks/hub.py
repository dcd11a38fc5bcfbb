"""Where a model's files come from, a folder or the Hub, and what a failure of the Hub means."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_geosharp.errors import HubError, ModelError, UsageError, chain, first_line
from hf_geosharp.paths import path_of

# The client library differs between releases of huggingface_hub.
_NETWORK_MODULES = ("httpx", "httpcore", "requests", "urllib3")


@dataclass(frozen=True)
class Source:
    """A model's place: a folder, or a repository of the Hub at a revision (``folder`` is None).

    ``token`` may be None: then what the user logged in with is used.
    """

    id: str
    folder: Path | None = None
    revision: str | None = None
    token: str | None = None

    @property
    def place(self) -> str:
        """What ``from_pretrained`` takes."""
        return str(self.folder) if self.folder is not None else self.id

    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``from_pretrained`` that say where from; a folder never asks the network."""
        if self.folder is not None:
            return {"local_files_only": True}
        return {"revision": self.revision, "token": self.token}

    def at(self, commit: str) -> Source:
        """The same repository pinned to a commit, so that all files come from one state of it."""
        return self if self.folder is not None else replace(self, revision=commit)


def find_source(model_id: str | os.PathLike[str], revision: str | None = None, token: str | None = None) -> Source:
    """The folder of that name if there is one, else the Hub repository.

    Raises:
        ModelError: It is written as a path, and no folder is there.
        UsageError: A revision of a folder is asked for.
    """
    name = os.fspath(model_id)
    path = path_of(name)
    if path.is_dir():
        if revision is not None:
            raise UsageError(
                f"{name} is a folder here, which has no revision {revision!r}: leave out revision (--revision)."
            )
        return Source(name, folder=path)
    if path.is_file():
        raise ModelError(f"{name} is a file. Pass the folder that holds the model's config.json and weights.")
    if looks_like_path(name):
        raise ModelError(f"There is no folder {name}. Pass a model's folder or the id of a model on the Hub.")
    return Source(name, revision=revision, token=token)


def looks_like_path(name: str) -> bool:
    """Whether a name can only be meant as a path: ids of the Hub are ``name`` or ``owner/name``."""
    return name.startswith((".", "/", "~", os.sep)) or name.count("/") > 1 or "\\" in name or name.endswith("/")


def fetch(source: Source, filename: str) -> Path | None:
    """A file of the model, downloaded if need be; None if the model has no such file.

    Raises:
        HubError: The repository cannot be reached.
    """
    if source.folder is not None:
        path = source.folder / filename
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(source.id, filename, revision=source.revision, token=source.token))
    except LocalEntryNotFoundError as error:
        # A kind of EntryNotFoundError, but it says that the network failed, not that the file is not there.
        raise hub_error(error, f"model {source.id!r}") from error
    except EntryNotFoundError:
        return None
    except Exception as error:
        raise hub_error(error, f"model {source.id!r}") from error


def fetch_optional(source: Source, filename: str) -> Path | None:
    """Like `fetch`, but a file that is out of reach counts as absent (offline, with the model in the cache)."""
    try:
        return fetch(source, filename)
    except HubError:
        return None


def is_hub_failure(error: BaseException) -> bool:
    """Whether an exception, or what caused it, came from the Hub or the network."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    kinds = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, ConnectionError, TimeoutError, socket.gaierror)
    return any(
        (isinstance(link, kinds) and not _is_absent_file(link))
        or type(link).__module__.split(".")[0].rstrip("0123456789") in _NETWORK_MODULES
        for link in chain(error)
    )


def hub_error(error: BaseException, what: str) -> HubError:
    """The error to raise for a failure of the Hub, with what to do about it.

    Args:
        error: What was caught.
        what: What was asked for, as ``"model 'owner/name'"``.
    """
    from huggingface_hub import errors

    advice: tuple[tuple[type[BaseException], str], ...] = (
        (
            errors.GatedRepoError,
            "access is gated: accept its conditions on its page, then log in (`hf auth login`) or pass a token",
        ),
        (
            errors.RepositoryNotFoundError,
            "it does not exist, or it is private: check the id; if private, log in (`hf auth login`) or pass a token",
        ),
        (errors.RevisionNotFoundError, "it has no such revision: check the branch, tag or commit"),
        (errors.HFValidationError, "that is neither a folder here nor an id the Hub allows (name or owner/name)"),
    )
    for link in chain(error):
        for kind, text in advice:
            if isinstance(link, kind):
                return HubError(f"Cannot get {what} from the Hub: {text}.")
    return HubError(
        f"Cannot get {what} from the Hub: it is not in the local cache and the Hub cannot be reached. "
        "Check the network and HF_HUB_OFFLINE, or pass a local folder or file instead. "
        f"({type(error).__name__}: {first_line(error)})"
    )


def _is_absent_file(error: BaseException) -> bool:
    """Whether the Hub answered that a repository has no such file, which is no failure of the Hub."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    return isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
