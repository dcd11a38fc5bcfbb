"""The command that takes a score again, from the record of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_geosharp.cards import entry

if TYPE_CHECKING:
    from hf_geosharp.sharpness.result import SharpnessResult

_COLUMNS = ("text", "text_pair", "image", "label")


@dataclass(frozen=True)
class Recipe:
    """How to take a score again: the command line, or None where it was taken from Python; and what else to say."""

    line: str | None
    note: str

    def markdown(self) -> str:
        """For a card."""
        return "\n\n".join(text for text in (self.line and f"```console\n$ {self.line}\n```", self.note) if text)


def recipe(result: SharpnessResult, model: str) -> Recipe:
    """How to take the score again, with ``model`` where the result does not name one for all.

    All settings are spelled out, so that defaults of another version do not matter. Of local paths only the last part
    is told.
    """
    if not result.data.get("id") or not result.model.get("id"):
        return Recipe(
            None, "It was taken from Python, on data and with a model of the caller's, by `hf_geosharp.score`."
        )
    if result.model.get("step") is not None:
        step = result.model["step"]
        return Recipe(None, f"It was taken in training, at step {step}, by `hf_geosharp.GeodesicSharpnessCallback`.")
    line = shlex.join(["hf-geosharp", "score", _model(result.model, model), *_options(result)])
    notes = []
    if result.data.get("labels") == "label map":
        notes.append("A map of labels (`--label-map`) was given as well.")
    if result.model.get("layouts"):
        notes.append("Layouts of attention modules (`--layout`) were given as well.")
    if result.damping:
        notes.append(f"It was taken from Python, with `damping={result.damping:g}`.")
    return Recipe(line, " ".join(notes))


def _model(identity: Mapping[str, Any], model: str) -> str:
    if entry.on_hub(identity) or str(identity["id"]).startswith("demo:"):
        return entry.public_name(identity)
    return model if "/" in model else f"./{model}"


def _options(result: SharpnessResult) -> Iterator[str]:
    data, demo = result.data, str(result.data["id"]).startswith("demo:")
    if data["id"] != "shipped text" and not demo:
        name = entry.public_name(data)
        yield from ("--data", name if entry.on_hub(data) else f"./{name}")
    for option, value in (("--data-config", data.get("config")), ("--split", data.get("split"))):
        if value:
            yield from (option, str(value))
    if result.model.get("task"):
        yield from ("--task", str(result.model["task"]))
    columns = data.get("columns")
    for role, column in (columns if isinstance(columns, Mapping) else {}).items():
        if role in _COLUMNS:
            yield from (f"--{role.replace('_', '-')}-column", str(column))
    if data.get("max_length_chosen"):
        yield from ("--max-length", str(data["max_length"]))
    yield from _measure(result)
    if entry.on_hub(result.model):
        yield from ("--revision", str(result.model["revision"]))


def _measure(result: SharpnessResult) -> Iterator[str]:
    yield from ("--metric", result.metric, "--geodesic", result.geodesic)
    # There are none to choose for a metric that has none.
    if result.symmetries != "none":
        yield from ("--symmetries", result.symmetries)
    # The first radius is the score.
    for rho in (result.rho, *(point.rho for point in result.curve if point.rho != result.rho)):
        yield from ("--rho", f"{rho:g}" if float(f"{rho:g}") == rho else repr(rho))
    # Those of batches that were skipped are drawn as well.
    samples = result.samples + result.skipped * result.batch_size
    yield from ("--samples", str(samples), "--batch-size", str(result.batch_size))
    yield from ("--steps", str(result.steps), "--seed", str(result.seed))
    if result.mode == "average":
        yield "--average"
    else:
        yield from ("--ascent", result.ascent)
    if result.starts > 1:
        yield from ("--starts", str(result.starts))
    if result.params != "all":
        yield from ("--params", result.params)
    if "adaptive" in result.baselines:
        yield "--baselines"
    if result.data.get("labels") == "model":
        yield from ("--labels", "model")
    if result.model.get("dtype") in ("float32", "float64"):
        yield from ("--dtype", str(result.model["dtype"]))
    if result.skipped:
        yield from ("--on-nan", "skip")
    if result.missing:
        yield "--allow-missing"
    for by in dict.fromkeys(part.by for part in result.per):
        yield from ("--per", by)
    if result.profile is not None:
        yield "--profile"
