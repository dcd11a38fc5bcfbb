"""Finding and opening the data: what was passed, else what the model's card names, else the text shipped here."""

from __future__ import annotations

import errno
import glob
import os
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_geosharp.errors import DataError, DataWarning, GeosharpError, HubError, UsageError, first_line, warn
from hf_geosharp.paths import path_of
from hf_geosharp.tasks.columns import choose
from hf_geosharp.tasks.hub import hub_error, is_hub_failure, looks_like_path
from hf_geosharp.tasks.kinds import Task, find_task
from hf_geosharp.tasks.quiet import quiet_datasets

if TYPE_CHECKING:
    import datasets

DEFAULT_SPLIT = "train"
_SHIPPED_TEXT = "demos/text/data/train.parquet"
_SHIPPED_ID = "shipped text"

_MOST_OF_A_CAUSE = 300

_ROW_NAMES = "__index_level_0__"
"""The column that fields become for which the first line of a csv file has no name."""

# load_dataset takes no path of a single file, so the extension names the builder.
_BUILDERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {}),
    ".arrow": ("arrow", {}),
}

# What Trainer writes into a card as the data set's id when the data were local.
_NOT_IDS = {
    "",
    "imagefolder",
    "audiofolder",
    "csv",
    "json",
    "text",
    "parquet",
    "arrow",
    "generator",
    "pandas",
    "custom",
}


def load_data(
    source: str | os.PathLike[str] | None,
    *,
    task: Task,
    config: str | None = None,
    split: str | None = None,
    token: str | None = None,
    revision: str | None = None,
    card: Mapping[str, Any] | None = None,
) -> tuple[datasets.Dataset, dict[str, Any]]:
    """One split of a data set, with a record of where it came from.

    Args:
        source: The id of a data set on the Hub, a file (csv, tsv, json, jsonl, parquet, txt, arrow), a folder (saved by
            ``save_to_disk``, or of data files or images), or None: what the card names, else, for language models, the
            shipped text.
        task: What the model does.
        config: The data set's configuration.
        split: The split; None takes ``train``, since sharpness is a property of the training loss.
        token: The Hub token.
        revision: A branch, tag or commit of the data set.
        card: The metadata of the model's card.

    Returns:
        The split, and ``{id, config, split, revision, fingerprint, rows, chosen}`` with ``chosen`` one of
        ``"argument"``, ``"model card"`` and ``"shipped text"``.

    Raises:
        UsageError: No source, and neither the card nor the package has one for this task; a configuration or a split of
            what has none.
        DataError: There is no such file or split, or it is empty or cannot be read.
        HubError: The Hub does not give it.
    """
    if source is not None:
        request = _Request(os.fspath(source), config, split, token, revision)
        return _load(request, "argument")
    named = card_data(card or {}, task)
    if len(named) == 1:
        request = _Request(named[0].id, config or named[0].config, split, token, revision)
        try:
            dataset, identity = _load(request, "model card")
            choose(dataset, task, need_label=False)
            return dataset, identity
        except HubError as error:
            raise HubError(
                f"The model card names the data set {request.id}. {error} Or pass other data (--data)."
            ) from error
        except DataError as error:
            if not task.shipped_text:
                raise DataError(
                    f"The model card names the data set {request.id}. {error} Or pass other data (--data)."
                ) from error
            warn(
                f"The model card names the data set {request.id}, which cannot be used: {error} "
                "The text that ships with this package is used instead."
            )
    if task.shipped_text:
        for name, value in (("data_config", config), ("split", split)):
            if value is not None:
                raise UsageError(
                    f"{name} (--{name.replace('_', '-')}) is {value!r}, but there are no data that it could be of: the "
                    "model card names none that can be used, and the text that ships with this package has one part. "
                    "Pass data (--data)."
                )
        return _load_shipped_text()
    listed = ", ".join(data.id for data in named)
    why = f"the model card names several ({listed})" if named else "the model card names none"
    raise UsageError(f"No data: {why}. Pass data (--data): a data set on the Hub, a file or a folder.")


@dataclass(frozen=True)
class CardData:
    """A data set that a model card names."""

    id: str
    config: str | None = None

    @property
    def key(self) -> str:
        """What the same data set has in common under its old and its new id (``glue``, ``nyu-mll/glue``)."""
        return self.id.rsplit("/", 1)[-1].lower()


def card_data(card: Mapping[str, Any], task: Task) -> list[CardData]:
    """The data sets that a model card names for a task: those of its metadata, told apart by its evaluation results.

    Args:
        card: The metadata of the card: ``datasets`` and ``model-index`` are read.
        task: The task; results of other tasks do not count.
    """
    listed = card.get("datasets") or []
    named = _distinct([CardData(str(name)) for name in ([listed] if isinstance(listed, str) else listed)])
    measured = _distinct(_measured(card, task))
    keys = {data.key for data in measured}
    configs = {data.key: data.config for data in measured}
    if len(named) > 1:
        named = [data for data in named if data.key in keys] or named
    return [CardData(data.id, configs.get(data.key)) for data in named] or measured


def _measured(card: Mapping[str, Any], task: Task) -> list[CardData]:
    found = []
    for entry in _dicts(card.get("model-index")):
        for result in _dicts(entry.get("results")):
            data = result.get("dataset")
            if isinstance(data, Mapping) and data.get("type") and _is_task(result.get("task"), task):
                config = data.get("config") or data.get("args")
                found.append(CardData(str(data["type"]), config if isinstance(config, str) else None))
    return found


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _is_task(entry: Any, task: Task) -> bool:
    try:
        return isinstance(entry, Mapping) and find_task(str(entry.get("type"))) is task
    except UsageError:
        return False


def _distinct(found: list[CardData]) -> list[CardData]:
    """One entry a data set; the configuration is kept if all entries agree on it."""
    groups: dict[str, list[CardData]] = {}
    for data in found:
        if data.id.lower() not in _NOT_IDS:
            groups.setdefault(data.key, []).append(data)
    distinct = []
    for group in groups.values():
        configs = {data.config for data in group}
        # The id with an owner is the one the Hub has today.
        best = max(group, key=lambda data: "/" in data.id)
        distinct.append(CardData(best.id, configs.pop() if len(configs) == 1 else None))
    return distinct


@dataclass(frozen=True)
class _Request:
    id: str
    config: str | None = None
    split: str | None = None
    token: str | None = None
    revision: str | None = None


def _load(request: _Request, chosen: str, name: str | None = None) -> tuple[datasets.Dataset, dict[str, Any]]:
    try:
        with quiet_datasets():
            dataset, split, revision = _open(request)
    except GeosharpError:
        raise
    except Exception as error:
        raise _load_error(request, error) from error
    if len(dataset) == 0:
        raise DataError(f"{request.id}{_of_split(split)} is empty.")
    if split is not None and re.split(r"\W", split)[0] != DEFAULT_SPLIT:
        warn(
            f"Scored on the split {split!r}: sharpness is a property of the loss on the training data.",
            DataWarning,
        )
    identity = {
        "id": name or request.id,
        "config": request.config,
        "split": split,
        "revision": revision,
        "fingerprint": dataset._fingerprint,
        "rows": len(dataset),
        "chosen": chosen,
    }
    return dataset, identity


def _open(request: _Request) -> tuple[datasets.Dataset, str | None, str | None]:
    path = path_of(request.id)
    if request.config is not None and (path.is_file() or (path.is_dir() and _is_saved(path))):
        raise UsageError(
            f"{request.id} has no configurations, as data sets of the Hub have: leave out data_config (--data-config)."
        )
    if path.is_dir() and _is_saved(path):
        return _open_saved(request, path)
    if not path.exists() and (looks_like_path(request.id) or path.suffix.lower() in _BUILDERS):
        raise DataError(f"There is no file or folder {request.id}.")
    return _open_built(request, path)


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _open_saved(request: _Request, path: Path) -> tuple[datasets.Dataset, str | None, None]:
    """What ``save_to_disk`` wrote: a data set, or several by split."""
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        split = _pick_split(request, list(saved))
        return saved[split], split, None
    own = str(saved.split) if saved.split is not None else None
    if request.split is not None and request.split != own:
        raise DataError(
            f"{request.id} was saved as one data set ({own or 'no split named'}), not as splits: it has no split "
            f"{request.split!r}. Leave out split (--split)."
        )
    return saved, own, None


def _open_built(request: _Request, path: Path) -> tuple[datasets.Dataset, str, str | None]:
    """A file, a folder of files, or a data set of the Hub."""
    import datasets

    kind = request.id
    options: dict[str, Any] = {}
    if path.is_file():
        kind, options = _builder_of(request, path)
    elif path.is_dir():
        _check_folder(request, path)
        kind = str(path)
    else:
        options = {"token": request.token, "revision": request.revision}
    builder = datasets.load_dataset_builder(kind, name=request.config, **options)
    builder.download_and_prepare()
    split = _pick_split(request, list(builder.info.splits or {}))
    if builder.name == "csv" and _ROW_NAMES in (builder.info.features or {}):
        warn(
            f"The rows of {request.id} have more fields than its first line has names: the first are taken for the "
            "names of the rows. If a text holds commas, put it in quotes.",
            DataWarning,
        )
    on_hub = not path.exists() and re.fullmatch("[0-9a-f]{40}", str(builder.hash))
    return builder.as_dataset(split=split), split, str(builder.hash) if on_hub else None


def _builder_of(request: _Request, path: Path) -> tuple[str, dict[str, Any]]:
    if path.suffix.lower() not in _BUILDERS:
        raise DataError(f"{request.id}: cannot read a {path.suffix or 'nameless'} file; {', '.join(_BUILDERS)} can be.")
    if path.stat().st_size == 0:
        raise DataError(f"{request.id} is empty.")
    kind, options = _BUILDERS[path.suffix.lower()]
    # The library takes names for patterns.
    place = path.resolve() if glob.has_magic(os.getcwd()) else path
    return kind, {**options, "data_files": glob.escape(str(place))}


def _check_folder(request: _Request, path: Path) -> None:
    """Names that the library takes for patterns are refused; files that it leaves out are told.

    Raises:
        DataError: The folder's name is a pattern.
    """
    if glob.has_magic(str(path.resolve())):
        raise DataError(
            f"{request.id} cannot be read: its path holds one of * ? [, which make it a pattern. Rename the folder, or "
            "pass a file in it."
        )
    kinds = sorted({_BUILDERS[file.suffix.lower()][0] for file in path.iterdir() if file.suffix.lower() in _BUILDERS})
    if len(kinds) > 1:
        warn(
            f"{request.id} holds files of several kinds ({', '.join(kinds)}); only the most frequent kind is read. "
            "Pass a file to choose.",
            DataWarning,
        )


def _pick_split(request: _Request, there: list[str]) -> str:
    """The split asked for (``train[:10%]`` and ``train+test`` are allowed), else train, else the only one."""
    if request.split is not None:
        for part in request.split.split("+"):
            if part.split("[")[0].strip() not in there:
                raise DataError(f"{request.id} has no split {request.split!r}. Its splits are: {', '.join(there)}.")
        return request.split
    if DEFAULT_SPLIT in there:
        return DEFAULT_SPLIT
    if len(there) == 1:
        return there[0]
    raise DataError(
        f"{request.id} has no split {DEFAULT_SPLIT!r}. Its splits are: {', '.join(there)}. Choose one with split "
        "(--split)."
    )


def _of_split(split: str | None) -> str:
    return "" if split is None else f" (split {split!r})"


def _load_error(request: _Request, error: Exception) -> GeosharpError:
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    local = path_of(request.id).exists()
    text = first_line(error)
    if not local and isinstance(error, DatasetNotFoundError):
        return HubError(
            f"Cannot get the data set {request.id!r} from the Hub: {text} Check the id; for a private or gated one log "
            "in (`hf auth login`) or pass a token."
        )
    if not local and is_hub_failure(error):
        return hub_error(error, f"data set {request.id!r}")
    if "scripts are no longer supported" in text:
        return DataError(
            f"{request.id} is a data set made by a Python script, which datasets no longer runs. "
            "Pass a version of it in data files (parquet), on the Hub or as a local file."
        )
    if "corresponds to no data" in text:
        return DataError(f"{request.id}{_of_split(request.split)} is empty.")
    if "Config name is missing" in text or "BuilderConfig" in text:
        return DataError(
            f"{request.id}: choose its configuration with data_config (--data-config). {' '.join(str(error).split())}"
        )
    for refused in (error, error.__cause__):
        if isinstance(refused, OSError) and (refused.errno in (errno.EROFS, errno.ENOSPC) or _is_cache(refused)):
            return DataError(
                f"{request.id} cannot be put into the cache of datasets ({refused.strerror}: {refused.filename}). Set "
                "HF_HOME or HF_DATASETS_CACHE to a folder that can be written."
            )
    if isinstance(error, DatasetGenerationError):
        told = f"{request.id} cannot be read: {text} {_cause(error)}".rstrip()
        advice = _advice(error.__cause__)
        return DataError(f"{told.removesuffix('.')}. {advice}" if advice else told)
    return DataError(f"{request.id} cannot be read: {type(error).__name__}: {text}")


def _is_cache(error: OSError) -> bool:
    """Whether what the system refuses is the cache of datasets, something in it, or a folder that is to hold it."""
    import datasets

    if not isinstance(error.filename, str):
        return False
    place, cache = Path(os.path.abspath(error.filename)), Path(os.path.abspath(datasets.config.HF_DATASETS_CACHE))
    return place == cache or cache in place.parents or place in cache.parents


def _advice(cause: BaseException | None) -> str:
    """What to do about a file that cannot be read, where that is known."""
    if isinstance(cause, UnicodeDecodeError):
        return "Save the file as UTF-8."
    if type(cause).__name__ == "ParserError":
        return "Fields are separated by commas in a .csv file, by tabs in a .tsv file; quote those that hold any."
    return ""


def _cause(error: BaseException) -> str:
    """Why data could not be made: the error behind it, or the second paragraph of one that tells all itself."""
    cause = error.__cause__
    behind = "".join(str(error).split("\n\n")[1:2]) if cause is None else str(cause) or type(cause).__name__
    return textwrap.shorten(behind, _MOST_OF_A_CAUSE, placeholder=" ...")


def _load_shipped_text() -> tuple[datasets.Dataset, dict[str, Any]]:
    file = resources.files("hf_geosharp").joinpath(_SHIPPED_TEXT)
    with resources.as_file(file) as path:
        if not path.is_file():
            raise DataError("The text that ships with this package is not installed. Pass data (--data).")
        return _load(_Request(str(path)), "shipped text", _SHIPPED_ID)
