"""What is measured on: batches that are chosen once and stay the same for the whole training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import IterableDataset

from hf_geosharp.arguments import whole
from hf_geosharp.errors import DataError, UsageError, warn
from hf_geosharp.symmetry.inputs.calls import without_adapter
from hf_geosharp.tasks.batches import accepted_keys
from hf_geosharp.tasks.in_memory import batches_from
from hf_geosharp.untouched import untouched
from hf_geosharp.wrappers import unwrap

Collate = Callable[[list[Any]], Mapping[str, Any]]

LABELS = frozenset(("label", "label_ids", "labels"))


@dataclass(frozen=True)
class Source:
    """Rows and the collator that makes a batch of them, as the Trainer would.

    ``columns`` are the only ones that the collator is given; all if None.
    """

    rows: Any
    collate: Collate
    name: str
    columns: frozenset[str] | None = None


@dataclass(frozen=True)
class Choice:
    """Which rows: how many, in batches of what size, chosen by which seed."""

    samples: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "seed"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if self.samples < 1 or self.batch_size < 1:
            raise UsageError(f"samples is {self.samples} and batch_size {self.batch_size}; both must be at least 1")


def is_rows(data: Any) -> bool:
    """Whether data are rows to be collated, rather than batches that are ready."""
    import datasets

    if isinstance(data, (str, bytes, os.PathLike)):
        raise UsageError(f"data is {data!r:.60}, a name: load the data set and pass that")
    if isinstance(data, (Mapping, datasets.DatasetDict)):
        raise UsageError(f"data holds several sets ({', '.join(map(str, data))}); pass one of them")
    if isinstance(data, (IterableDataset, datasets.IterableDataset)):
        raise UsageError(
            "The data to measure on are streamed, so no fixed rows can be chosen from them, and reading ahead could "
            "change the training. Pass data=: a data set with a length, or a list of batches."
        )
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (list, tuple))


def find_source(data: Any, model: nn.Module, args: Any, trainer: Any = None, loader: Any = None) -> Source:
    """The rows to choose from and the Trainer's collator: of its training loader, which is not iterated, or its own.

    Args:
        data: rows, or None for the training data.
        model: the model in training.
        args: the TrainingArguments.
        trainer: the Trainer, if known.
        loader: its training loader, if there is one yet.

    Raises:
        UsageError: no rows, no collator, or rows that cannot be chosen from.
    """
    collate = getattr(loader, "collate_fn", None) or getattr(trainer, "data_collator", None)
    trained_on = getattr(loader, "dataset", None)
    if data is None and trained_on is not None and collate is not None:
        # A loader's data and collator leave out what the model does not take already.
        return _checked(Source(trained_on, collate, "train_dataset"))
    rows = getattr(trainer, "train_dataset", None) if data is None else data
    if rows is None or collate is None:
        raise UsageError(
            "there are no training data to measure on: use GeodesicSharpnessCallback(...).attach(trainer) with a "
            "trainer that has a train_dataset, or pass data= as a list of batches"
        )
    columns = _columns(model, trainer, args) if args.remove_unused_columns else None
    return _checked(Source(rows, collate, "train_dataset" if data is None else "data", columns))


def _checked(source: Source) -> Source:
    if not is_rows(source.rows) and not isinstance(source.rows, (list, tuple)):
        raise UsageError(f"rows cannot be chosen from a {type(source.rows).__name__}: pass data=")
    return source


def _columns(model: nn.Module, trainer: Any, args: Any) -> frozenset[str] | None:
    """The columns that a Trainer hands to its collator."""
    if hasattr(trainer, "_set_signature_columns_if_needed"):
        # Subclasses override it: TRL's keep columns that only the collator reads.
        trainer._set_signature_columns_if_needed()
        return frozenset(trainer._signature_columns)
    accepted = accepted_keys(without_adapter(unwrap(model)))
    return None if accepted is None else accepted | LABELS | frozenset(args.label_names or ())


def choose(source: Source, choice: Choice) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Batches of rows drawn at random by the seed, collated under a seed, and what was drawn.

    The random states of everything that is read are as before afterwards.

    Raises:
        DataError: fewer rows than one batch, or rows without any of the columns.
    """
    count = len(source.rows)
    wanted = min(choice.samples, count)
    full = wanted // choice.batch_size
    if full == 0:
        raise DataError(
            f"{source.name} has {count} rows and samples is {choice.samples}: fewer than one batch of "
            f"{choice.batch_size}. Lower batch_size" + (", or raise samples." if wanted < count else ".")
        )
    if wanted < choice.samples:
        warn(
            f"{source.name} has {count} rows, not the {choice.samples} asked for; {full * choice.batch_size} are "
            f"used, in {full} whole batches of {choice.batch_size}."
        )
    order = np.random.default_rng(choice.seed).permutation(count)[: full * choice.batch_size].tolist()
    with untouched(source.rows, source.collate, seed=choice.seed):
        batches = [
            _dict(source.collate([_row(source, i) for i in order[start : start + choice.batch_size]]))
            for start in range(0, len(order), choice.batch_size)
        ]
    identity = {
        "id": source.name, "samples": len(order), "batch_size": choice.batch_size, "batches": full,
        "dropped": wanted - len(order), "seed": choice.seed, "rows": count,
    }  # fmt: skip
    return batches, identity


def _dict(batch: Any) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        raise DataError(
            f"the collator makes a {type(batch).__name__} of the rows; only a batch that is a dict of tensors, by the "
            "names of the model's arguments, can be measured. Pass data=: a list of such dicts"
        )
    return dict(batch)


def _row(source: Source, index: int) -> Any:
    row = source.rows[index]
    if source.columns is None or not isinstance(row, Mapping):
        return row
    kept = {key: value for key, value in row.items() if key in source.columns}
    if not kept:
        raise DataError(
            f"{source.name}: row {index} has {sorted(map(str, row))}, none of which the model takes "
            f"({', '.join(sorted(source.columns))})"
        )
    return kept


def fitted(
    batches: Sequence[Mapping[str, Any]], model: nn.Module, choice: Choice, *, private: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A collator's batches, checked against a model.

    What the model does not take is left out, or, if ``private``, kept under a name that starts with an underscore for
    a loss of the user's.

    Raises:
        UsageError, DataError: as :func:`hf_geosharp.tasks.in_memory.batches_from`.
    """
    accepted = accepted_keys(model)
    return batches_from(
        [dict(_named(batch, accepted, private)) for batch in batches],
        model,
        samples=choice.samples,
        batch_size=choice.batch_size,
    )


def _named(batch: Mapping[str, Any], accepted: frozenset[str] | None, private: bool) -> Iterator[tuple[str, Any]]:
    for key, value in batch.items():
        if accepted is None or key in accepted or key in LABELS or key.startswith("_"):
            yield key, value
        elif private:
            yield f"_{key}", value
