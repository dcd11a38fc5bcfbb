"""The record of one score in a card's metadata: what the Hub reads from ``model-index``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from hf_geosharp.arguments import check_kind
from hf_geosharp.errors import CardError
from hf_geosharp.sharpness.choices import METRICS
from hf_geosharp.sharpness.result import SharpnessResult
from hf_geosharp.tasks.kinds import TASKS

if TYPE_CHECKING:
    from hf_geosharp.sharpness.result import CurvePoint

SOURCE = {"name": "hf-geosharp", "url": "https://arxiv.org/abs/2505.05409"}

METRIC_TYPES = {metric.name: metric.type for metric in METRICS.values()}
"""The metric's name in a card; what was measured without symmetries is not called geodesic."""

TITLES = {metric.type: metric.title for metric in METRICS.values()}

# What the Hub calls these tasks; the others have the same name there.
_HUB_TASKS = {"seq2seq-lm": "text2text-generation", "masked-lm": "fill-mask", "causal-lm": "text-generation"}

# What stands for a data set that is not on the Hub: the names that Trainer writes for them.
_FILE_TYPES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".arrow": "arrow",
}
_DIGITS = 6


def plain(result: SharpnessResult) -> SharpnessResult:
    """The score with plain numbers only, whatever scalars of numpy or torch it was made with.

    Raises:
        CardError: a number is missing, NaN or infinite, or of a type that is no number; a setting is no text.
    """
    check_kind("result", result, SharpnessResult, "a SharpnessResult, which score returns")
    texts = {
        name: _text(getattr(result, name), name)
        for name in ("metric", "geodesic", "symmetries", "params", "mode", "ascent")
    }
    counts = {name: whole(getattr(result, name), name) for name in ("steps", "starts", "samples", "batch_size", "seed")}
    names = ("geodesic_sharpness", "base_loss", "rho", "damping")
    numbers = {name: finite(getattr(result, name), name) for name in names}
    if result.lost:
        raise CardError(
            f"the score is not a measurement: in {result.lost} of {len(result.per_batch)} batches no finite loss was "
            "found; take it at a smaller radius"
        )
    if texts["metric"] not in METRIC_TYPES:
        raise CardError(f"the result's metric is {result.metric!r}; a card can hold {', '.join(METRIC_TYPES)}")
    return dataclasses.replace(
        result,
        **texts,  # type: ignore[arg-type]
        **counts,  # type: ignore[arg-type]
        **numbers,  # type: ignore[arg-type]
        stderr=None if result.stderr is None else finite(result.stderr, "stderr"),
        interval95=_interval(result.interval95),
        baselines={name: finite(value, f"baseline {name}") for name, value in result.baselines.items()},
        curve=[_plain_point(point) for point in result.curve],
    )


def entry(result: SharpnessResult) -> dict[str, Any]:
    """The item of ``model-index[].results`` that records a score.

    The value has six digits; the settings that two scores must share to compare are in ``metrics[].args``. Nothing in
    it depends on when, where or with which version it was taken, so that it is replaced rather than repeated.

    Args:
        result: The score, as :func:`plain` leaves it.
    """
    kind = METRIC_TYPES[result.metric]
    args: dict[str, Any] = {
        "metric": result.metric,
        "rho": result.rho,
        "geodesic": result.geodesic,
        "symmetries": result.symmetries,
        "params": result.params,
        "case": result.mode,
        "ascent": result.ascent,
        "steps": result.steps,
        "samples": result.samples,
        "batch_size": result.batch_size,
        "seed": result.seed,
    }
    if result.starts > 1:
        args["starts"] = result.starts
    if columns := _unusual(result):
        args["columns"] = columns
    if result.data.get("max_length_chosen"):
        args["max_length"] = result.data["max_length"]
    if result.model.get("dtype") == "float64":
        args["dtype"] = "float64"
    if result.data.get("labels") == "model":
        args["labels"] = "model"
    if result.data.get("loss") is not None:
        args["loss"] = result.data["loss"]
    if result.model.get("layouts"):
        named = ", ".join(map(str, result.model["layouts"]))
        args["layouts"] = " ".join([named, *filter(None, [result.model.get("layouts_digest")])])
    if result.damping:
        args["damping"] = result.damping
    metric = {
        "type": kind,
        "value": _rounded(result.geodesic_sharpness),
        "name": f"{TITLES[kind]} ({result.metric}, rho {result.rho:g})",
        "args": args,
    }
    return {"task": _task(result.model), "dataset": _dataset(result.data), "metrics": [metric], "source": dict(SOURCE)}


def key(item: Mapping[str, Any], metric: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells the score of one setting from another: the same key, the same place in the card."""
    task, data = _mapping(item.get("task")), _mapping(item.get("dataset"))
    args = _mapping(metric.get("args"))
    where = tuple(data.get(part) for part in ("type", "name", "config", "split", "revision"))
    return (metric.get("type"), task.get("type"), where, tuple(sorted((str(k), str(v)) for k, v in args.items())))


def is_ours(metric: Any) -> bool:
    """Whether a metric of a card was written by this package: by its type, and the settings in its ``args``."""
    if not isinstance(metric, Mapping) or metric.get("type") not in TITLES:
        return False
    args = metric.get("args")
    return isinstance(args, Mapping) and {"metric", "rho"} <= set(args)


def finite(number: Any, name: str) -> float:
    """A plain float from whatever holds one number.

    Raises:
        CardError: it holds none, or one that is NaN or infinite.
    """
    try:
        # Arrays and tensors of one element are numbers, too.
        held = number.item() if hasattr(number, "item") else number
        value = math.nan if isinstance(held, (str, bytes)) else float(held)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise CardError(f"the result's {name} is {number!r}, which is not a finite number: nothing was written")
    return value


def whole(number: Any, name: str) -> int:
    """A plain int from whatever holds one whole number.

    Raises:
        CardError: it holds something else.
    """
    value = finite(number, name)
    if value != int(value):
        raise CardError(f"the result's {name} is {number!r}, which is not a whole number: nothing was written")
    return int(value)


def on_hub(identity: Mapping[str, Any]) -> bool:
    """Whether a model or data set came from the Hub: then a commit of it was recorded."""
    return bool(identity.get("revision")) and bool(identity.get("id"))


def public_name(identity: Mapping[str, Any]) -> str:
    """The name to publish: an id as it is; of a path only the last part, for folders are nobody's business."""
    name = " ".join(str(identity.get("id") or "").split())
    if on_hub(identity) or name.startswith("demo:"):
        return name
    # Both kinds of paths, for the result may come from another machine.
    return PureWindowsPath(PurePosixPath(name).name).name


def _plain_point(point: CurvePoint) -> CurvePoint:
    return dataclasses.replace(
        point,
        rho=finite(point.rho, "curve"),
        geodesic_sharpness=finite(point.geodesic_sharpness, "curve"),
        stderr=None if point.stderr is None else finite(point.stderr, "curve"),
        interval95=_interval(point.interval95),
    )


def _interval(bounds: Any) -> tuple[float, float] | None:
    if bounds is None:
        return None
    low, high = bounds
    return finite(low, "interval95"), finite(high, "interval95")


def _task(model: Mapping[str, Any]) -> dict[str, str]:
    name = str(model.get("task") or "other")
    return {"type": _HUB_TASKS.get(name, name)}


def _dataset(data: Mapping[str, Any]) -> dict[str, str]:
    name = public_name(data)
    kind = name if on_hub(data) else _file_type(name)
    described = {"name": name or "custom data", "type": kind}
    # All of them must be strings where they are given at all.
    for part in ("config", "split", "revision"):
        if data.get(part):
            described[part] = " ".join(str(data[part]).split())
    return described


def _unusual(result: SharpnessResult) -> str:
    """The columns that were read by other names than the usual ones, by role; of another text it is another score."""
    columns, name = result.data.get("columns"), result.model.get("task")
    task = next((task for task in TASKS if task.name == name), None)
    if task is None or not isinstance(columns, Mapping):
        return ""
    usual = {name for names in task.inputs for name in names} | set(task.labels)
    return ", ".join(f"{role} {_text(column, 'columns')}" for role, column in columns.items() if column not in usual)


def _file_type(name: str) -> str:
    if name == "shipped text" or name.startswith("demo:"):
        return "parquet"
    suffix = re.search(r"\.[a-z]+$", name.lower())
    return _FILE_TYPES.get(suffix[0], "custom") if suffix else "custom"


def _rounded(number: float) -> float:
    """To as many digits as the table shows: those beyond differ between machines."""
    return float(f"{number:.{_DIGITS}g}")


def _text(text: Any, name: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise CardError(f"the result's {name} is {text!r}, which is not a text: nothing was written")
    return " ".join(text.split())


def _mapping(item: Any) -> Mapping[str, Any]:
    return item if isinstance(item, Mapping) else {}
