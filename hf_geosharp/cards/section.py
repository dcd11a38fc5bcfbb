"""The part of a card's body that tells a reader what was measured; it stands between two markers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any

from hf_geosharp.cards import entry
from hf_geosharp.cards.reproduce import recipe
from hf_geosharp.errors import CardError
from hf_geosharp.sharpness.choices import search

if TYPE_CHECKING:
    from hf_geosharp.sharpness.result import CurvePoint, SharpnessResult

START = "<!-- hf-geosharp:start -->"
END = "<!-- hf-geosharp:end -->"
_PAPER = "[arXiv 2505.05409](https://arxiv.org/abs/2505.05409)"

_BALL = {
    "geodesic_sharpness": (
        "Length is measured on the quotient by the symmetries that were found on the model, so the score is the same "
        f"for all weights that they make of one another ({_PAPER})."
    ),
    "adaptive_sharpness": (
        "Length is measured relative to each weight, without the model's symmetries: the same function at other "
        "weights can have another score."
    ),
    "euclidean_sharpness": (
        "Length is Euclidean, without the model's symmetries: the same function at other weights can have another "
        "score."
    ),
}
_CASES = {
    "worst": (
        "The largest rise of the mean loss of a batch that a perturbation of the weights of length at most ρ can "
        "cause, as found by {search} (a lower bound of the maximum); the mean over {count} of {size} samples."
    ),
    "average": (
        "The mean rise of the mean loss of a batch under {steps} random perturbations of the weights of length about "
        "ρ; the mean over {count} of {size} samples."
    ),
}


@lru_cache
def template(name: str) -> Template:
    """A template that ships with the package."""
    return Template(resources.files("hf_geosharp.model_cards").joinpath(f"{name}.md").read_text(encoding="utf-8"))


def render(
    result: SharpnessResult, model: str, others: Sequence[Mapping[str, Any]] = (), picture: str | None = None
) -> str:
    """The section, with its markers and line feeds; the same for the same arguments, whenever it is made.

    Args:
        result: The score, as :func:`hf_geosharp.cards.entry.plain` leaves it.
        model: What the card is of: an id of the Hub, or the name of a folder.
        others: Further scores in the card's metadata, which are only named.
        picture: The file name of the picture of the curve, if there is one.

    """
    kind = entry.METRIC_TYPES[result.metric]
    text = template("section").substitute(
        title=entry.TITLES[kind],
        value=number(result.geodesic_sharpness),
        unit=result.unit,
        interval=_interval(result),
        data=_data(result),
        rho=f"{result.rho:g}",
        picture=f"![{alt_text(result)}]({picture})\n\n" if picture else "",
        meaning=f"{_case(result)} {_BALL[kind]}",
        settings="\n".join(f"| {name} | {text} |" for name, text in _settings(result)),
        curve=_curve(result.curve) if len(result.curve) > 1 else "",
        others=_others(others, entry.entry(result)["metrics"][0]["args"]),
        cautions="".join(f"- {text}\n" for text in _cautions(result)),
        reproduce=recipe(result, model).markdown(),
        versions=", ".join(f"{plain(k)} {plain(v)}" for k, v in result.versions.items()) or "an unknown version",
    )
    return f"{START}\n{text.strip()}\n{END}"


def put(text: str, block: str, eol: str) -> str:
    """``text`` with the section in it: where it stands already, else at the end after a blank line.

    Raises:
        CardError: Half of the markers is missing, or they are there more than once.
    """
    block = block.replace("\n", eol)
    if block.count(START) != 1 or block.count(END) != 1:
        raise CardError("the section would contain its own marker: a name in the result looks like one")
    found = find(text)
    if found is not None:
        return text[: found[0]] + block + text[found[1] :]
    if not text or text.endswith("\n"):
        return text + eol + block + eol
    # No final line break then either: taking the section away leaves what was there.
    return text + eol + eol + block


def take(text: str) -> str:
    """``text`` without the section, and without the blank line that :func:`put` sets before it.

    Raises:
        CardError: As for :func:`put`.
    """
    found = find(text)
    if found is None:
        return text
    before, after = text[: found[0]], text[found[1] :]
    eol = "\r\n" if text.startswith("\r\n", found[0] + len(START)) else "\n"
    if after.startswith(eol):
        return before.removesuffix(eol) + after.removeprefix(eol)
    return before if after else before.removesuffix(eol).removesuffix(eol)


def find(text: str) -> tuple[int, int] | None:
    """Where the section stands, markers included; None if it does not.

    Raises:
        CardError: Half of the markers is missing, or they are there more than once or in the wrong order.
    """
    starts, ends = ([at.start() for at in re.finditer(re.escape(marker), text)] for marker in (START, END))
    if not starts and not ends:
        return None
    if len(starts) != 1 or len(ends) != 1 or starts[0] > ends[0]:
        raise CardError(
            f"the markers of the section are not one {START} and one {END} after it (there are {len(starts)} and "
            f"{len(ends)}): delete the section, or what is left of it"
        )
    return starts[0], ends[0] + len(END)


def number(value: float) -> str:
    """Six significant digits, as in the table of ``hf-geosharp score``."""
    return f"{value:#.6g}"


def plain(text: Any) -> str:
    """Text that means nothing to Markdown: on one line, special characters escaped."""
    return re.sub(r"([\\`*_\[\]<>|#$])", r"\\\1", " ".join(str(text).split()))


def alt_text(result: SharpnessResult) -> str:
    """What the picture shows, for those who do not see it."""
    kind = entry.METRIC_TYPES[result.metric]
    points = ", ".join(f"{number(p.geodesic_sharpness)} at ρ = {p.rho:g}" for p in result.curve)
    return f"{entry.TITLES[kind]} by radius: {points}"


def _interval(result: SharpnessResult) -> str:
    if result.interval95 is None or result.stderr is None:
        return " (one batch, so without an interval)"
    return f" ± {result.stderr:.2g} (95 % interval {_bounds(result.interval95)})"


def _bounds(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.4g} to {interval[1]:.4g}"


def _data(result: SharpnessResult) -> str:
    name = plain(entry.public_name(result.data)) or "custom data"
    parts = [f"{part} {plain(result.data[part])}" for part in ("config", "split") if result.data.get(part)]
    return ", ".join([name, *parts])


def _case(result: SharpnessResult) -> str:
    count = len(result.per_batch)
    text = _CASES.get(result.mode, _CASES["worst"])
    batches = f"{count} batches" if count != 1 else "1 batch"
    found = plain(search(result.ascent, result.steps, result.starts))
    return text.format(steps=result.steps, search=found, count=batches, size=result.batch_size)


def _settings(result: SharpnessResult) -> Iterator[tuple[str, str]]:
    pairs = result.pairs
    yield "metric", f"{plain(result.metric)}, geodesic {plain(result.geodesic)}, {plain(result.mode)} case"
    symmetries = f"{plain(result.symmetries)}: {pairs.count:,} pairs, {pairs.symmetry_dim:,} dimensions divided out"
    yield "symmetries", symmetries + (f", {len(pairs.dropped)} dropped" if pairs.dropped else "")
    if result.params != "all":
        yield "weights that may move", "those of the adapter alone"
    yield "samples", f"{result.samples:,} in batches of {result.batch_size:,}, seed {result.seed}"
    yield "search", _steps(result)
    yield "loss", f"{_loss(result)}, {number(result.base_loss)} {result.unit} before the perturbation"
    yield "reproducible", _reproducible(result)
    for name, value in result.baselines.items():
        yield f"{plain(name)} sharpness", f"{number(value)} at the same ρ, which it measures in another way"
    if entry.on_hub(result.model):
        yield "model revision", f"`{plain(result.model['revision'])}`"


def _loss(result: SharpnessResult) -> str:
    if result.data.get("labels") == "model":
        return "divergence from the model's own output"
    own = result.data.get("loss")
    return "the model's own" if own is None else f"`{plain(own)}`"


def _steps(result: SharpnessResult) -> str:
    if result.mode != "worst":
        return f"{result.steps} draws"
    return f"{plain(search(result.ascent, result.steps, result.starts))}; {result.converged}"


def _reproducible(result: SharpnessResult) -> str:
    check = result.reproducible
    if check.ok is None:
        return "not checked"
    spread = "" if check.spread is None else f", spread {check.spread:.2g}"
    return ("yes" if check.ok else "**no**") + spread


def _curve(points: Sequence[CurvePoint]) -> str:
    lines = ["| ρ | score | 95 % interval |", "| ---: | ---: | --- |"]
    for point in points:
        interval = "" if point.interval95 is None else _bounds(point.interval95)
        lines.append(f"| {point.rho:g} | {number(point.geodesic_sharpness)} | {interval} |")
    return "\n".join(lines) + "\n\n"


def _others(others: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> str:
    """One line for each score that only the metadata have, with the settings in which it is not like the ``own``."""
    if not others:
        return ""
    lines = ["Other scores in the metadata of this card:", ""]
    for item in others:
        (metric,) = item["metrics"]
        held = item.get("dataset")
        data = held if isinstance(held, Mapping) else {}
        parts = [plain(metric.get("name") or metric["type"]), _how(metric["args"])]
        parts += [plain(data[part]) for part in ("name", "split") if part in data]
        parts += _different(metric["args"], own)
        lines.append(f"- {plain(metric.get('value'))}: {', '.join(part for part in parts if part)}")
    return "\n".join(lines) + "\n\n"


def _how(args: Mapping[str, Any]) -> str:
    """Case and search of a score in the metadata, which others may have written."""
    case, ascent, steps, starts = (args.get(name) for name in ("case", "ascent", "steps", "starts"))
    parts = [] if case is None else [f"{plain(case)} case"]
    if case != "average" and isinstance(ascent, str) and isinstance(steps, int):
        parts.append(plain(search(ascent, steps, starts if isinstance(starts, int) else 1)))
    elif steps is not None:
        parts.append(f"{plain(steps)} {'draws' if case == 'average' else 'steps'}")
    return ", ".join(parts)


_SAID = frozenset({"metric", "rho", "case", "ascent", "steps", "starts"})
"""Settings that a score's name, or :func:`_how`, has."""


def _different(args: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """The other settings that are not those of the score that the section tells of."""
    for name in [*args, *(name for name in own if name not in args)]:
        if name not in _SAID and args.get(name) != own.get(name):
            words = str(name).replace("_", " ")
            yield plain(f"{words} {args[name]}" if name in args else f"default {words}")


def _cautions(result: SharpnessResult) -> Iterator[str]:
    if result.reproducible.ok is False:
        yield (
            "**This score is not reproducible**: from slightly moved weights the search found another value. A smaller "
            "ρ may help."
        )
    if result.missing:
        yield f"**Not all weights were trained**: the checkpoint lacks {result.missing}, which are random numbers."
    if result.skipped:
        count = result.skipped + len(result.per_batch)
        yield f"{result.skipped} of {count} batches were left out, because their loss is not finite."
    if str(result.data.get("split") or "train").split("[")[0] != "train":
        yield f"It is of the split {plain(result.data['split'])}; sharpness is a property of the training loss."
