"""What a score is of: what the ranks have to agree in, and what a journal belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from hf_geosharp.errors import WorldError
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.borrow import Borrowed
from hf_geosharp.sharpness.journal import differences, digest, digest_batches
from hf_geosharp.sharpness.objective import Loss
from hf_geosharp.sharpness.parts import Batch
from hf_geosharp.sharpness.precision import name_of_dtype
from hf_geosharp.sharpness.settings import Settings
from hf_geosharp.sharpness.shards import whole_of
from hf_geosharp.symmetry.cache import PACKAGE, of_package
from hf_geosharp.symmetry.fingerprint import of_adapters, of_callable, of_code, of_config
from hf_geosharp.symmetry.layouts import registered

_HOW = ("micro_batch", "gradient_checkpointing", "on_nan", "per")
"""Settings that do not decide a score: a journal may go on with others."""


def identity(
    borrowed: Borrowed,
    batches: Sequence[Batch],
    settings: Settings,
    loss: Loss | None,
    data_digest: str | None,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Of what a score is: what ranks have to agree in, and what a journal belongs to."""
    rest = [(f"buffer {n}", b) for n, b in borrowed.model.named_buffers() if not b.is_meta]
    return {
        # A default that is written out is the same score.
        "settings": {
            k: v
            for k, v in asdict(replace(settings, rho=settings.radii, geodesic=settings.order)).items()
            if k not in (*_HOW, "layouts")
        },
        **_described(settings),
        "loss": loss_name(loss),
        "dtype": name_of_dtype(borrowed.dtype),
        "device": next(iter(borrowed.originals.values())).device.type,
        "versions": dict(versions),
        "program": of_package(PACKAGE),
        "batches": len(batches),
        "data": data_digest or digest_batches(batches),
        "config": of_config(borrowed.model),
        "problem": _problem(borrowed.model, batches[0]),
        # What shards a model hangs functions of its own to it, which differ from process to process.
        "code": None if borrowed.shards is not None else of_code(borrowed.model, attributes=False),
        "adapters": of_adapters(borrowed.model),
        "weights": digest(chain(_weights(borrowed), rest, _frozen(borrowed))),
    }


def _described(settings: Settings) -> dict[str, Any]:
    """The layouts that symmetries are found by, if there are any."""
    found = [asdict(layout) for layout in (*settings.layouts, *registered())]
    return {"layouts": found} if found else {}


def layouts_recorded(settings: Settings) -> dict[str, Any]:
    """What a result says of them: their names, and a digest of what they describe, for a name can stay the same."""
    held = _described(settings).get("layouts")
    if held is None:
        return {}
    digest = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:12]
    return {"layouts": [layout["name"] for layout in held], "layouts_digest": digest}


def _problem(model: nn.Module, batch: Batch) -> str | None:
    """What a classifier's loss is, where that does not follow from its labels; a first pass may write what follows."""
    config = getattr(model, "config", None)
    named, labels = getattr(config, "problem_type", None), batch.get("labels")
    if named is None or not isinstance(labels, Tensor):
        return None
    follows = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
    if getattr(config, "num_labels", None) == 1:
        follows = "regression"
    return None if named == follows else str(named)


def _weights(borrowed: Borrowed) -> Iterator[tuple[str, Tensor]]:
    """All weights by name, in full: those of a sharded model are gathered one by one, on all ranks."""
    for name, held in sorted(borrowed.originals.items()):
        yield name, held if borrowed.shards is None else borrowed.shards.whole(name)


def _frozen(borrowed: Borrowed) -> Iterator[tuple[str, Tensor]]:
    """What an adapter sits on, which is a part of its score too."""
    for name, p in borrowed.model.named_parameters():
        if not p.requires_grad:
            yield f"frozen {name}", whole_of(p)


def loss_name(loss: Loss | None) -> str | None:
    """What tells a loss of the caller's from others, as far as code can be told apart."""
    if loss is None:
        return None
    written: Any = loss
    while isinstance(written, partial):
        written = written.func
    name = f"{getattr(written, '__module__', '')}.{getattr(written, '__qualname__', type(written).__qualname__)}"
    return f"{name} {of_callable(loss)[:12]}"


def agree(world: World, header: Mapping[str, Any]) -> None:
    """Ranks that differ would spread two scores over each other.

    Raises:
        WorldError: they do; with what in.
    """
    headers = world.gather(header)
    found = [
        f"rank {rank}: {', '.join(what)}"
        for rank, theirs in enumerate(headers)
        if (what := differences(theirs, headers[0], ("there", "on rank 0")))
    ]
    if found:
        raise WorldError(f"the processes do not compute the same score. {'; '.join(found)}")
