"""What a model is run on while it is inspected: given, a few rows of a data set, a file of tensors, or made up."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_geosharp.errors import DataError, InputsError, UsageError
from hf_geosharp.symmetry.inputs import Recipe, call, recipe
from hf_geosharp.tasks.batches import make_batches
from hf_geosharp.tasks.columns import Columns
from hf_geosharp.tasks.data import load_data
from hf_geosharp.tasks.in_memory import batches_from
from hf_geosharp.tasks.networks import Network

if TYPE_CHECKING:
    import torch
    from torch import nn

Batch = Mapping[str, Any]

BATCH_FILE = ".safetensors"
"""A file of this kind is one batch: a tensor for each argument of the model's forward, under its name."""

_SAMPLES, _ROWS = 8, 4
"""Samples of a data set that the model is run on, and how many at a time: two batches."""


def stored_batches(
    network: Network,
    data: str | os.PathLike[str],
    data_config: str | None,
    split: str | None,
    columns: Columns,
    token: str | None,
    seed: int,
) -> Sequence[Batch]:
    """Batches of what ``data`` names: one file of tensors, or a few rows of a data set.

    Raises:
        DataError, UsageError: they cannot be read, or the model does none of the tasks whose data can be.
        HubError: the Hub does not give them.
    """
    path = Path(data)
    if path.suffix == BATCH_FILE:
        return _batch_file(path, network.model)
    loaded = network.for_data()
    dataset, _ = load_data(data, config=data_config, split=split, task=loaded.task, token=token, card=loaded.card)
    samples = max(1, min(_SAMPLES, len(dataset)))
    batches, _ = make_batches(
        dataset, loaded, samples=samples, batch_size=min(_ROWS, samples),
        seed=seed, columns=columns, with_labels=False,
    )  # fmt: skip
    return batches


def _batch_file(path: Path, model: nn.Module) -> Sequence[Batch]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        batch = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read as {BATCH_FILE}: {error}") from error
    return batches_from([batch], model)[0]


def runnable(
    model: nn.Module, dtype: torch.dtype, batches: Sequence[Batch] | None
) -> tuple[list[Batch], Recipe | None]:
    """The batches in a model's dtype and on its device, on which it has run.

    Made up if there are none; then how to make others comes with them.

    Raises:
        UsageError: it does not run on them; what it lacks is named.
    """
    if batches is None:
        try:
            known = recipe(model)
            return fitted(model, dtype, [known.first, known.batch_for(model, seed=1)]), known
        except InputsError as error:
            raise UsageError(f"{str(error).partition(';')[0]}. {advice(model)}") from error
    if not batches:
        raise UsageError("there is no example batch: the list is empty")
    examples = fitted(model, dtype, batches)
    for batch in examples:
        _try(model, batch)
    return examples, None


def fitted(model: nn.Module, dtype: torch.dtype, batches: Iterable[Batch]) -> list[Batch]:
    """Batches in a model's dtype and on its device."""
    device = next(model.parameters()).device
    return [{k: _moved(v, device, dtype) for k, v in batch.items()} for batch in batches]


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def _try(model: nn.Module, batch: Batch) -> None:
    import torch

    try:
        with torch.no_grad():
            call(model, batch)
    except (MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        lacking = _lacking(model, batch)
        missing = f", without {', '.join(lacking)}" if lacking else ""
        raise UsageError(
            f"{type(model).__name__} does not run on the example batch of {', '.join(batch)}{missing}: "
            f"{type(error).__name__}: {text or 'no message'}. {advice(model)}"
        ) from error


def _arguments(model: nn.Module) -> list[Parameter]:
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return [p for p in signature(model.forward).parameters.values() if p.kind in kinds]


def _lacking(model: nn.Module, batch: Iterable[str]) -> list[str]:
    """Arguments that the model's forward cannot do without and that the batch has not."""
    return [p.name for p in _arguments(model) if p.default is Parameter.empty and p.name not in batch]


def advice(model: nn.Module) -> str:
    """How to give a model an example batch, as the end of a message."""
    names = ", ".join(p.name for p in _arguments(model))
    return (
        f"Give an example batch: inputs= in Python, --data on the command line (a data set, or a {BATCH_FILE} file "
        f"with a tensor for each argument needed). The model takes: {names or 'any arguments'}."
    )
