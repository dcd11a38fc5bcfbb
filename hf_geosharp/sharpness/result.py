"""What a score returns: frozen records that carry their evidence, and their stable JSON (``schema: 1``)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_geosharp.errors import DataError

SCHEMA = 1

_LATER = frozenset({"ascent", "starts", "params", "damping", "per", "profile"})
"""Fields that results of schema 1 once did not have: where they are missing, their defaults are what was meant."""


@dataclass(frozen=True)
class BatchScore:
    """One batch of samples, with its own ball.

    ``value`` is the rise of the loss inside the ball (in units of the loss, never negative for the worst case),
    ``steps`` the number of ascent steps taken, ``converged`` whether the ascent stopped by its own rule or the last
    quarter of the steps raised the value by less than one per cent (not that no other peak is higher). ``passes``
    counts forward passes at this radius, including those at the starts if they were taken for it; not all have a
    backward pass (:class:`Passes`). ``stopped`` says why the ascent ended: "converged", "budget" (of steps), or "lost":
    it found no finite loss above that at the weights, and ``value`` 0 is not a measurement. ``rises`` has the rise
    found from each of several starts, of which ``value`` is the largest; it is empty for a single start. ``rough`` says
    whether the first ascent did not settle, so that Auto-PGD searched the ball as well.
    """

    index: int
    base_loss: float
    value: float
    steps: int
    converged: bool
    passes: int | None = None
    stopped: str = "budget"
    rises: tuple[float, ...] = ()
    rough: bool = False

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BatchScore:
        """From JSON, which has lists for tuples."""
        return cls(**{**data, "rises": tuple(data.get("rises", ()))})


@dataclass(frozen=True)
class CurvePoint:
    """The score at one radius; ``stderr`` and ``interval95`` are None for a single batch."""

    rho: float
    geodesic_sharpness: float
    stderr: float | None
    interval95: tuple[float, float] | None
    reproducible: bool | None


@dataclass(frozen=True)
class Reproducible:
    """Whether a re-run from slightly moved weights gave the same value.

    ``spread`` is the relative difference of the two values, ``how`` says what was moved, by how much, and what
    difference is tolerated. ``ok`` is None when the check was switched off.
    """

    ok: bool | None
    spread: float | None
    how: str


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes over one batch that the score itself took, summed over batches and radii.

    Backward passes are those that the ascent wanted: none at the last point that its steps allow, nor, of the secant
    ascent, at a point that is not better than those before. In micro-batches they come before the loss of all is
    known, and what turns out not to be wanted is made for nothing.
    """

    forwards: int
    backwards: int


@dataclass(frozen=True)
class PairSummary:
    """The symmetries a score used.

    ``count`` pairs (one per head, frequency or unit), of which kinds (``by_kind``), the dimension of their group,
    what was folded (``folded``: kind -> number), which pairs had less than full rank (``reduced``) and which claims
    failed on this model and were dropped (``dropped``); ``deviation`` and ``control`` are the relative change of the
    model's outputs along the orbit and of the negative control.
    """

    count: int
    symmetry_dim: int
    by_kind: dict[str, int] = field(default_factory=dict)
    folded: dict[str, int] = field(default_factory=dict)
    reduced: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    deviation: float | None = None
    control: float | None = None


@dataclass(frozen=True)
class PartScore:
    """The score of the same batches at the same radius when only one part is perturbed.

    ``by`` says how the model was divided: "layer", "head" or "kind". ``part`` is the name of the part; ``layer``,
    ``head`` and ``kind`` are what it belongs to, None where not unique. The values of the parts do not add up to the
    score of the whole: each part has the whole radius to itself. ``reproducible`` says whether the batch with the
    largest value gave the same again from slightly moved weights, ``spread`` by how much it differed, relatively; None
    where that was not checked, or where the loss does not rise.
    """

    part: str
    by: str
    layer: int | None
    head: int | None
    kind: str | None
    value: float
    stderr: float | None
    reproducible: bool | None = None
    spread: float | None = None


@dataclass(frozen=True)
class Profile:
    """The rise of the first batch's loss on the way to its worst perturbation, at the fractions ``t`` of the way.

    ``geodesic`` is along the geodesic of the score, and ends with the batch's value; ``straight`` is along the straight
    line with the same initial velocity. Both begin with 0. ``radius`` is that of the ball.
    """

    t: tuple[float, ...]
    geodesic: tuple[float, ...]
    straight: tuple[float, ...]
    radius: float

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """From JSON, which has lists for tuples."""
        return cls(**{**data, **{name: tuple(data[name]) for name in ("t", "geodesic", "straight")}})


NATS, UNITS = "nats", "units of the loss"


def unit_of(data: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """The unit of a loss, from the ``data`` and the ``model`` of a result: nats, unless it may be something else.

    That is a regression, a custom loss, or the own loss of a model of no known task: a squared error, or a sum.
    """
    if data.get("labels") == "model":
        return NATS
    other = data.get("labels") == "regression" or data.get("loss") is not None or model.get("task", "") is None
    return UNITS if other else NATS


@dataclass(frozen=True)
class SharpnessResult:
    """A score with everything needed to judge and reproduce it.

    ``geodesic_sharpness`` is the mean over batches at radius ``rho`` (the first radius requested; ``curve`` has all),
    ``stderr`` its standard error, ``interval95`` Student's 95 % interval. ``mode`` is "worst" or "average"; ``ascent``
    is "auto", "secant" or "apgd", and "none" for the average; ``steps`` is the number of steps from each of ``starts``,
    of "secant" the largest one.
    ``baselines`` holds other measures at the same radius. ``share`` says where the squared norm of the worst
    perturbation lies, per pair site and per remaining parameter (the shares add up to 1). ``params`` says which
    parameters are perturbed: "all", or "lora" for those of an adapter. ``symmetries`` is "none" for metrics without
    symmetries, and ``damping`` the relative relaxation of near-singular directions. ``per`` (scores of single parts)
    and ``profile`` are there only on request.
    """

    geodesic_sharpness: float
    stderr: float | None
    interval95: tuple[float, float] | None
    base_loss: float
    rho: float
    metric: str
    geodesic: str
    symmetries: str
    mode: str
    steps: int
    seed: int
    samples: int
    batch_size: int
    per_batch: list[BatchScore]
    curve: list[CurvePoint]
    baselines: dict[str, float]
    pairs: PairSummary
    share: dict[str, float]
    reproducible: Reproducible
    passes: Passes
    seconds: float
    model: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    ascent: str = "apgd"
    starts: int = 1
    params: str = "all"
    damping: float = 0.0
    per: tuple[PartScore, ...] = ()
    profile: Profile | None = None
    schema: int = SCHEMA

    @property
    def lost(self) -> int:
        """In how many batches no finite loss above that at the weights was found: with any the score is none."""
        return sum(batch.stopped == "lost" for batch in self.per_batch)

    @property
    def skipped(self) -> int:
        """How many batches were left out, because their loss at the weights is not finite."""
        return _length(self.data.get("skipped_batches"))

    @property
    def missing(self) -> int:
        """How many weights the checkpoint lacked, so that they are random numbers."""
        return _length(self.model.get("missing"))

    @property
    def converged(self) -> str:
        """In how many batches the search has settled, in words; and how many of the balls are rough.

        Settled, by its own rule: there may be a higher peak elsewhere in the ball.
        """
        rough = sum(batch.rough for batch in self.per_batch)
        text = f"{sum(batch.converged for batch in self.per_batch)} of {len(self.per_batch)} batches"
        return f"settled in {text}" + (f", {rough} rough" if rough else "")

    @property
    def unit(self) -> str:
        """The unit of the losses and their rises: "nats", or "units of the loss" for other losses."""
        return unit_of(self.data, self.model)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; keys in a fixed order."""
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k != "schema"}
        profile = fields["profile"] and {k: list(v) if k != "radius" else v for k, v in fields["profile"].items()}
        batches = [batch | {"rises": list(batch["rises"])} for batch in fields["per_batch"]]
        return {"schema": self.schema} | fields | {"per_batch": batches, "per": list(fields["per"]), "profile": profile}

    def to_json(self, indent: int | None = 2) -> str:
        """The result as JSON text.

        Raises:
            ValueError: a value is NaN or infinite.
        """
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SharpnessResult:
        """The inverse of :meth:`to_dict`; unknown keys are an error.

        Raises:
            DataError: another schema, a missing or an unknown key.
        """
        if not isinstance(data, Mapping):
            raise DataError(f"not a result but {data!r:.60}: from_dict takes what to_dict gave")
        if data.get("schema") != SCHEMA:
            raise DataError(f"this result has schema {data.get('schema')!r}; this version reads schema {SCHEMA}")
        fields = {f.name for f in dataclasses.fields(cls)}
        unknown, missing = set(data) - fields, fields - set(data) - _LATER
        if unknown or missing:
            raise DataError(f"not a result: unknown keys {sorted(unknown)}, missing keys {sorted(missing)}")
        values = dict(data)
        values["per_batch"] = [BatchScore.from_dict(b) for b in data["per_batch"]]
        values["curve"] = [CurvePoint(**{**c, "interval95": _pair(c["interval95"])}) for c in data["curve"]]
        values["pairs"] = PairSummary(**data["pairs"])
        values["reproducible"] = Reproducible(**data["reproducible"])
        values["passes"] = Passes(**data["passes"])
        values["interval95"] = _pair(data["interval95"])
        values["per"] = tuple(PartScore(**part) for part in data.get("per", ()))
        profile = data.get("profile")
        values["profile"] = None if profile is None else Profile.from_dict(profile)
        return cls(**values)


def _length(held: Any) -> int:
    return len(held) if isinstance(held, list) else 0


def _pair(value: Sequence[float] | None) -> tuple[float, float] | None:
    return None if value is None else (float(value[0]), float(value[1]))
