"""Cards that commands share: where one is, and how it is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_geosharp import demos
from hf_geosharp.cli.errors import say
from hf_geosharp.cli.files import Target
from hf_geosharp.errors import CardError, GeosharpError, UsageError
from hf_geosharp.paths import path_of

if TYPE_CHECKING:
    from hf_geosharp.cards.push import Hub
    from hf_geosharp.sharpness.result import SharpnessResult

_ENDINGS = (".md", ".markdown")


@dataclass(frozen=True)
class Place:
    """Where a card is: a file, the Hub, or (a demo's) neither.

    ``model`` is what is scored, None where that is not known; ``name`` is what the card calls the model.
    """

    name: str
    model: str | None
    file: Path | None = None
    hub: Hub | None = None
    demo: Path | None = None

    def read(self) -> bytes | None:
        """The card as it is; None where there is none yet."""
        from hf_geosharp.cards import files

        if self.hub is not None:
            return self.hub.read().content
        if self.demo is not None:
            return self.demo.read_bytes()
        assert self.file is not None
        return files.read(self.file)

    def check_writing(self, inputs: Iterable[str | Path | None] = ()) -> None:
        """Fail now rather than after a score has been computed.

        Raises:
            GeosharpError: the card is a file that cannot be written.
            UsageError: it is one of the ``inputs``, or a file of another kind.
        """
        if self.file is not None:
            Target("card", self.file).check(inputs)
            if self.file.is_file() and self.file.suffix.lower() not in _ENDINGS:
                raise UsageError(f"{self.file} is no model card: that is a README.md, or another file that ends in .md")

    def check_score(self, identity: Mapping[str, Any], *, force: bool) -> None:
        """Warns of a score of a model that is called otherwise than the card's.

        Raises:
            UsageError: it is certainly of another model, unless ``force``.
        """
        scored = self._named_otherwise(identity)
        if scored is None:
            return
        text = f"the score is of {scored}, but the card is of {self.name}"
        if self._is_other(identity) and not force:
            raise UsageError(f"{text}. Use a score of {self.name}, or pass --force")
        say(f"warning: {text}")

    def _named_otherwise(self, identity: Mapping[str, Any]) -> str | None:
        """The name of what was scored, where this model is called otherwise; of two of the Hub with their owners."""
        from hf_geosharp.cards.entry import on_hub, public_name

        scored = public_name(identity)
        if self.hub is not None and on_hub(identity):
            return scored if scored.lower() != self.name.lower() else None
        folder = os.path.expanduser(str(identity.get("id") or ""))
        if self.file is not None and _is_folder(identity) and os.path.isdir(folder):
            # Folders may be called alike and be others, or be the same under two names.
            return None if os.path.samefile(folder, self.file.parent) else folder
        last = _last(scored)
        return last if last and last.lower() != _last(self.name).lower() else None

    def _is_other(self, identity: Mapping[str, Any]) -> bool:
        """Whether what was scored is another model: both are of the Hub, demos, or folders, and have other names.

        An owner may have a copy of another's, and a folder may be called otherwise than the model that it became.
        """
        from hf_geosharp.cards.entry import on_hub, public_name

        alike = (
            (self.hub is not None and on_hub(identity))
            or (self.demo is not None and _is_demo(identity))
            or (self.file is not None and _holds_model(self.file.parent) and _is_folder(identity))
        )
        return alike and _last(public_name(identity)).lower() != _last(self.name).lower()


def _is_demo(identity: Mapping[str, Any]) -> bool:
    return str(identity.get("id", "")).startswith(demos.PREFIX)


def _is_folder(identity: Mapping[str, Any]) -> bool:
    """Whether a model was scored in a folder, here or elsewhere; a name with one slash may also be of the Hub.

    One that was scored in memory has no revision, and the name of the folder that its training began with.
    """
    from hf_geosharp.cards.entry import on_hub
    from hf_geosharp.tasks.hub import looks_like_path

    name = str(identity.get("id") or "")
    stored = "revision" in identity and not on_hub(identity) and not _is_demo(identity)
    return stored and (looks_like_path(name) or os.path.isdir(name))


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _last(name: str) -> str:
    return name.rpartition("/")[2].removeprefix(demos.PREFIX)


def find_local(target: str) -> Place | None:
    """The card in a folder, or the file; None if the name stands for neither.

    Raises:
        GeosharpError: The name can only be a path, and there is no folder to hold it.
    """
    from hf_geosharp.tasks.hub import looks_like_path

    path = path_of(target)
    if path.is_dir():
        return Place(name=path.resolve().name, model=target, file=path / "README.md")
    if path.is_file() or path.suffix.lower() == ".md":
        folder = path.parent
        if not folder.is_dir():
            raise GeosharpError(f"there is no folder {folder}; create it first")
        model = str(folder) if _holds_model(folder) else None
        return Place(name=folder.resolve().name, model=model, file=path)
    if looks_like_path(target):
        raise GeosharpError(f"there is no file or folder {target}")
    return None


def write_card(path: Path, before: bytes | None, after: bytes, quiet: bool) -> None:
    """Writes a card to disk and says so."""
    from hf_geosharp.cards import files

    if after == before:
        text = f"{path} needs no change."
    else:
        files.write(path, after, before)
        text = f"Wrote {path}."
    if not quiet:
        say(text)


def merged(before: bytes | None, result: SharpnessResult, name: str, picture: str | None = None) -> bytes:
    """A card with a score in it, begun from the template where there is none."""
    from hf_geosharp.cards import card

    try:
        return card.merge(card.new(name) if before is None else before, result, name, picture)
    except CardError as error:
        if error.block:
            click.echo(error.block)
        raise


class CardTarget:
    """The value of ``score --card``: nothing, or a card on disk."""

    def __init__(self, target: str | None):
        self._place = None if target is None else find_local(target)
        if target is not None and self._place is None:
            raise GeosharpError(
                f"--card: there is no file or folder {target}; 'hf-geosharp card' is for cards of the Hub"
            )

    @property
    def file(self) -> Path | None:
        """What is written."""
        return None if self._place is None else self._place.file

    def check(self, inputs: Iterable[str | Path | None] = ()) -> None:
        """Fail now rather than after the score has been computed.

        Raises:
            CardError: the card cannot be changed safely.
            GeosharpError: it cannot be read or written, or is one of the ``inputs``.
        """
        if self._place is None:
            return
        from hf_geosharp.cards import card

        before = self._place.read()
        if before is not None:
            card.check(before)
        self._place.check_writing(inputs)

    def write(self, result: SharpnessResult, quiet: bool) -> None:
        """Put ``result`` into the card, if that is wanted; of a model that is called otherwise with a warning.

        Raises:
            CardError: the card cannot be changed safely.
            GeosharpError: it cannot be written.
        """
        if self._place is not None and self._place.file is not None:
            self._place.check_score(result.model, force=True)
            before = self._place.read()
            write_card(self._place.file, before, merged(before, result, self._place.name), quiet)
