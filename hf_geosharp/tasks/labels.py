"""From the labels of a data set to the class numbers of a model, checked before a loss sees them.

A data set and a model may number the same classes differently; a score under the wrong numbers is a number about
nothing. Names decide where both sides have names, and what cannot be told is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_geosharp.errors import DataError, DataWarning, UsageError, warn

_HINT = 'Map them with label_map (--label-map): {"label in the data": "label of the model", ...}.'
_TEXTS = ("string", "large_string")


_NO_LABEL = (KeyError, ValueError, TypeError, OverflowError)
"""What comes of a value that stands for no class and no number; the last of infinity."""


@dataclass(frozen=True)
class LabelRule:
    """How one label column is read.

    Attributes:
        how: ``"names"``, ``"ids"``, ``"label map"`` or ``"regression"``; goes into the result.
        convert: From a label to the model's class number (or regression target); raises KeyError or ValueError where
            it has none.
        classes: How many classes the model has; 1 for regression.
    """

    how: str
    convert: Callable[[Any], int | float]
    classes: int


def label_rule(feature: Any, config: Any, column: str, label_map: Mapping[str, Any] | None = None) -> LabelRule:
    """How to read a label column for a model.

    Args:
        feature: The column's feature (its class names count); may be None.
        config: The model's config: ``num_labels``, ``label2id``.
        column: The column's name, for messages.
        label_map: The user's map from labels of the data to labels (names or numbers) of the model.

    Raises:
        DataError: The classes of the data and of the model do not fit together.
        UsageError: The map names a class that the model does not have, or the model has no classes.
    """
    classes = int(config.num_labels)
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise DataError(
            "The model predicts several labels per sample (multi-label); only one label per sample is supported. Score "
            "it without labels (labels 'model', --labels model), or pass batches from Python."
        )
    if predicts_numbers(config):
        if label_map is not None:
            raise UsageError(
                "label_map (--label-map) maps labels to classes, but the model predicts a number (num_labels = 1): "
                "leave it out."
            )
        return LabelRule("regression", _regression_target, classes)
    ids = _model_ids(config)
    names = list(getattr(feature, "names", None) or [])
    if label_map is not None:
        return LabelRule("label map", _by_user_map(label_map, ids, names, classes), classes)
    if names:
        return _class_label_rule(names, ids, classes, column)
    kind = getattr(feature, "dtype", None)
    if kind in _TEXTS:
        return LabelRule("names", lambda value: _by_name_or_number(value, ids), classes)
    if kind == "bool" and {"true", "false"} <= {name.lower() for name in ids.names}:
        return LabelRule("names", lambda value: ids[str(value)], classes)
    if ids.misleading is not None:
        name, number = ids.misleading
        raise DataError(
            f"Column {column!r} holds numbers, and the model has numbers for names that are not those of its classes "
            f"({name!r} is class {number}), so they may mean either. {_HINT}"
        )
    return LabelRule("ids", lambda value: _by_name_or_number(value, ids), classes)


def check_range(rule: LabelRule, values: Iterable[Any], column: str) -> None:
    """Makes sure that no label of a column is beyond the model's classes, of which labels are the numbers.

    The rows that are scored may all be within them, and be of other classes nevertheless: those that count from 1, say.

    Args:
        rule: How the labels are read: as numbers (``"ids"``).
        values: The different labels of the whole column.
        column: Its name.

    Raises:
        DataError: One is.
    """
    numbers = [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    if numbers and max(numbers) >= rule.classes:
        raise DataError(
            f"Column {column!r} has labels up to {max(numbers):g}, and the model has num_labels = {rule.classes}, so "
            f"allowed is 0 to {rule.classes - 1}: its numbers are not those of the model's classes. {_HINT}"
        )


def check_numbers(feature: Any, config: Any, column: str) -> None:
    """Warns where classes of a column have other numbers than the model's classes of the same names.

    For labels that go to the model as they are. Those of tokens are looked at as well.

    Args:
        feature: The column's feature.
        config: The model's config.
        column: The column's name.
    """
    names = list(getattr(getattr(feature, "feature", feature), "names", None) or [])
    ids = _model_ids(config)
    other = [(name, number, ids.get(name)) for number, name in enumerate(names) if ids.get(name) not in (None, number)]
    if other:
        name, number, own = other[0]
        warn(
            f"The labels of column {column!r} are taken as the numbers that they are, as the inputs are encoded, but "
            f"{name!r} is number {number} there and class {own} of the model. Number them as the model does "
            "(Dataset.align_labels_with_mapping), or pass the raw columns.",
            DataWarning,
        )


def predicts_numbers(config: Any) -> bool:
    """Whether a classifier's config says that its outputs are numbers rather than the scores of classes."""
    kind = getattr(config, "problem_type", None)
    return kind == "regression" or (kind is None and getattr(config, "num_labels", None) == 1)


def convert_labels(rule: LabelRule, values: Sequence[Any], rows: Sequence[int], column: str) -> list[int | float]:
    """The model's class number of every label.

    Args:
        rule: How to read them.
        values: The labels.
        rows: The row of the data set that each stands in, for messages.
        column: The column's name, for messages.

    Raises:
        DataError: A label is missing, unknown or out of range; the message gives value, row and the allowed range.
    """
    return [_convert(rule, value, row, column) for value, row in zip(values, rows, strict=True)]


def _convert(rule: LabelRule, value: Any, row: int, column: str) -> int | float:
    where = f"column {column!r}, row {row}"
    if value is None:
        raise DataError(
            f"The label is missing ({where}; rows count from 0). Fill it in, remove the row, or score without labels "
            "(labels 'model', --labels model)."
        )
    if isinstance(value, (list, tuple, dict)):
        raise DataError(f"The label {value!r} ({where}) is not a single label; only one label per sample is supported.")
    try:
        label = rule.convert(value)
    except _NO_LABEL as error:
        if rule.how == "regression":
            raise DataError(
                f"The label {value!r} ({where}) is not a number, and the model has one output (num_labels = 1): "
                "it predicts a number. Choose the column with --label-column (in Python, columns=Columns(label=...))."
            ) from error
        if rule.how == "label map":
            raise DataError(
                f"The label {value!r} ({where}) is not in the label map (--label-map): add it, with its class."
            ) from error
        fault = "may be several classes" if isinstance(error, _AmbiguousError) else "is not a class"
        raise DataError(f"The label {value!r} ({where}) {fault} of the model. {_HINT}") from error
    if rule.how == "regression":
        return label
    if label == -1:
        raise DataError(
            f"The label is -1 ({where}); allowed is 0 to {rule.classes - 1}. This split has no labels, as is "
            "common for test splits: choose another split (--split), or score without labels: labels 'model' (--labels "
            "model). If it stands for a class, map the labels with label_map (--label-map)."
        )
    if not 0 <= label < rule.classes:
        raise DataError(
            f"The label {value!r} ({where}) is out of range: the model has num_labels = {rule.classes}, "
            f"so allowed is 0 to {rule.classes - 1}. {_HINT}"
        )
    return label


class _AmbiguousError(KeyError):
    """A name that several classes have."""


class _Ids:
    """Numbers by names: as these are written, else whatever their case where all that are alike have one number.

    Attributes:
        names: The names, as they are written.
        misleading: A name that is another number than its own, with its number; None if there is none.
    """

    def __init__(self, pairs: Iterable[tuple[str, int]]):
        self.pairs = list(dict.fromkeys(pairs))
        self.names = list(dict.fromkeys(name for name, _ in self.pairs))
        numerals = ((name, number) for name, number in self.pairs if name.strip().isdecimal() and int(name) != number)
        self.misleading = next(numerals, None)
        self._written: dict[str, set[int]] = {}
        self._lower: dict[str, set[int]] = {}
        for name, number in self.pairs:
            self._written.setdefault(name.strip(), set()).add(number)
            self._lower.setdefault(name.strip().lower(), set()).add(number)

    def get(self, name: str) -> int | None:
        """Its number; None if it has none, or more than one."""
        found = self._found(name)
        return next(iter(found)) if len(found) == 1 else None

    def __getitem__(self, name: str) -> int:
        """Its number.

        Raises:
            _AmbiguousError: It has more than one.
            KeyError: It has none.
        """
        number = self.get(name)
        if number is None:
            raise _AmbiguousError(name) if name in self else KeyError(name)
        return number

    def __contains__(self, name: str) -> bool:
        return bool(self._found(name))

    def _found(self, name: str) -> set[int]:
        name = name.strip()
        return self._written.get(name) or self._lower.get(name.lower()) or set()


def _model_ids(config: Any) -> _Ids:
    # A config may carry one of the two tables only; both are read.
    named = [(str(name), int(number)) for number, name in (getattr(config, "id2label", None) or {}).items()]
    numbered = [(str(name), int(number)) for name, number in (getattr(config, "label2id", None) or {}).items()]
    return _Ids(named + numbered)


def _is_generic(ids: _Ids) -> bool:
    """Whether the model's label names are those that transformers fills in: LABEL_0, LABEL_1, ..."""
    return all(name.lower() == f"label_{number}" for name, number in ids.pairs)


def _class_label_rule(names: list[str], ids: _Ids, classes: int, column: str) -> LabelRule:
    known = [number for name in names if (number := ids.get(name)) is not None]
    if len(set(known)) == len(names):
        # -1 stands for "no label" in every ClassLabel column.
        numbers = {-1: -1} | dict(enumerate(known))
        return LabelRule("names", lambda value: numbers[_number(value)], classes)
    if len(names) != classes:
        raise DataError(
            f"Column {column!r} has {len(names)} classes ({_listed(names)}) and the model has num_labels = {classes} "
            f"({_listed(ids.names)}). Score it on the data it was trained for. {_HINT}"
        )
    nameless = names == [str(number) for number in range(classes)]
    if not known and (_is_generic(ids) or nameless):
        warn(
            f"The classes of column {column!r} ({_listed(names)}) and of the model ({_listed(ids.names)}) cannot be "
            "matched by name; their numbers are assumed to mean the same. If they do not, pass label_map "
            "(--label-map).",
            DataWarning,
        )
        return LabelRule("ids", _number, classes)
    raise DataError(
        f"The classes of column {column!r} ({_listed(names)}) are not those of the model ({_listed(ids.names)}). "
        f"{_HINT}"
    )


def _by_user_map(label_map: Mapping[str, Any], ids: _Ids, names: list[str], classes: int) -> Callable[[Any], int]:
    table = _Ids((_text(label), _model_class(label, target, ids, classes)) for label, target in label_map.items())

    def convert(value: Any) -> int:
        text = _text(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
            return table[names[value] if names[value] in table else text]
        return table[text]

    return convert


def _text(label: Any) -> str:
    """A label as it stands in a map; a column of whole numbers in which one is missing holds fractions."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def _model_class(label: str, target: Any, ids: _Ids, classes: int) -> int:
    try:
        number = _by_name_or_number(target, ids)
    except _NO_LABEL:
        number = -1
    if not 0 <= number < classes:
        raise UsageError(
            f"The label map sends {label!r} to {target!r}, which the model does not have. "
            f"Its labels are: {_listed(ids.names)} (or 0 to {classes - 1})."
        )
    return number


def _by_name_or_number(value: Any, ids: _Ids) -> int:
    if isinstance(value, str):
        # Beside names that are other numbers, a number is not that of a class.
        return ids[value] if value in ids or ids.misleading is not None else int(value)
    return _number(value)


def _number(value: Any) -> int:
    number = int(value)
    if number != value:
        raise ValueError(value)
    return number


def _regression_target(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _listed(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
