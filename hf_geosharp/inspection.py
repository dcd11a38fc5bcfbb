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
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_geosharp import demos
from hf_geosharp.errors import DataError, UsageError
from hf_geosharp.scoring import make_twin, versions
from hf_geosharp.sharpness.borrow import borrow, check
from hf_geosharp.symmetry import cache
from hf_geosharp.symmetry.find import PRESETS, SMALL, find_symmetries
from hf_geosharp.symmetry.fingerprint import fingerprint, of_batches
from hf_geosharp.symmetry.fold import Fold
from hf_geosharp.symmetry.health import HeadHealth, cutoff_of
from hf_geosharp.symmetry.health import health as health_of
from hf_geosharp.symmetry.inputs import Recipe, call, recipe
from hf_geosharp.symmetry.layouts import registered
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import leaves, widened
from hf_geosharp.symmetry.verify import Verified, example_batches
from hf_geosharp.symmetry.verify import verify as prove
from hf_geosharp.symmetry.views import Axis
from hf_geosharp.tasks.batches import batches_from, make_batches
from hf_geosharp.tasks.columns import Columns
from hf_geosharp.tasks.data import load_data
from hf_geosharp.tasks.models import Network, load_network

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hf_geosharp.symmetry.base import Symmetry
    from hf_geosharp.symmetry.layouts import Layout
    from hf_geosharp.symmetry.map import SymmetryMap
    from hf_geosharp.symmetry.views import View

    Batch = Mapping[str, Any]

SCHEMA = 1

STATUSES = ("holds", "dead", "failed", "unverified")
"""What is known of a site: proved on this model; nothing to prove, for the control does not move the outputs either;
refuted on this model; not tried."""

BATCH_FILE = ".safetensors"
"""A file of this kind is one batch: a tensor for each argument of the model's forward, under its name."""

_ATTENTION = frozenset({"qk", "vo", "qk_norm"})
_FOLD_GROUPS = {"key_bias": "shift", "value_bias": "shift", "norm_gain": "scale"}
_SAMPLES, _ROWS = 8, 4
"""Samples of a data set that the model is run on, and how many at a time: two batches."""


@dataclass(frozen=True)
class Slice:
    """Which part of a parameter a site uses.

    ``factor`` is "g" or "h" for the factor of a pair that it belongs to, "fixed" for what a fold sets to a constant.
    ``index`` says in words what is taken of each dimension, "" if all of it. Exactly: it begins at ``start``, and an
    index in each of the ``axes`` moves by its step along its dimension; ``layout`` names the axes of each dimension,
    outermost first.
    """

    parameter: str
    factor: str
    index: str
    layout: str
    start: list[int]
    axes: list[Axis]


@dataclass(frozen=True)
class SiteReport:
    """One symmetry of one module.

    Attributes:
        kind: "qk", "vo", "mlp", "lora", "key_bias", "value_bias", "norm_gain", ...
        module, name: where, and its name in messages.
        group: of each copy, such as "GL(64)" or "GL(1,C)"; of a fold "shift(64)", "scale(768)" or "affine(768)".
        copies: how many copies: heads, rotary frequencies of all heads, units.
        dim: the size of the block that the group acts on: the head dimension, 1 for a rotary frequency or a unit.
        total_dim: real dimension of the group over all copies.
        parameters, slices: what it moves, and which parts of it.
        deviation, control: relative change of the model's outputs along the orbit, and when it is broken on purpose.
        status: one of :data:`STATUSES`.
    """

    kind: str
    module: str
    name: str
    group: str
    copies: int
    dim: int
    total_dim: int
    parameters: list[str]
    slices: list[Slice]
    deviation: float | None
    control: float | None
    status: str


@dataclass(frozen=True)
class Totals:
    """Over the whole model: what failed or is dead does not count.

    ``effective_parameters`` are the parameters less the dimensions of the symmetry group; ``by_kind`` gives these
    dimensions by kind of site.
    """

    parameters: int
    symmetry_dim: int
    effective_parameters: int
    by_kind: dict[str, int]


@dataclass(frozen=True)
class Inspection:
    """The symmetries of a model.

    Attributes:
        model: identity.
        preset: which symmetries were looked for.
        inputs: what the model was run on.
        deviation, control: of all sites together; None where they were not verified.
        sites: every symmetry that was found, those that failed included.
        totals: of what holds.
        unrecognised: modules that look like attention and were not understood; their parameters are elementwise.
        dropped: claims that were not made or did not hold, with the reason.
        health: of every head; empty where it was left out.
        warnings: what there is to know.
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
        """Plain dicts, lists, numbers and strings; keys in a fixed order. What is infinite is None."""
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
        if data.get("schema") != SCHEMA:
            raise DataError(f"this inspection has schema {data.get('schema')!r}; this version reads schema {SCHEMA}")
        try:
            sites = [SiteReport(**{**s, "slices": [_slice_from(x) for x in s["slices"]]}) for s in data["sites"]]
            heads = [
                HeadHealth(**{**h, "singular_values": tuple(h["singular_values"]), "flags": tuple(h["flags"])})
                for h in data["health"]
            ]
            return cls(**{**data, "sites": sites, "health": heads, "totals": Totals(**data["totals"])})
        except (TypeError, KeyError) as error:
            raise DataError(f"not an inspection: {error}") from error


def _slice_from(data: Mapping[str, Any]) -> Slice:
    return Slice(**{**data, "axes": [Axis(**a) for a in data["axes"]]})


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
    """The symmetries of a model, proved on its own weights, with the health of its heads.

    Args:
        model: a transformers model or any module that takes a batch as keyword arguments; comes back bit-identical.
        inputs: an example batch or several, dicts of tensors; made up from the model's config if None.
        preset: "full", "attention" or "paper"; see :func:`hf_geosharp.symmetry.find.find_symmetries`.
        verify: False leaves out the proof.
        health: False leaves out the health of the heads.
        layouts: descriptions of modules that cannot be traced, as for ``find_symmetries``.
        cached: look in, and add to, what is kept on disk: finds by architecture, whole inspections by the weights
            (of models all of whose code is a library's).
        progress: told of every stage: "find", "verify", "health".

    Raises:
        UsageError: no such preset, or the model cannot be run on the batch; what is missing is named.
        ModelError, UnsupportedModelError: NaN in a parameter; quantised, offloaded or on the meta device.
    """
    identity = {
        "id": getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__,
        "class": type(model).__name__,
    }
    batches = None if inputs is None else [inputs] if isinstance(inputs, Mapping) else list(inputs)
    how = "" if batches is None else f"{_batches(len(batches))} given"
    return _inspect(model, identity, _Wanted(preset, verify, health, tuple(layouts), cached, progress), batches, how)


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
    """The symmetries of a stored model: a Hub id, a folder, or a shipped ``demo:NAME`` (or ``demo:NAME-twin``).

    Args:
        model_id: where it is.
        random_init: builds it from its config alone, with random weights from ``seed``. The health of such weights
            means nothing and is left out.
        data: for a model that does not run on made-up inputs: a data set (a few of its rows are used), or a
            ``.safetensors`` file with a tensor for each argument of the model's forward.
        data_config, split, columns: which part of the data set.
        task: a task's name, if the class that the config names is not the one wanted.
        preset, verify, health, layouts, cached, progress: as for :func:`inspect`; ``progress`` is told of "load" too.
        device, dtype, revision, token, trust_remote_code, allow_missing: as for
            :func:`hf_geosharp.tasks.models.load_network`.

    Raises:
        GeosharpError: what is wrong, where, and what to do; its exit code is that of the command line.
    """
    wanted = _Wanted(preset, verify, health and not random_init, tuple(layouts), cached, progress)
    place = model_id = os.fspath(model_id)
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
        batches = _examples(network, data, data_config, split, columns or Columns(), token, seed)
        how = f"{_batches(len(batches))} of {os.fspath(data)}"
    notes = []
    if network.unexpected:
        some = ", ".join(network.unexpected[:6]) + (" ..." if len(network.unexpected) > 6 else "")
        notes.append(
            f"the checkpoint has {len(network.unexpected)} weights that {type(network.model).__name__} has no place "
            f"for: {some}"
        )
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
        if self.preset not in PRESETS:
            raise UsageError(f"preset is {self.preset!r}; it is one of {', '.join(PRESETS)}")

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
    cutoff = cutoff_of(model)  # of the weights as they are stored; they may be wider while borrowed
    with _held(model) as held:
        examples, known = _runnable(held, batches)
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
                    trials = _fitted(held, example_batches(model, found, known))
                except ValueError as error:
                    raise UsageError(f"{str(error).partition(';')[0]}. {_advice(model)}") from error
            verified = prove(model, found, trials, each=True)
        heads: Sequence[HeadHealth] = ()
        if wanted.health:
            wanted.tell("health")
            # Dead pairs are none of the verified, but how they are is what one wants to know.
            refuted = {c.name: "" for c in verified.claims if c.status == "failed"}
            heads = health_of(model, found.without(refuted), cutoff=cutoff)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    place = {name: number for number, (name, _) in enumerate(model.named_modules())}
    attention = any(p.kind in _ATTENTION for p in found.pairs)
    sites = [_site(s, shapes, *_evidence(s, verified)) for s in (*found.pairs, *found.folds)]
    return Inspection(
        model={**identity, "parameters": held.parameters, "stored_dtypes": list(held.stored_dtypes)},
        preset=wanted.preset,
        inputs=how or f"{_batches(len(examples))} made up from the config",
        deviation=verified.deviation,
        control=verified.control,
        sites=sorted(sites, key=lambda site: place.get(site.module, len(place))),
        totals=_totals(held.parameters, verified.map),
        unrecognised=list(verified.map.unrecognised),
        dropped=list(verified.map.dropped),
        health=sorted(heads, key=lambda head: place.get(head.module, len(place))),
        versions=versions(),
        warnings=[] if attention else ["no attention symmetry was found in this model"],
    )


def _batches(count: int) -> str:
    return f"{count} batch" if count == 1 else f"{count} batches"


@dataclass(frozen=True)
class _Held:
    """A model while it is inspected: its dtype meanwhile, how many parameters it has, what they are stored in."""

    model: nn.Module
    dtype: torch.dtype
    parameters: int
    stored_dtypes: tuple[str, ...]


@contextmanager
def _held(model: nn.Module) -> Iterator[_Held]:
    """The model, in double precision if it is small: a proof is as sharp as its rounding is small, and as slow.

    A proof puts back what it moves, so that no copy of the weights is needed here.
    """
    import torch

    if getattr(model, "hf_quantizer", None) is not None or not all(p.is_floating_point() for p in model.parameters()):
        check(model)  # which says what is wrong
    parameters = sum(leaf.tensor.numel() for leaf in leaves(model).values())
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    wide = parameters <= SMALL or dtypes == {torch.float64}
    dtype = torch.float64 if wide else torch.float32
    with borrow(model, only=()) as borrowed, widened(model, dtype):
        yield _Held(model, dtype, parameters, borrowed.stored_dtypes)


# -------------------------------------------------------------------------------------------------- example batches


def _examples(
    network: Network,
    data: str | os.PathLike[str],
    data_config: str | None,
    split: str | None,
    columns: Columns,
    token: str | None,
    seed: int,
) -> Sequence[Batch]:
    """Batches of what ``data`` names: one file of tensors, or a few rows of a data set."""
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


def _runnable(held: _Held, batches: Sequence[Batch] | None) -> tuple[list[Batch], Recipe | None]:
    """The batches in the model's dtype and on its device, on which it has run.

    Made up if there are none; then how to make others comes with them.

    Raises:
        UsageError: it does not run on them; what it lacks is named.
    """
    model = held.model
    if batches is None:
        try:
            known = recipe(model)
            return _fitted(held, [known.first, known.batch_for(model, seed=1)]), known
        except ValueError as error:
            raise UsageError(f"{str(error).partition(';')[0]}. {_advice(model)}") from error
    if not batches:
        raise UsageError("there is no example batch: the list is empty")
    examples = _fitted(held, batches)
    for batch in examples:
        _try(model, batch)
    return examples, None


def _fitted(held: _Held, batches: Iterable[Batch]) -> list[Batch]:
    """Batches in the model's dtype and on its device."""
    device = next(held.model.parameters()).device
    return [{k: _moved(v, device, held.dtype) for k, v in batch.items()} for batch in batches]


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
            f"{type(error).__name__}: {text or 'no message'}. {_advice(model)}"
        ) from error


def _arguments(model: nn.Module) -> list[Parameter]:
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return [p for p in signature(model.forward).parameters.values() if p.kind in kinds]


def _lacking(model: nn.Module, batch: Iterable[str]) -> list[str]:
    """Arguments that the model's forward cannot do without and that the batch has not."""
    return [p.name for p in _arguments(model) if p.default is Parameter.empty and p.name not in batch]


def _advice(model: nn.Module) -> str:
    names = ", ".join(p.name for p in _arguments(model))
    return (
        f"Give an example batch: inputs= in Python, --data on the command line (a data set, or a {BATCH_FILE} file "
        f"with a tensor for each argument needed). The model takes: {names or 'any arguments'}."
    )


# -------------------------------------------------------------------------------------------------------- reporting


def _evidence(symmetry: Symmetry, verified: Verified) -> tuple[float | None, float | None, str]:
    """Deviation, control and status of one symmetry."""
    claim = next((c for c in verified.claims if c.name == symmetry.name), None)
    return (None, None, "unverified") if claim is None else (claim.deviation, claim.control, claim.status)


def _site(
    symmetry: Symmetry,
    shapes: Mapping[str, Sequence[int]],
    deviation: float | None,
    control: float | None,
    status: str,
) -> SiteReport:
    group, copies, dim, slices = _describe(symmetry, shapes)
    return SiteReport(
        kind=symmetry.kind,
        module=symmetry.module or symmetry.name.rpartition(".")[0],
        name=symmetry.name,
        group=group,
        copies=copies,
        dim=dim,
        total_dim=symmetry.dimension,
        parameters=list(symmetry.parameters),
        slices=slices,
        deviation=deviation,
        control=control,
        status=status,
    )


def _describe(symmetry: Symmetry, shapes: Mapping[str, Sequence[int]]) -> tuple[str, int, int, list[Slice]]:
    """Group, copies, the size of the block it acts on, and the slices."""
    if isinstance(symmetry, Pair):
        slices = [
            _slice(v, factor, shapes[v.parameter])
            for factor, views in (("g", symmetry.g), ("h", symmetry.h))
            for v in views
        ]
        return symmetry.group.name, symmetry.copies, symmetry.group.dim, slices
    if isinstance(symmetry, Fold):
        first = symmetry.fixed[0]
        dim = first.width * first.height
        word = _FOLD_GROUPS.get(symmetry.kind, symmetry.kind)
        if symmetry.dimension > first.count * dim:  # a norm whose bias folds with its gain
            word = "affine"
        return f"{word}({dim})", first.count, dim, [_slice(v, "fixed", shapes[v.parameter]) for v in symmetry.fixed]
    return symmetry.kind, 1, symmetry.dimension, []


def _slice(view: View, factor: str, shape: Sequence[int]) -> Slice:
    return Slice(view.parameter, factor, _index(view, shape), view.layout, list(view.start), list(view.axes))


def _index(view: View, shape: Sequence[int]) -> str:
    """``[:, 0:32]``: what a view takes of each dimension of a parameter of this shape; "" if all."""
    parts = []
    for dimension, (begin, size) in enumerate(zip(view.start, shape, strict=True)):
        runs = [(step, count) for d, step, count in view.region[2] if d == dimension]
        step, count = runs[0] if runs else (1, 1)
        text = f"{begin}:{begin + (count - 1) * step + 1}" + (f":{step}" if step > 1 else "")
        text += "".join(f" {count} times {step} apart" for step, count in runs[1:])
        parts.append(":" if text == f"0:{size}" else text)
    return "" if set(parts) <= {":"} else f"[{', '.join(parts)}]"


def _totals(parameters: int, symmetries: SymmetryMap) -> Totals:
    by_kind: dict[str, int] = {}
    for symmetry in (*symmetries.pairs, *symmetries.folds):
        by_kind[symmetry.kind] = by_kind.get(symmetry.kind, 0) + symmetry.dimension
    return Totals(parameters, symmetries.dimension, parameters - symmetries.dimension, by_kind)
