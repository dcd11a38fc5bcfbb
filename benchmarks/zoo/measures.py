"""What is measured of a model of a zoo: sharpness on a grid of settings, and the figures it is compared with."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import time
import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.make_demos import Split, take
from benchmarks.orbit import gradient_norm, weight_norm
from benchmarks.zoo.variants import USUAL, VARIANTS
from hf_geosharp import score
from hf_geosharp.errors import UsageError

BATCHES, BATCH_SIZE = 1, 128
"""The first training samples, the same of every model; each with the label it was trained on."""

STEPS, DRAWS = 20, 10
DAMPING = 0.1
"""Where it is varied."""

EXACT = 3
"""Radii of exact geodesics of mix: in larger balls many end, or take long to integrate."""

HESSIAN_DRAWS = 10
"""Random vectors of the trace."""

_OF_IMAGES = {
    "euclidean": (0.01, 0.03, 0.1, 0.3, 1.0),
    "adaptive": (0.03, 0.1, 0.3, 1.0, 3.0),
    "inv": (0.01, 0.03, 0.1, 0.3, 1.0),
    "mix": (0.003, 0.01, 0.03, 0.1, 0.3),
}
_OF_TEXTS = {
    "euclidean": (0.01, 0.03, 0.1, 0.3, 1.0),
    "adaptive": (0.1, 0.3, 1.0, 3.0, 10.0),
    "inv": (0.03, 0.1, 0.3, 1.0, 3.0),
    "mix": (0.03, 0.1, 0.3, 1.0, 3.0),
}
RADII: dict[str, dict[str, tuple[float, ...]]] = {
    "image": _OF_IMAGES,
    "text": _OF_TEXTS,
    "finetune": _OF_TEXTS,
    "finetune-image": _OF_IMAGES,
}
"""Of each zoo and metric: from where the loss is a slope to where it saturates."""

WIDER = {"image": 1, "text": 30, "finetune": 30, "finetune-image": 30}
"""Times these are the radii of the average case, whose rise is that much smaller."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A setting of the score, at all radii of its metric in a zoo (:meth:`at`)."""

    metric: str
    order: str = "first"
    preset: str = "full"
    mode: str = "worst"
    steps: int = STEPS
    batches: int = BATCHES
    batch_size: int = BATCH_SIZE
    damping: float = 0.0
    variant: str = USUAL
    radii: tuple[float, ...] = ()

    @property
    def how(self) -> dict[str, Any]:
        """All of it, as it is kept beside what was measured."""
        own = {**vars(self), "radii": list(self.radii)}
        if not self.damping and self.variant == USUAL:
            del own["damping"], own["variant"]
        return {**own, "steps": DRAWS} if self.mode == "average" else own

    def at(self, zoo: str) -> Cell:
        """At the radii of a zoo."""
        wider = WIDER[zoo] if self.mode == "average" else 1
        radii = RADII[zoo][self.metric]
        if (self.metric, self.order) == ("mix", "exact"):
            radii = radii[:EXACT]
        return replace(self, radii=tuple(float(f"{wider * rho:g}") for rho in radii))

    @property
    def usual(self) -> Cell:
        """The cell of the grid that it varies."""
        return Cell(self.metric, "second", mode=self.mode)

    @property
    def name(self) -> str:
        """As in tables; what is as usual is not named."""
        words = [self.metric]
        words += [self.order] if self.metric in PAIRED else []
        words += [self.preset] if self.preset != "full" else []
        words += ["average"] if self.mode == "average" else []
        words += [f"{self.steps} steps"] if self.steps != STEPS and self.mode == "worst" else []
        words += (
            [f"{self.batches} x {self.batch_size}"] if (self.batches, self.batch_size) != (BATCHES, BATCH_SIZE) else []
        )
        words += [f"damping {self.damping:g}"] if self.damping and self.variant == USUAL else []
        words += [self.variant + (f" {self.damping:g}" if self.damping else "")] if self.variant != USUAL else []
        return " ".join(words)


PAIRED = ("inv", "mix")
PLAIN = ("euclidean", "adaptive")
GRID = (
    *(Cell(metric) for metric in PLAIN),
    *(Cell(m, order, preset=p) for p in ("full", "paper") for m in PAIRED for order in ("second", "first", "exact")),
    *(Cell(metric, mode="average") for metric in PLAIN),
    *(Cell(metric, "second", mode="average") for metric in PAIRED),
)
"""Of every model of the image zoos; of texts the preset ``paper`` at second order alone."""

ABLATIONS = (
    *(Cell(metric, "second", preset="attention") for metric in PAIRED),
    *(Cell(metric, "second", mode=mode, variant="no projection") for metric in PAIRED for mode in ("worst", "average")),
    *(Cell(metric, "second", damping=DAMPING, variant=v) for metric in PAIRED for v in (USUAL, "damped as stored")),
    *(Cell(metric, "second", steps=steps) for metric in PAIRED for steps in (5, 60)),
    *(Cell(metric, "second", batches=b, batch_size=m) for metric in PAIRED for b, m in ((4, 32), (4, 128), (1, 512))),
)
"""Of some."""


def grid(zoo: str) -> tuple[Cell, ...]:
    """What is measured of every model of a zoo."""
    return tuple(cell.at(zoo) for cell in GRID if "image" in zoo or cell.preset == "full" or cell.order == "second")


def sharpness(model: nn.Module, split: Split, cell: Cell) -> list[float | None]:
    """The score at each radius; None from the radius on at which the geodesics end inside the ball.

    All radii are taken in one call.
    """
    batches = [
        take(split, rows) for rows in torch.arange(cell.batches * cell.batch_size).split(cell.batch_size)
    ]  # fmt: skip
    radii = list(cell.radii)
    while radii:
        try:
            with warnings.catch_warnings(), VARIANTS[cell.variant]():
                warnings.simplefilter("ignore")
                result = score(
                    model, batches, metric=cell.metric, geodesic=cell.order, symmetries=cell.preset, rho=radii,
                    ascent="secant", steps=cell.how["steps"], average=cell.mode == "average", damping=cell.damping,
                    reproducibility=False, verify=False,
                )  # fmt: skip
        except UsageError:
            radii.pop()
            continue
        found = {point.rho: point.geodesic_sharpness for point in result.curve}
        return [_short(found[rho]) if rho in found else None for rho in cell.radii]
    return [None] * len(cell.radii)


# -------------------------------------------------------------------------------------------------- other figures


def others(model: nn.Module, split: Split) -> dict[str, float]:
    """What users look at instead."""
    samples = take(split, torch.arange(BATCHES * BATCH_SIZE))
    top, trace = hessian(model, samples)
    found = {
        "weight norm": weight_norm(model),
        "gradient norm": gradient_norm(model, samples),
        "margin": margin(model, split),
        "top Hessian eigenvalue": top,
        "Hessian trace": trace,
        **spectral(model),
    }
    return {name: _short(value) for name, value in found.items()}


@torch.no_grad()
def margin(model: nn.Module, split: Split) -> float:
    """The 10 % quantile over the training samples of the label's logit less the largest other."""
    found = []
    for rows in torch.arange(len(split["labels"])).split(256):
        batch = take(split, rows)
        labels = batch.pop("labels")[:, None]
        logits = model(**batch).logits
        own = logits.gather(1, labels).squeeze(1)
        found.append(own - logits.scatter(1, labels, -math.inf).max(1).values)
    return float(torch.cat(found).quantile(0.1))


def hessian(model: nn.Module, batch: Split) -> tuple[float, float]:
    """Top eigenvalue and trace of the Hessian of the mean loss, by curvlinops."""
    import numpy as np
    from curvlinops import HessianLinearOperator, hutchinson_trace
    from scipy.sparse.linalg import eigsh

    inputs = UserDict({name: values for name, values in batch.items() if name != "labels"})

    def logits(given: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = model(**given).logits
        return found

    def count(given: Mapping[str, Tensor]) -> int:
        return len(next(iter(given.values())))

    torch.manual_seed(0)
    operator = HessianLinearOperator(
        _Called(model, logits), nn.CrossEntropyLoss(), [p for p in model.parameters() if p.requires_grad],
        [(inputs, batch["labels"])], check_deterministic=False, batch_size_fn=count,
    )  # fmt: skip
    start = np.random.default_rng(0).standard_normal(operator.shape[0]).astype(np.float32)
    top = eigsh(operator.to_scipy(), k=1, ncv=10, which="LA", tol=1e-2, v0=start, return_eigenvectors=False)
    trace = hutchinson_trace(operator, HESSIAN_DRAWS)
    return float(top[0]), float(trace)


class _Called(nn.Module):
    """A model whose outputs are another function of its inputs."""

    def __init__(self, model: nn.Module, function: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, given: Any) -> Tensor:
        return self.function(given)


def spectral(model: nn.Module) -> dict[str, float]:
    """What WeightWatcher says of the weight matrices, means over them."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import weightwatcher

        logging.getLogger("weightwatcher").setLevel(logging.ERROR)
        watcher = weightwatcher.WeightWatcher(model=model)
        summary = watcher.get_summary(watcher.analyze(min_evals=8))
    return {
        "WeightWatcher alpha": float(summary["alpha"]),
        "WeightWatcher log spectral norm": float(summary["log_spectral_norm"]),
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


# ------------------------------------------------------------------------------------------------------------- run


class Journal:
    """One line of JSON for each model and thing measured; a run that was stopped goes on after the last whole one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[tuple[int, str], Row] = {}
        if path.exists():
            whole = [line for line in path.read_text().split("\n")[:-1] if line]
            for row in map(json.loads, whole):
                self.rows[row["index"], row["name"]] = row
            path.write_text("".join(line + "\n" for line in whole))

    def once(self, index: int, name: str, how: Mapping[str, Any], measured: Callable[[], Any]) -> None:
        """Measures unless it is known, measured in this way."""
        known = self.rows.get((index, name))
        if known is not None and known["how"] == how:
            return
        started = time.process_time()
        found = measured()
        seconds = round(time.process_time() - started, 2)
        row = {"index": index, "name": name, "how": dict(how), "found": found, "seconds": seconds}
        self.rows[index, name] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def measure(
    journal: Journal, indices: Iterable[int], read: Callable[[int], tuple[nn.Module, Split]], cells: Sequence[Cell]
) -> None:
    """All cells and the other figures of the models with these numbers."""
    for index in indices:
        model, split = read(index)
        how = {"samples": BATCHES * BATCH_SIZE, "draws": HESSIAN_DRAWS}
        journal.once(index, "others", how, partial(others, model, split))
        for cell in cells:
            journal.once(index, cell.name, cell.how, partial(sharpness, model, split, cell))
