"""The models that a comparison is of: which ones names stand for, whether they do the same task, and on what data."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_geosharp import demos
from hf_geosharp.checkpoints import History, find_checkpoints, read_history
from hf_geosharp.comparable import Named
from hf_geosharp.errors import GeosharpError, GeosharpWarning, ModelError, UsageError
from hf_geosharp.paths import path_of
from hf_geosharp.sharpness.journal import RESULT

if TYPE_CHECKING:
    from hf_geosharp.tasks.hub import Source


@dataclass(frozen=True)
class Member:
    """A model to score; of a checkpoint with its run and its step."""

    place: str
    revision: str | None = None
    run: str = ""
    step: int | None = None

    @property
    def source(self) -> str:
        """As it was named."""
        return self.place + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class Members:
    """Models, and the runs that some of them are checkpoints of: folder -> their number and what was logged."""

    members: tuple[Member, ...]
    runs: Mapping[str, tuple[int, History]]
    notes: tuple[str, ...] = ()


def holds_results(name: str) -> bool:
    """Whether a name stands for results on disk rather than for a model."""
    path = path_of(name)
    if path.suffix.lower() == ".json":
        return True
    if not path.is_dir() or _is_model(path) or find_checkpoints(path):
        return False
    return (path / RESULT).is_file() or any(path.glob(f"*/{RESULT}"))


def find_members(places: Sequence[str], revision: str | None = None) -> Members:
    """The models that names stand for.

    Args:
        places: ids of the Hub, with or without ``@revision``; folders; shipped demos; folders with checkpoints, each of
            which stands for all of these. A folder that is a model as well is the model, unless it is the only place.
        revision: of the ids without one.

    Raises:
        UsageError: a model is there twice.
    """
    members: list[Member] = []
    runs: dict[str, tuple[int, History]] = {}
    notes: list[str] = []
    for place in places:
        checkpoints = find_checkpoints(place)
        if checkpoints and _is_model(path_of(place)) and len(places) > 1:
            notes.append(
                f"{place} is a model and holds {len(checkpoints)} checkpoints: the model is used; give the folder "
                "alone to compare its checkpoints"
            )
        elif checkpoints:
            runs[place] = len(checkpoints), read_history(place, checkpoints)
            members += [Member(str(c.folder), None, place, c.step) for c in checkpoints]
            continue
        members.append(_member(place, revision))
    twice = [name for name, count in Counter(member.source for member in members).items() if count > 1]
    if twice:
        raise UsageError(f"{twice[0]} is given twice; name each model once")
    return Members(tuple(members), runs, tuple(notes))


def _is_model(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", "adapter_config.json"))


def _member(place: str, revision: str | None) -> Member:
    name, at, own = place.partition("@")
    if at and own and not path_of(place).exists():
        return Member(name, own)
    return Member(place, None if _is_local(place) else revision)


def _is_local(place: str) -> bool:
    from hf_geosharp.tasks.hub import looks_like_path

    return place.startswith(demos.PREFIX) or looks_like_path(place) or path_of(place).exists()


def folder_names(members: Sequence[Member]) -> list[str]:
    """A folder's name for each, the same whatever other models it is compared with."""
    names = [re.sub(r"[^\w.@+-]+", "--", os.path.normpath(member.source)).strip("-.") for member in members]
    counts = Counter(names)
    digests = [hashlib.sha256(member.source.encode()).hexdigest()[:8] for member in members]
    return [name if counts[name] == 1 else f"{name}-{own}" for name, own in zip(names, digests, strict=True)]


# --------------------------------------------------------------------------------------------------------------- tasks


def check_members(
    members: Sequence[Member],
    results: Sequence[Named] = (),
    *,
    task: str = "auto",
    params: str = "all",
    token: str | None = None,
) -> dict[str, ModelError]:
    """Looks at every config, before anything is loaded.

    Args:
        members: the models.
        results: what they are compared with.
        task: that all do; "auto" reads it from the configs.
        params: "lora" wants adapters, and anything else models.
        token: of the Hub.

    Returns:
        What is wrong with checkpoints that can be no model, by their source.

    Raises:
        UsageError: they do different tasks, or a model is there where adapters are wanted.
        ModelError: a model that is no checkpoint of a run has no config that can be read, or is an adapter.
        HubError: the Hub does not give a config.
    """
    broken: dict[str, ModelError] = {}
    tasks: dict[str, list[str]] = {}
    for item in results:
        tasks.setdefault(str(item.result.model.get("task")), []).append(item.name)
    for member in members:
        try:
            found = _task(member, task, params, token)
        except ModelError as error:
            if not member.run:
                raise
            broken[member.source] = error
            continue
        if found is not None:
            tasks.setdefault(found, []).append(member.source)
    one_task(tasks)
    return broken


def one_task(tasks: Mapping[str, Sequence[str]]) -> None:
    """Refuses models (by task) that do different things.

    Raises:
        UsageError: there is more than one task.
    """
    if len(tasks) > 1:
        listed = "; ".join(f"{task}: {', '.join(names)}" for task, names in tasks.items())
        raise UsageError(
            f"models of different tasks are not comparable, because their losses differ in meaning. {listed}"
        )


def _task(member: Member, task: str, params: str, token: str | None) -> str | None:
    """The task of a model or an adapter, whichever is wanted; None where only loading tells."""
    from hf_geosharp.tasks.adapters import read_adapter, task_of_adapter
    from hf_geosharp.tasks.config import refuse_adapter
    from hf_geosharp.tasks.hub import find_source

    place = member.place
    if place.startswith(demos.PREFIX):
        place = str(demos.path(demos.base_name(place)[0]))
    source = find_source(place, member.revision, token)
    if params == "lora":
        raw, _ = read_adapter(source)
        return task_of_adapter(raw) if task == "auto" else task
    refuse_adapter(source)
    return _task_of_model(member, source) if task == "auto" else task


def _task_of_model(member: Member, source: Source) -> str:
    """The task by the config's architecture, as loading tells it."""
    from hf_geosharp.tasks.config import choose_task, read_config

    try:
        return choose_task(source, read_config(source)[0], "auto").name
    except UsageError as error:
        # Of a checkpoint of a run it is the folder that is at fault, and no option.
        raise (ModelError(str(error)) if member.run else error) from None


# ---------------------------------------------------------------------------------------------------------------- data


def rows_of(members: Sequence[Member], given: Mapping[str, Any], token: str | None) -> dict[str, dict[str, Any]]:
    """Of what each model will be scored, by its source, as far as configs, cards and the data tell without weights.

    Of the checkpoints of a run one stands for all.

    Args:
        members: the models; those whose config does not tell their task are left out.
        given: the options of :func:`hf_geosharp.score_pretrained`, all of them.
        token: of the Hub.

    Raises:
        GeosharpError: what scoring would say of a model's data: its card names none, columns that are not there, labels
            that its classes do not fit.
    """
    if not (given["data"] is None or isinstance(given["data"], (str, os.PathLike))):
        return {}
    found: dict[str, dict[str, Any]] = {}
    with warnings.catch_warnings():
        # It is said where a model is scored.
        warnings.simplefilter("ignore", GeosharpWarning)
        for member in {member.run or member.source: member for member in members}.values():
            try:
                rows = _rows(member, given, token)
            except ModelError:
                # Of a checkpoint of a run this is no reason to end; loading tells.
                continue
            except GeosharpError as error:
                raise type(error)(f"{member.source}: {error}") from None
            if rows is not None:
                found[member.source] = rows
    return found


def _rows(member: Member, given: Mapping[str, Any], token: str | None) -> dict[str, Any] | None:
    """The record of the data of one model, with the columns that are read; None where only loading tells."""
    from hf_geosharp.tasks.columns import Columns, choose
    from hf_geosharp.tasks.config import load_config
    from hf_geosharp.tasks.data import load_data
    from hf_geosharp.tasks.hub import find_source
    from hf_geosharp.tasks.kinds import find_task
    from hf_geosharp.tasks.labels import label_rule
    from hf_geosharp.tasks.loaded import read_card
    from hf_geosharp.tasks.quiet import quiet_transformers

    name = _task(member, given["task"], given["params"], token)
    if name is None:
        return None
    task, place, data, own = find_task(name), member.place, given["data"], None
    if place.startswith(demos.PREFIX):
        place = str(demos.path(demos.base_name(place)[0]))
        own = str(Path(place) / "data") if data is None else None
    source = find_source(place, member.revision, token)
    rows, identity = load_data(
        own or data, task=task, config=given["data_config"], split=given["split"], token=token, card=read_card(source)
    )
    columns = choose(rows, task, Columns.of(given["columns"]), need_label=given["labels"] != "model")
    # The classes of an adapter are its base's.
    if task.is_classification and columns.label is not None and given["params"] == "all":
        with quiet_transformers():
            config = load_config(source, given["trust_remote_code"])
        label_rule(rows.features[columns.label], config, columns.label, given["label_map"])
    kept = ("id", "config", "split", "revision", "fingerprint")
    return {**{key: identity[key] for key in kept}, "columns": columns.named()}
