"""What a score costs beside other measures of the same models: the published baseline, and tools for curvature.

    python -m benchmarks.peers [--quick]

All on one batch of a demo, in float32, with the attention that can be differentiated twice ("eager"), for that is what
the tools need. Every run is timed between two runs of one plain forward and backward pass, in one process and in a
different order each repeat; costs are in such passes. A tool that is not installed is left out, and that is told.

They do not compute the same thing. The published baseline and our adaptive metric do; an eigenvalue or a trace of the
Hessian is what others use to call a model sharp.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from benchmarks import baseline, subjects
from benchmarks.alone import alone
from benchmarks.clock import Job, Sample, paired, ratios, spread
from benchmarks.subjects import Batch
from hf_geosharp.sharpness.estimate import estimate
from hf_geosharp.sharpness.objective import Objective
from hf_geosharp.sharpness.settings import Settings

DEMOS = {"digits-vit": "pixel_values", "vader-bert": "input_ids"}
SAMPLES = 128
RHO = 0.1
STEPS = 20
REPEATS = 5

Row = dict[str, Any]


class Logits(nn.Module):
    """A model that takes its main input alone and returns logits: what the tools expect."""

    def __init__(self, model: nn.Module, batch: Batch, main: str) -> None:
        super().__init__()
        self.model, self.main = model, main
        self.rest = {name: value for name, value in batch.items() if name not in (main, "labels")}

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(**{self.main: x}, **self.rest).logits
        return logits


# ------------------------------------------------------------------------------------------------------------ tools


def pyhessian_eigenvalue(logits: Logits, batch: Batch) -> Any:
    """By power iteration to a relative 1e-3, its default."""
    return _pyhessian(logits, batch).eigenvalues()[0][0]


def pyhessian_trace(logits: Logits, batch: Batch) -> Any:
    """By Hutchinson's method, until the mean moves by less than a relative 1e-3, its default."""
    values = _pyhessian(logits, batch).trace()
    return sum(values) / len(values)


def _pyhessian(logits: Logits, batch: Batch) -> Any:
    from pyhessian import hessian

    logits.zero_grad()
    pair = (batch[logits.main], batch["labels"])
    # It differentiates .grad, which torch warns of.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hessian(logits, nn.CrossEntropyLoss(), data=pair, cuda=False)


def eigenthings_eigenvalue(logits: Logits, batch: Batch) -> Any:
    """By power iteration with its default tolerance (Lanczos with its default of 2 steps does not converge)."""
    from hessian_eigenthings import HessianOperator, deflated_power_iteration

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch[logits.main]), batch["labels"])

    result = deflated_power_iteration(HessianOperator(logits, [batch], loss), k=1)
    return float(result.eigenvalues[0])


def curvlinops_eigenvalue(logits: Logits, batch: Batch) -> Any:
    """By scipy's eigsh to a relative 1e-3, as in its documentation."""
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import eigsh

    data = [(batch[logits.main], batch["labels"])]
    operator = HessianLinearOperator(logits, nn.CrossEntropyLoss(), list(logits.parameters()), data)
    return float(eigsh(operator.to_scipy(), k=1, which="LM", tol=1e-3, return_eigenvectors=False)[0])


@dataclass(frozen=True)
class Tool:
    """A measure of another library; slow ones run in every ``every``-th repeat."""

    name: str
    module: str
    package: str
    run: Callable[[Logits, Batch], Any]
    every: int = 1


TOOLS = (
    Tool("PyHessian, top eigenvalue", "pyhessian", "PyHessian", pyhessian_eigenvalue),
    Tool("PyHessian, trace", "pyhessian", "PyHessian", pyhessian_trace, 3),
    Tool("hessian-eigenthings, top eigenvalue", "hessian_eigenthings", "hessian-eigenthings", eigenthings_eigenvalue),
    Tool("curvlinops, top eigenvalue", "curvlinops", "curvlinops-for-pytorch", curvlinops_eigenvalue, 3),
)


def missing(tools: Sequence[Tool] = TOOLS) -> dict[str, str]:
    """Package -> why it cannot be used here."""
    found = {}
    for tool in tools:
        try:
            importlib.import_module(tool.module)
        except ImportError as error:
            found[tool.package] = str(error)
    return found


# ------------------------------------------------------------------------------------------------------------- ours

BASELINE = "published baseline, adaptive"
DEFAULT = "hf-geosharp, inv, default, with its evidence"


def ours(model: nn.Module, batch: Batch) -> list[Job]:
    """Our scores: the ascents alone, and one as it comes by default, with its evidence."""

    def score(**how: Any) -> Any:
        return estimate(model, [batch], Settings(rho=(RHO,), steps=STEPS, **how))

    jobs = []
    for metric in ("adaptive", "inv"):
        for ascent in ("secant", "apgd"):
            how = {"metric": metric, "ascent": ascent, "reproducibility": False, "verify": False}
            jobs.append(Job(f"hf-geosharp, {metric}, {ascent}", lambda how=how: score(**how)))
    return [*jobs, Job(DEFAULT, score)]


# -------------------------------------------------------------------------------------------------------------- run


def measure_demo(demo: str, repeats: int = REPEATS, samples: int = SAMPLES) -> tuple[list[Row], list[Row]]:
    """Costs and values of every measure, and how much longer the baseline takes than our own of the same thing."""
    model, (batch,) = subjects.demo(demo, samples, attention="eager")
    logits = Logits(model, batch, DEMOS[demo])
    jobs = [Job(BASELINE, lambda: baseline.worst_case(model, batch, RHO, STEPS)), *ours(model, batch)]
    absent = missing()
    tools = [tool for tool in TOOLS if tool.package not in absent]
    jobs += [Job(tool.name, lambda tool=tool: _tried(tool, logits, batch), tool.every) for tool in tools]
    unit = Objective(model, batch)
    found = paired(lambda: unit.evaluate(True), jobs, repeats)
    default = found[DEFAULT]
    rows = [
        {"model": demo, "measure": name, "units": spread([s.units for s in samples]),
         "times_ours": spread(ratios(samples, default)),
         **_answer(samples)}
        for name, samples in found.items()
        if samples[-1].value is not None
    ]  # fmt: skip
    return rows, [_against(demo, name, found[name], found[BASELINE]) for name in found if ", adaptive, " in name]


def _tried(tool: Tool, logits: Logits, batch: Batch) -> Any:
    """Its answer; None, and that is told, where another version of it or of torch makes it fail."""
    try:
        return tool.run(logits, batch)
    except Exception as error:
        print(f"  {tool.name} failed: {type(error).__name__}: {error}", flush=True)
        return None


def _answer(samples: Sequence[Sample]) -> Row:
    """What a measure returned last, and its passes where they are known."""
    value = samples[-1].value
    if isinstance(value, baseline.Found):
        return {"value": value.rise, "forwards": value.forwards, "backwards": value.backwards}
    if hasattr(value, "geodesic_sharpness"):
        passes = value.passes
        return {"value": value.geodesic_sharpness, "forwards": passes.forwards, "backwards": passes.backwards}
    return {"value": float(value)}


def _against(demo: str, name: str, own: Sequence[Sample], theirs: Sequence[Sample]) -> Row:
    return {
        "model": demo, "measure": name,
        "speedup": spread(ratios(theirs, own)),
        "value_ratio": own[-1].value.geodesic_sharpness / theirs[-1].value.rise,
    }  # fmt: skip


def measure(quick: bool = False) -> dict[str, Any]:
    rows: list[Row] = []
    same: list[Row] = []
    for demo in list(DEMOS)[:1] if quick else DEMOS:
        found = measure_demo(demo, *((1, 8) if quick else ()))
        rows, same = rows + found[0], same + found[1]
        for row in found[0]:
            print(f"  {demo}: {row['measure']:45} {row['units']['median']:7.1f} passes  {row['value']:.6g}", flush=True)
    absent = missing()
    for package, why in absent.items():
        print(f"  {package} is left out: {why}")
    answered = {row["measure"] for row in rows}
    packages = {tool.package for tool in TOOLS if tool.name in answered}
    return {
        "settings": {"samples": 8 if quick else SAMPLES, "rho": RHO, "steps": STEPS},
        "rows": rows,
        "baseline": same,
        "left_out": [tool.name for tool in TOOLS if tool.name not in answered],
        "versions": {package: importlib.metadata.version(package) for package in sorted(packages)},
    }


if __name__ == "__main__":
    alone(measure, __doc__, "one repeat on one model, to see that it runs")
