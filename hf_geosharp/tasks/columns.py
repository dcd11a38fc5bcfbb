"""Which columns of a data set a task reads: the user's choice, else the usual names, best first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from hf_geosharp.arguments import check_kind
from hf_geosharp.errors import DataError, UsageError
from hf_geosharp.tasks.kinds import Task

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Columns:
    """The columns to read; None where the task has no such column or it is not yet chosen.

    For seq2seq ``text`` is the input and ``label`` the target text; without ``label`` the input's second half is the
    target.
    """

    text: str | None = None
    text_pair: str | None = None
    image: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            name = getattr(self, field.name)
            check_kind(f"the {field.name} column", name, (str, type(None)), "the name of a column, or None")

    @classmethod
    def of(cls, given: Any) -> Columns:
        """These, the ones that a mapping names by their roles, or none for None.

        Raises:
            UsageError: a role that there is not, or something else.
        """
        if given is None or isinstance(given, Columns):
            return given or cls()
        if isinstance(given, Mapping) and set(given) <= {field.name for field in fields(cls)}:
            return cls(**given)
        roles = ", ".join(field.name for field in fields(cls))
        raise UsageError(f"columns is {given!r:.80}; it is a Columns, or a mapping from roles ({roles}) to names.")

    def named(self) -> dict[str, str]:
        """The columns that are set, by role."""
        return {role: column for role, column in asdict(self).items() if column is not None}


def choose(
    dataset: datasets.Dataset, task: Task, overrides: Columns | None = None, *, need_label: bool = True
) -> Columns:
    """The columns that a task reads from a data set.

    Args:
        dataset: The data set.
        task: The task.
        overrides: What the user chose; the rest is found by name.
        need_label: Whether a classification needs labels (a score against the model itself does not).

    Raises:
        UsageError: A column is chosen that is not read.
        DataError: A column is not there, or none of the usual names is; the message lists those there.
    """
    overrides = overrides or Columns()
    read = _roles(task, need_label)
    for role, column in overrides.named().items():
        if role not in read:
            without = "labels 'model'" if role in _roles(task, True) else f"the task {task.name}"
            raise UsageError(
                f"The {role.replace('_', ' ')} column is {column!r} (--{_option(role)}, or Columns in Python), but "
                f"{without} reads none: leave it out."
            )
        if column not in dataset.column_names:
            raise DataError(
                f"The data have no column {column!r} (chosen with --{_option(role)}, or Columns in Python). "
                f"{_there(dataset)}"
            )
    chosen = _choose_inputs(dataset, task, overrides)
    if not task.is_classification:
        return chosen
    label = overrides.label or _find_label(dataset, task)
    if label is None and need_label:
        raise DataError(
            f"The data have no label column ({', '.join(task.labels)}). {_there(dataset)} Name it with "
            "--label-column (in Python, columns=Columns(label=...)), or score without labels: labels 'model' (--labels "
            "model)."
        )
    return replace(chosen, label=label if need_label else None)


def _choose_inputs(dataset: datasets.Dataset, task: Task, overrides: Columns) -> Columns:
    first = getattr(overrides, task.modality)
    second = getattr(overrides, task.second) if _takes_pairs(task) else None
    if first is not None:
        return Columns(**{task.modality: first, **({task.second: second} if second else {})})
    for names in task.inputs:
        if second is not None and len(names) == 1 and names[0] in dataset.column_names and names[0] != second:
            return Columns(**{task.modality: names[0], task.second: second})
        if all(name in dataset.column_names for name in names):
            roles = dict(zip((task.modality, task.second), names, strict=False))
            return Columns(**(roles | ({task.second: second} if second else {})))
    found = _image_column(dataset) if task.modality == "image" else None
    if found is not None:
        return Columns(image=found)
    usual = ", ".join("+".join(names) for names in task.inputs)
    raise DataError(
        f"The data have none of the columns that {task.name} reads ({usual}). {_there(dataset)} "
        f"Name yours with --{task.modality}-column (in Python, columns=Columns({task.modality}=...))."
    )


def _roles(task: Task, need_label: bool) -> set[str]:
    """What columns a task reads."""
    second = [task.second] if _takes_pairs(task) else []
    return {task.modality, *second, *(["label"] if task.is_classification and need_label else [])}


def _takes_pairs(task: Task) -> bool:
    return any(len(names) > 1 for names in task.inputs)


def _image_column(dataset: datasets.Dataset) -> str | None:
    """The only column of images, whatever its name."""
    import datasets

    images = [name for name, feature in dataset.features.items() if isinstance(feature, datasets.Image)]
    return images[0] if len(images) == 1 else None


def _find_label(dataset: datasets.Dataset, task: Task) -> str | None:
    """A column of a usual name, else the only column of class labels."""
    import datasets

    for name in task.labels:
        if name in dataset.column_names:
            return name
    labels = [name for name, feature in dataset.features.items() if isinstance(feature, datasets.ClassLabel)]
    return labels[0] if len(labels) == 1 else None


def _option(role: str) -> str:
    return f"{role.replace('_', '-')}-column"


def _there(dataset: datasets.Dataset) -> str:
    return f"Its columns are: {', '.join(dataset.column_names)}."
