"""What symmetries a model has, and the evidence: frozen records with a stable JSON (``schema: 1``).

:func:`inspect` looks at a live model, :func:`inspect_pretrained` at a stored one, or at one built from its config
alone. Both answer with an :class:`Inspection`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hf_geosharp import demos
from hf_geosharp.arguments import check as check_arguments
from hf_geosharp.arguments import check_choice, check_kind, whole
from hf_geosharp.errors import DataError, InputsError, UsageError
from hf_geosharp.example_batches import Batch, advice, fitted, runnable, stored_batches
from hf_geosharp.paths import name_of
from hf_geosharp.scoring import make_twin, versions
from hf_geosharp.sharpness.borrow import borrow, check
from hf_geosharp.site_report import SiteReport, Totals, site_report, totals_of
from hf_geosharp.symmetry import cache
from hf_geosharp.symmetry.find import PRESETS, SMALL, find_symmetries
from hf_geosharp.symmetry.fingerprint import fingerprint, of_batches
from hf_geosharp.symmetry.health import HeadHealth
from hf_geosharp.symmetry.health import health as health_of
from hf_geosharp.symmetry.layouts import layouts_of, registered
from hf_geosharp.symmetry.parameters import leaves, widened
from hf_geosharp.symmetry.verify import Verified, example_batches
from hf_geosharp.symmetry.verify import verify as prove
from hf_geosharp.tasks.columns import Columns
from hf_geosharp.tasks.networks import load_network
from hf_geosharp.tasks.weights import left_out
from hf_geosharp.wrappers import as_written, check_module, unwrap

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hf_geosharp.symmetry.inputs import Recipe
    from hf_geosharp.symmetry.layouts import Layout

SCHEMA = 1

_ATTENTION = frozenset({"qk", "vo", "qk_norm"})


@dataclass(frozen=True)
class Inspection:
    """The symmetries of a model.

    Attributes:
        model: identity.
        preset: which symmetries were looked for.
        inputs: the inputs that the model was run on.
        deviation, control: for all sites together; None if they were not verified.
        sites: every symmetry that was found, including those that failed.
        totals: counts over the symmetries that hold.
        unrecognised: modules that look like attention but were not recognised; their parameters are elementwise.
        dropped: claims that were not made or did not hold, with the reason.
        health: a record for every head; empty if it was left out.
        warnings: caveats.
    """

    model: dict[str, Any]
    preset: str
    inputs: str
    deviation: float | None
    control: float | None
    sites: list[SiteReport]
    totals: Totals
    unrecognised: list[str]
    dropped: list[str]
    health: list[HeadHealth]
    versions: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; keys in a fixed order. Infinite numbers become None."""
        data = {"schema": self.schema} | {k: v for k, v in dataclasses.asdict(self).items() if k != "schema"}
        plain: dict[str, Any] = _plain(data)
        return plain

    def to_json(self, indent: int | None = 2) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Inspection:
        """The inverse of :meth:`to_dict`.

        Raises:
            DataError: another schema, a missing or an unknown key.
        """
        if not isinstance(data, Mapping):
            raise DataError(f"not an inspection but {data!r:.60}: from_dict takes what to_dict gave")
        if data.get("schema") != SCHEMA:
            raise DataError(f"this inspection has schema {data.get('schema')!r}; this version reads schema {SCHEMA}")
        try:
            sites = [SiteReport.from_dict(site) for site in data["sites"]]
            heads = [
                HeadHealth(**{**h, "singular_values": tuple(h["singular_values"]), "flags": tuple(h["flags"])})
                for h in data["health"]
            ]
            return cls(**{**data, "sites": sites, "health": heads, "totals": Totals(**data["totals"])})
        except (TypeError, KeyError) as error:
            raise DataError(f"not an inspection: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------------------ inspecting


def inspect(
    model: nn.Module,
    inputs: Batch | Sequence[Batch] | None = None,
    *,
    preset: str = "full",
    verify: bool = True,
    health: bool = True,
    layouts: Sequence[Layout] = (),
    cached: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Inspection:
    """Finds the symmetries of a model, proves them on its own weights, and measures the health of its heads.

    Args:
        model: a transformers model or any module that takes a batch as keyword arguments; restored bit for bit.
        inputs: one or more example batches (dicts of tensors); made up from the model's config if None.
        preset: "full", "attention" or "paper"; see :func:`hf_geosharp.symmetry.find.find_symmetries`.
        verify: False skips the proof.
        health: False skips the health of the heads.
        layouts: descriptions of modules that cannot be traced, as for ``find_symmetries``.
        cached: use what was found before and kept on disk, and add to it: symmetries by architecture, whole inspections
            by the weights (for models whose code comes entirely from libraries).
        progress: called with the name of every stage: "find", "verify", "health".

    Raises:
        UsageError: the preset is unknown, or the model cannot be run on the batch; the message names what is missing.
        ModelError, UnsupportedModelError: NaN in a parameter; quantised, offloaded or on the meta device.
    """
    check_module(model, "to inspect a model by its name or folder call inspect_pretrained")
    model = unwrap(model)
    identity = {
        "id": getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__,
        "class": type(model).__name__,
    }
    several = isinstance(inputs, Iterable) and not isinstance(inputs, (str, bytes, Mapping))
    batches: list[Any] | None = None if inputs is None else list(inputs) if several else [inputs]
    for batch in batches or ():
        check_kind("inputs", batch, Mapping, "a batch (a mapping from names to tensors), several of them, or None")
    how = "" if batches is None else f"{_batches(len(batches))} given"
    with as_written(model):
        return _inspect(
            model, identity, _Wanted(preset, verify, health, layouts_of(layouts), cached, progress), batches, how
        )


def inspect_pretrained(
    model_id: str | os.PathLike[str],
    *,
    random_init: bool = False,
    seed: int = 0,
    data: str | os.PathLike[str] | None = None,
    data_config: str | None = None,
    split: str | None = None,
    columns: Columns | None = None,
    task: str = "auto",
    preset: str = "full",
    verify: bool = True,
    health: bool = True,
    layouts: Sequence[Layout] = (),
    cached: bool = True,
    device: str = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    allow_missing: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Inspection:
    """Inspects the symmetries of a stored model: a Hub id, a folder, or ``demo:NAME`` (or ``demo:NAME-twin``).

    Args:
        model_id: the model.
        random_init: build it from its config alone, with random weights from ``seed``. The health of such weights
            means nothing and is left out.
        data: for a model that does not run on made-up inputs: a data set (a few of its rows are used), or a
            ``.safetensors`` file with a tensor for each argument of the model's forward.
        data_config, split, columns: the part of the data set to use.
        task: the name of a task, if the model class named by the config is not the right one.
        preset, verify, health, layouts, cached, progress: as for :func:`inspect`; ``progress`` also gets "load".
        device, dtype, revision, token, trust_remote_code, allow_missing: as for
            :func:`hf_geosharp.tasks.networks.load_network`.

    Raises:
        GeosharpError: says what is wrong, where, and what to do; its exit code is that of the command line.
    """
    place = model_id = name_of(model_id, "model_id", "for a model in memory call inspect")
    check_arguments(
        random_init=random_init, health=health, data_config=data_config, split=split, revision=revision, token=token,
        trust_remote_code=trust_remote_code, allow_missing=allow_missing,
    )  # fmt: skip
    check_kind("data", data, (str, os.PathLike, type(None)), "the name or path of a data set or of a file of tensors")
    seed, columns = whole("seed", seed), Columns.of(columns)
    wanted = _Wanted(preset, verify, health and not random_init, layouts_of(layouts), cached, progress)
    twin = False
    if model_id.startswith(demos.PREFIX):
        name, twin = demos.base_name(model_id)
        place = str(demos.path(name))
    wanted.tell("load")
    network = load_network(
        place, task=task, random_init=random_init, seed=seed, revision=revision, token=token,
        trust_remote_code=trust_remote_code, dtype=dtype, device=device, allow_missing=allow_missing,
    )  # fmt: skip
    if twin:
        make_twin(network.model)
    batches, how = None, ""
    if data is not None:
        batches = stored_batches(network, data, data_config, split, columns, token, seed)
        how = f"{_batches(len(batches))} of {os.fspath(data)}"
    notes = []
    if network.unexpected:
        notes.append(left_out(network.unexpected, type(network.model).__name__))
    if random_init:
        notes.append(
            "the weights are random (built from the config alone): symmetries are those of the architecture, and the "
            "health of heads would mean nothing and is left out"
        )
    return _inspect(network.model, {**network.identity, "id": model_id}, wanted, batches, how, notes)


@dataclass(frozen=True)
class _Wanted:
    """What of an inspection is wanted, and who is told of its stages."""

    preset: str
    verify: bool
    health: bool
    layouts: tuple[Layout, ...]
    cached: bool
    progress: Callable[[str], None] | None

    def __post_init__(self) -> None:
        check_arguments(verify=self.verify, health=self.health, cached=self.cached, progress=self.progress)
        check_choice("preset", self.preset, PRESETS)

    def tell(self, stage: str) -> None:
        if self.progress is not None:
            self.progress(stage)


def _inspect(
    model: nn.Module,
    identity: Mapping[str, Any],
    wanted: _Wanted,
    batches: Sequence[Batch] | None,
    how: str,
    notes: Sequence[str] = (),
) -> Inspection:
    """``batches`` are made up if None; ``how`` says where they are from."""
    wanted.tell("find")
    digest = _digest(model, wanted, batches) if wanted.cached and not wanted.layouts and not registered() else None
    known = _known(digest)
    if known is None:
        known = _measured(model, identity, wanted, batches, how)
        if digest is not None:
            cache.keep(digest, dataclasses.asdict(known))
    elif wanted.verify:
        known = replace(known, inputs=f"{how or known.inputs}; proved before on the very same weights")
    # Where the one was from that was measured says nothing of this one.
    measured = {k: known.model[k] for k in _MEASURED}
    return replace(known, model={**identity, **measured}, warnings=[*notes, *known.warnings])


_MEASURED = ("parameters", "stored_dtypes")
"""Of what an inspection says of a model."""


def _digest(model: nn.Module, wanted: _Wanted, batches: Sequence[Batch] | None) -> str | None:
    """What an inspection depends on; None where that is not known."""
    own = None if cache.folder() is None else fingerprint(model)
    if own is None:
        return None
    given = "" if batches is None else of_batches(batches)
    parts = (SCHEMA, cache.SCHEMA, own, wanted.preset, wanted.verify, wanted.health, given, cache.versions())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _known(digest: str | None) -> Inspection | None:
    """An inspection that is kept."""
    try:
        data = None if digest is None else cache.recall(digest)
        return None if data is None else Inspection.from_dict(data)
    except (DataError, AttributeError):
        return None


def _measured(
    model: nn.Module, identity: Mapping[str, Any], wanted: _Wanted, batches: Sequence[Batch] | None, how: str
) -> Inspection:
    """The inspection of a model that is not known yet."""
    with _held(model, batches) as held:
        examples, known = held.examples, held.known
        # One proof is enough, the one below, where another takes its time.
        slow = held.parameters > SMALL
        found = find_symmetries(
            model, examples[0], preset=wanted.preset, layouts=wanted.layouts, cached=wanted.cached,
            prove=not (slow and wanted.verify),
        )  # fmt: skip
        verified = Verified(found, None, None)
        if wanted.verify:
            wanted.tell("verify")
            trials = examples
            if known is not None and found.symmetries:
                # Of a length that the largest group asks for.
                try:
                    trials = fitted(model, held.dtype, example_batches(model, found, known))
                except InputsError as error:
                    raise UsageError(f"{str(error).partition(';')[0]}. {advice(model)}") from error
            verified = prove(model, found, trials, each=True)
        heads: Sequence[HeadHealth] = ()
        if wanted.health:
            wanted.tell("health")
            # Dead pairs are none of the verified, but how they are is what one wants to know.
            refuted = {c.name: "" for c in verified.claims if c.status == "failed"}
            heads = health_of(model, found.without(refuted))
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    place = {name: number for number, (name, _) in enumerate(model.named_modules())}
    attention = any(p.kind in _ATTENTION for p in found.pairs)
    sites = [site_report(s, shapes, verified) for s in (*found.pairs, *found.scales, *found.folds)]
    return Inspection(
        model={**identity, "parameters": held.parameters, "stored_dtypes": list(held.stored_dtypes)},
        preset=wanted.preset,
        inputs=how or f"{_batches(len(examples))} made up from the config",
        deviation=verified.deviation,
        control=verified.control,
        sites=sorted(sites, key=lambda site: place.get(site.module, len(place))),
        totals=totals_of(held.parameters, verified.map),
        unrecognised=list(verified.map.unrecognised),
        dropped=list(verified.map.dropped),
        health=sorted(heads, key=lambda head: place.get(head.module, len(place))),
        versions=versions(),
        warnings=[
            *([] if attention else ["no attention symmetry was found in this model"]),
            *([verified.map.limits] if verified.map.limits else []),
        ],
    )


def _batches(count: int) -> str:
    return f"{count} batch" if count == 1 else f"{count} batches"


@dataclass(frozen=True)
class _Held:
    """A model while it is inspected: its dtype meanwhile, how many parameters it has, what they are stored in.

    It has run on the ``examples``; ``known`` is how others are made up.
    """

    dtype: torch.dtype
    parameters: int
    stored_dtypes: tuple[str, ...]
    examples: list[Batch]
    known: Recipe | None


@contextmanager
def _held(model: nn.Module, batches: Sequence[Batch] | None) -> Iterator[_Held]:
    """The model, in double precision if it is small: a proof is as sharp as its rounding is small, and as slow.

    In single precision where its code does not run in double. A proof puts back what it moves, so that no copy of the
    weights is needed here.
    """
    import torch

    if getattr(model, "hf_quantizer", None) is not None or not all(p.is_floating_point() for p in model.parameters()):
        check(model)  # which says what is wrong
    parameters = sum(leaf.tensor.numel() for leaf in leaves(model).values())
    double = {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.float64}
    ways = [torch.float64] if double or parameters <= SMALL else []
    ways += [] if double else [torch.float32]
    with borrow(model, only=()) as borrowed:
        for dtype in ways:
            with widened(model, dtype):
                try:
                    examples, known = runnable(model, dtype, batches)
                except UsageError:
                    if dtype == ways[-1]:
                        raise
                    continue
                yield _Held(dtype, parameters, borrowed.stored_dtypes, examples, known)
                return
