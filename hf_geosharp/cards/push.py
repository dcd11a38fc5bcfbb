"""Cards on the Hub: read at one commit, changed, and committed onto that commit or as a pull request."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hf_geosharp.errors import GeosharpError, HubError, UsageError, chain

FILE = "README.md"
LIBRARY = "hf-geosharp"
TITLE = "Add geodesic sharpness to the model card"
REMOVE_TITLE = "Remove geodesic sharpness from the model card"
TIMEOUT = 10.0
"""Seconds that the Hub may be silent before a request is given up; the one before the commit its client makes up to six
times."""

Edit = Callable[[bytes | None], bytes]
"""From a card, or None where there is none, to what it shall be."""

# Roles in an organisation that cannot write to repositories of others.
_READERS = {"read", "contributor"}

# Of torchrun and accelerate, Open MPI, and the other MPIs.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

_OFFLINE = {"OfflineModeIsEnabled"}
_TIMEOUTS = {"TimeoutException", "Timeout", "TimeoutError"}
_UNREACHABLE = {"ConnectError", "NetworkError", "RemoteProtocolError", "ConnectionError", "gaierror"}


@dataclass(frozen=True)
class RemoteCard:
    """A card as it is on the Hub at one commit; ``content`` is None where the repository has none."""

    commit: str
    content: bytes | None


@dataclass(frozen=True)
class Pushed:
    """What a push did.

    ``how`` is "unchanged", "commit", "pull request", "updated pull request" or "not rank 0"; ``url`` says where it is.
    """

    how: str
    url: str | None = None


class Hub:
    """The card of one model on the Hub.

    Args:
        repo: The id of the model.
        revision: The branch; None is main.
        token: The Hub token; None takes what the user is logged in with.
        timeout: Seconds that the Hub may be silent.
    """

    def __init__(
        self, repo: str, *, revision: str | None = None, token: str | None = None, timeout: float = TIMEOUT
    ) -> None:
        from huggingface_hub import HfApi

        self.repo = repo
        self.revision = revision
        self._token = token
        self._timeout = timeout
        # The token goes with each call as well, for not every call takes it from here.
        self._api = HfApi(token=token, library_name=LIBRARY)

    def read(self) -> RemoteCard:
        """The card at the head of the branch.

        Raises:
            HubError: The Hub does not give it, and why.
        """
        with self._explained("read"), _timeout(self._timeout):
            return self._read(self.revision)

    def push(self, edit: Edit, *, create_pr: bool | None = None, title: str = TITLE) -> Pushed:
        """Commits the edited card, nothing else, onto the commit it was read at; does nothing if it is the same.

        Args:
            edit: The change. It may be asked twice, if there is a pull request already.
            create_pr: Whether to open a pull request; None does where the user may not write. An open one of the same
                user and title is brought up to date instead.
            title: The message of the commit and the title of the pull request.

        Raises:
            HubError: The Hub refuses or is out of reach, and why.
            UsageError: The revision is a commit.
            CardError: The card cannot be changed safely.
        """
        if not is_first_rank():
            return Pushed("not rank 0")
        self._refuse_commit()
        with self._explained("push"), _timeout(self._timeout):
            return self._push(edit, create_pr, title)

    def check_push(self) -> None:
        """Fail now rather than after a score has been computed.

        Raises:
            HubError: There is no token, the Hub does not accept it, or is out of reach.
            UsageError: The revision is a commit.
        """
        if not is_first_rank():
            return
        self._refuse_commit()
        with self._explained("push"), _timeout(self._timeout):
            self._api.whoami(token=self._token)

    def _refuse_commit(self) -> None:
        if self.revision is not None and re.fullmatch("[0-9a-f]{40}", self.revision):
            raise UsageError(f"nothing can be pushed to a commit ({self.revision}): give a branch, or leave it out")

    def _push(self, edit: Edit, create_pr: bool | None, title: str) -> Pushed:
        card = self._read(self.revision)
        content = edit(card.content)
        if content == card.content:
            return Pushed("unchanged", self._url())
        user = self._api.whoami(token=self._token)
        if create_pr is None:
            create_pr = not may_write(user, self.repo)
            if not create_pr:
                try:
                    return self._commit(content, card.commit, title)
                except Exception as error:
                    if _status(error) != 403:
                        raise
        elif not create_pr:
            return self._commit(content, card.commit, title)
        return self._update_request(edit, user, title) or self._open_request(content, card.commit, title)

    def _read(self, revision: str | None) -> RemoteCard:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        info = self._api.model_info(self.repo, revision=revision, timeout=self._timeout, token=self._token)
        commit = str(info.sha)
        url = hf_hub_url(self.repo, FILE, revision=commit, endpoint=self._api.endpoint)
        # Not hf_hub_download, which tries for minutes where the Hub does not answer, and fills the cache.
        answer = get_session().get(url, headers=build_hf_headers(token=self._token, library_name=LIBRARY))
        try:
            hf_raise_for_status(answer)
        except EntryNotFoundError:
            return RemoteCard(commit, None)
        return RemoteCard(commit, answer.content)

    def _commit(self, content: bytes, parent: str, title: str) -> Pushed:
        done = self._create_commit(content, parent, title, revision=self.revision)
        return Pushed("commit", done.commit_url)

    def _open_request(self, content: bytes, parent: str, title: str) -> Pushed:
        done = self._create_commit(content, parent, title, revision=self.revision, create_pr=True)
        return Pushed("pull request", done.pr_url)

    def _update_request(self, edit: Edit, user: Mapping[str, Any], title: str) -> Pushed | None:
        """Brings the user's own open pull request up to date; None if there is none."""
        found = self._api.get_repo_discussions(
            self.repo,
            author=str(user["name"]),
            discussion_type="pull_request",
            discussion_status="open",
            token=self._token,
        )
        request = next((r for r in found if r.is_pull_request and r.status == "open" and r.title == title), None)
        if request is None:
            return None
        branch, url = f"refs/pr/{request.num}", f"{self._url()}/discussions/{request.num}"
        card = self._read(branch)
        content = edit(card.content)
        if content == card.content:
            return Pushed("unchanged", url)
        self._create_commit(content, card.commit, title, revision=branch)
        return Pushed("updated pull request", url)

    def _create_commit(self, content: bytes, parent: str, title: str, **where: Any) -> Any:
        from huggingface_hub import CommitOperationAdd

        return self._api.create_commit(
            self.repo,
            [CommitOperationAdd(FILE, content)],
            commit_message=title,
            parent_commit=parent,
            token=self._token,
            **where,
        )

    def _url(self) -> str:
        return f"{self._api.endpoint}/{self.repo}"

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except GeosharpError:
            raise
        except Exception as error:
            raise HubError(f"cannot {doing} the card of {self.repo}: {_why(error)}") from error


def may_write(user: Mapping[str, Any], repo: str) -> bool:
    """Whether a user, as ``whoami`` describes them, can be expected to have write access to a repository."""
    owner, slash, _ = repo.partition("/")
    if not slash:
        return False
    if owner == user.get("name"):
        return True
    roles = {org.get("name"): org.get("roleInOrg") for org in user.get("orgs") or ()}
    return owner in roles and roles[owner] not in _READERS


def is_first_rank() -> bool:
    """Whether this process writes: of several (torchrun, accelerate) only the one of rank 0 does."""
    return all(os.environ.get(name, "").strip() in ("", "0") for name in _RANKS)


def _why(error: Exception) -> str:
    """What a failure means and what to do about it."""
    from huggingface_hub import errors

    kinds: tuple[tuple[type[BaseException], str], ...] = (
        (
            errors.LocalTokenNotFoundError,
            "pushing needs a token: log in with `hf auth login`, or set HF_TOKEN to one with write access",
        ),
        (
            errors.GatedRepoError,
            "access is gated: accept its conditions on its page, then log in (`hf auth login`) or set HF_TOKEN",
        ),
        (
            errors.RepositoryNotFoundError,
            "there is no such model, or it is private: check the id; if private, log in (`hf auth login`) or set "
            "HF_TOKEN",
        ),
        (errors.RevisionNotFoundError, "it has no such branch: check revision (--revision)"),
        (errors.DisabledRepoError, "the Hub has disabled it"),
        (errors.HFValidationError, "that is not the id of a model on the Hub (owner/name), nor a folder or file here"),
    )
    if str(error).startswith("Invalid metadata"):
        return f"the Hub refuses the metadata as not valid; nothing was written. {_words(error)}"
    links = list(chain(error))
    for link in links:
        names = {kind.__name__ for kind in type(link).__mro__}
        if names & _OFFLINE:
            return "HF_HUB_OFFLINE is set: unset it to reach the Hub"
        for kind, text in kinds:
            if isinstance(link, kind):
                return text
        if _status(link) is not None:
            return _answer(link)
    for link in links:
        names = {kind.__name__ for kind in type(link).__mro__}
        if names & _TIMEOUTS:
            return (
                "the Hub did not answer in time. Look at the model's page before you try again: it may have been done"
            )
        if names & _UNREACHABLE:
            return "the Hub cannot be reached: check the network, HF_ENDPOINT and proxies"
    if any(type(link).__name__ == "JSONDecodeError" for link in links):
        return "the Hub answers with something that is no JSON: try again later, and check HF_ENDPOINT and proxies"
    return _words(error)


def _answer(error: BaseException) -> str:
    """What a status of the Hub means."""
    status = _status(error)
    says = f" The Hub says: {_server_message(error)}" if _server_message(error) else ""
    if status == 401:
        return f"the Hub does not accept the token: log in again (`hf auth login`), or check HF_TOKEN.{says}"
    if status == 403:
        return (
            "the token may neither write there nor open a pull request: use one with write access (or, if "
            f"fine-grained, with the right to open discussions).{says}"
        )
    if status == 404:
        return f"the Hub does not find it: check the id and the branch.{says}"
    if status in (409, 412):
        return f"somebody else changed the repository meanwhile; nothing was written. Run it again.{says}"
    if status in (400, 413, 422):
        return f"the Hub refuses the card as not valid; nothing was written.{says or ' ' + _words(error)}"
    if status == 429:
        return f"too many requests: wait some minutes.{says}"
    return f"the Hub has a fault of its own ({status}): try again later.{says}"


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _server_message(error: BaseException) -> str:
    return " ".join(str(getattr(error, "server_message", None) or "").split())


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    """Lets no request of this block wait longer; most calls of the client set no limit themselves."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    session: Any = get_session()
    if hasattr(session, "timeout"):
        before, session.timeout = session.timeout, seconds
        try:
            yield
        finally:
            session.timeout = before
        return
    # Before 1.0 the client is a session of requests, which knows no limit of its own.
    request = session.request

    def limited(*args: Any, **options: Any) -> Any:
        return request(*args, **{**options, "timeout": options.get("timeout") or seconds})

    session.request = limited
    try:
        yield
    finally:
        del session.request
