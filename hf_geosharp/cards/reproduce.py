"""The command that takes a score again, from the record of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hf_geosharp.cards import entry

if TYPE_CHECKING:
    from hf_geosharp.sharpness.result import SharpnessResult

_COLUMNS = ("text", "text_pair", "image", "label")


def command(result: SharpnessResult, model: str) -> str:
    """Markdown that says how to take the score again; where a command line cannot, that it was taken from Python.

    All settings are spelled out, so that defaults of another version do not matter. Of local paths only the last part
    is told.
    """
    if not result.data.get("id") or not result.model.get("id"):
        return "It was taken from Python, on data and with a model of the caller's, by `hf_geosharp.score`."
    line = shlex.join(["hf-geosharp", "score", _model(result.model, model), *_options(result)])
    note = ""
    if result.data.get("labels") == "label map":
        note = "\n\nA map of labels (`--label-map`) was given as well."
    return f"```console\n$ {line}\n```{note}"


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
    yield from _measure(result)
    if entry.on_hub(result.model):
        yield from ("--revision", str(result.model["revision"]))


def _measure(result: SharpnessResult) -> Iterator[str]:
    yield from ("--metric", result.metric, "--geodesic", result.geodesic, "--symmetries", result.symmetries)
    # The first radius is the score.
    for rho in (result.rho, *(point.rho for point in result.curve if point.rho != result.rho)):
        yield from ("--rho", f"{rho:g}" if float(f"{rho:g}") == rho else repr(rho))
    yield from ("--samples", str(result.samples), "--batch-size", str(result.batch_size))
    yield from ("--steps", str(result.steps), "--seed", str(result.seed))
    if result.mode == "average":
        yield "--average"
    elif result.ascent != "secant":  # the default
        yield from ("--ascent", result.ascent)
    if result.params != "all":
        yield from ("--params", result.params)
    if "adaptive" in result.baselines:
        yield "--baselines"
    if result.data.get("labels") == "model":
        yield from ("--labels", "model")
    if result.model.get("dtype") in ("float32", "float64"):
        yield from ("--dtype", str(result.model["dtype"]))
