"""What a report says of a score in words: what the number means, how far it can be trusted, how it was taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_geosharp.cards import entry
from hf_geosharp.cards.section import number
from hf_geosharp.figures import KINDS
from hf_geosharp.sharpness.choices import METRICS, search, title_of

if TYPE_CHECKING:
    from hf_geosharp.sharpness.result import SharpnessResult

Row = tuple[str, str]
"""A name and what is said of it."""

_ORDERS = {"first": "first order", "second": "second order", "exact": "exact"}
_FOLDED = {
    "key_bias": "key biases",
    "value_bias": "value biases",
    "qk_mean": "means of normalised queries and keys",
    "norm_gain": "gains of norms",
    "layer_scale": "scales of layers' outputs",
    "read_mean": "means of what layer norms are read by",
    "written_mean": "means of what nothing but layer norms or a softmax reads",
    "stream_bias": "constants that others hold",
}
_REPEATED = ("samples", "batch_size", "batches", "seed", "dtype", "labels")
"""Of the identities of model and data what the settings say already."""

GOOD, BAD, OPEN = "good", "bad", "open"


@dataclass(frozen=True)
class Check:
    """Something that decides whether the number can be trusted; ``state`` is good, bad, or open: neither of them."""

    name: str
    verdict: str
    detail: str
    state: str


def title(result: SharpnessResult) -> str:
    """What was measured: only what divides symmetries out is called geodesic."""
    return title_of(result.metric)


def interval(bounds: tuple[float, float] | None) -> str:
    """The bounds in four digits; empty where there are none."""
    return "" if bounds is None else f"{bounds[0]:.4g} to {bounds[1]:.4g}"


def percent(share: float) -> str:
    """A share of 1; what is not zero does not look like it."""
    return f"{100 * share:.1f} %" if share >= 0.0005 or share == 0 else "< 0.1 %"


def counted(count: int, one: str, many: str) -> str:
    """A number and what it is of."""
    return f"{count:,} {one if count == 1 else many}"


def on(data: Mapping[str, Any]) -> str:
    """What data it was measured on, in a few words."""
    parts = [str(data[part]) for part in ("config", "split") if data.get(part)]
    return ", ".join([entry.public_name(data) or "batches in memory", *parts])


# ------------------------------------------------------------------------------------------------------------ meaning


def meaning(result: SharpnessResult) -> list[str]:
    """What the number is, in sentences that need no paper; one paragraph each."""
    batches = counted(len(result.per_batch), "batch", "batches")
    if result.lost:
        return [
            f"In {result.lost} of {batches} no finite loss above that at the weights was found within ρ = "
            f"{result.rho:g}, so their 0 is no value, and the mean no score. Use a smaller radius."
        ]
    of = f"the mean over {batches} of {result.batch_size:,} samples" if len(result.per_batch) > 1 else "one batch"
    if result.mode == "worst":
        what = (
            f"A perturbation of the weights of length at most ρ = {result.rho:g} can raise the loss by this much, in "
            f"{result.unit} ({of}). It is the largest rise that the search found: a lower bound of the maximum."
        )
    else:
        what = (
            f"Random perturbations of the weights of length about ρ = {result.rho:g} raise the loss by this much on "
            f"average, in {result.unit} ({of}, {counted(result.steps, 'draw', 'draws')} each)."
        )
    known = METRICS.get(result.metric)
    length = known.length if known else f"by the metric {result.metric}"
    return [f"{what} {_base(result)}", f"Length is measured {length}."]


def _base(result: SharpnessResult) -> str:
    if result.data.get("labels") == "model":
        return "The loss is the divergence from the model's own unperturbed output, so it starts from 0."
    text = f"The loss starts from {result.base_loss:.4g} {result.unit}"
    if result.base_loss <= 0:
        return f"{text}."
    return f"{text}: the rise is {result.geodesic_sharpness / result.base_loss:.3g} times that."


def about_interval(result: SharpnessResult) -> str:
    """What the interval covers, and what it does not."""
    if result.interval95 is None:
        return "From a single batch there is no interval."
    return (
        f"Student's 95 % interval over the {len(result.per_batch)} batches: how much the mean depends on which samples "
        "were drawn. It does not include what the search may have missed."
    )


def limits() -> list[str]:
    """What the number is not, whatever it is."""
    return [
        "Two scores are comparable only with the same metric, radius, data, split, samples, batch size, search, "
        "symmetries and loss. There is no absolute scale.",
        "It is not a certificate of generalization. Correlations are known within groups of comparable models, and "
        "not always with the same sign.",
    ]


# ------------------------------------------------------------------------------------------------------------- checks


def checks(result: SharpnessResult) -> Iterator[Check]:
    """The evidence that the score carries."""
    if result.lost:
        lost = f"in {result.lost} of {counted(len(result.per_batch), 'batch', 'batches')}"
        yield Check("No measurement", lost, "no finite loss was found: use a smaller radius", BAD)
    yield _reproducible(result)
    if result.mode == "worst":
        settled, count = sum(batch.converged for batch in result.per_batch), len(result.per_batch)
        if settled == count:
            yield Check(
                "Search settled",
                "in every batch",
                "it stopped by its own rule, or its last steps gained almost nothing; another peak may be higher",
                GOOD,
            )
        else:
            more = "more steps may raise the value in the others"
            yield Check("Search settled", f"in {settled} of {count} batches", more, OPEN)
        if rough := sum(batch.rough for batch in result.per_batch):
            yield Check(
                "Rough balls",
                f"{rough} of {count}",
                "the loss is far from quadratic there: the radius may be too large to mean much",
                OPEN,
            )
    if result.pairs.count or result.pairs.folded or result.pairs.dropped:
        yield _symmetries(result)
    if result.missing:
        yield Check("Weights", f"{result.missing} missing", "the checkpoint lacks them: they are random numbers", BAD)
    if result.skipped:
        count = result.skipped + len(result.per_batch)
        yield Check("Batches", f"{result.skipped} of {count} skipped", "their loss is not finite", OPEN)
    split = str(result.data.get("split") or "train")
    if split.split("[")[0] != "train":
        yield Check("Split", split, "sharpness is a property of the training loss", OPEN)


def _reproducible(result: SharpnessResult) -> Check:
    check = result.reproducible
    if check.ok is None:
        return Check("Reproducible", "not checked", "the re-run was switched off", OPEN)
    spread = [] if check.spread is None else [f"relative difference {check.spread:.2g}"]
    detail = "; ".join([*spread, check.how])
    if check.ok:
        return Check("Reproducible", "yes", detail, GOOD)
    return Check("Reproducible", "no", f"{detail}. A smaller radius may help", BAD)


def _symmetries(result: SharpnessResult) -> Check:
    pairs = result.pairs
    if pairs.dropped:
        return Check("Symmetries", f"{len(pairs.dropped)} dropped", "claims that did not hold on this model", OPEN)
    if pairs.deviation is None:
        return Check("Symmetries", "not checked", "their proof on this model was switched off", OPEN)
    control = "" if pairs.control is None else f"; {pairs.control:.3g} when the symmetry was broken on purpose"
    return Check("Symmetries", "hold", f"outputs changed by {pairs.deviation:.2g} along the orbit{control}", GOOD)


# --------------------------------------------------------------------------------------------------------------- facts


def symmetries(result: SharpnessResult) -> Iterator[Row]:
    """The symmetries that were divided out, and what was folded."""
    pairs = result.pairs
    yield "preset", result.symmetries
    yield "pairs", f"{pairs.count:,}"
    yield "dimensions divided out", f"{pairs.symmetry_dim:,}"
    for kind, count in pairs.by_kind.items():
        name, _, group = kind.partition(" ")
        yield KINDS.get(name, name), f"{count:,}{f' of {group}' if group else ''}"
    for kind, count in pairs.folded.items():
        yield f"folded {_FOLDED.get(kind, kind)}", f"{count:,}"
    if pairs.deviation is not None:
        yield "change of outputs along the orbit", f"{pairs.deviation:.2g}"
    if pairs.control is not None:
        yield "with the symmetry broken", f"{pairs.control:.3g}"


def settings(result: SharpnessResult) -> Iterator[Row]:
    """What decides the number."""
    yield "metric", result.metric
    yield "radius ρ", f"{result.rho:g}"
    yield "geodesic", _ORDERS.get(result.geodesic, result.geodesic)
    yield "case", result.mode
    if result.mode == "worst":
        yield "search", search(result.ascent, result.steps, result.starts)
    else:
        yield "draws", f"{result.steps:,}"
    batches = counted(len(result.per_batch), "batch", "batches")
    yield "samples", f"{result.samples:,} in {batches} of {result.batch_size:,}"
    yield "seed", str(result.seed)
    labels = {"model": "the model's own output"}
    yield "labels", labels.get(str(result.data.get("labels")), "those of the data")
    if result.params != "all":
        yield "perturbed weights", result.params
    if result.model.get("dtype"):
        yield "precision", str(result.model["dtype"])


def identity(what: Mapping[str, Any]) -> Iterator[Row]:
    """What is known of a model or of data, but for what the settings say."""
    if name := entry.public_name(what):
        yield "name", name
    for key, value in what.items():
        if key == "id" or key in _REPEATED:
            continue
        text = _plain(value)
        if text:
            yield key.replace("_", " "), text


def cost(result: SharpnessResult) -> Iterator[Row]:
    """What the score took, and with what."""
    yield "forward passes over a batch", f"{result.passes.forwards:,}"
    yield "backward passes", f"{result.passes.backwards:,}"
    yield "time", f"{result.seconds:,.1f} s"
    yield from result.versions.items()


def baselines(result: SharpnessResult) -> Iterator[Row]:
    """Other measures at the same radius."""
    for name, value in result.baselines.items():
        yield name, number(value)


def _plain(value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(held)}" for key, held in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_plain, value))
    return str(value)
