"""Along the orbit: every measure on the demos, moved by group elements of growing scale and of growing condition.

    python benchmarks/orbit.py [--samples 24] [--json benchmarks/data/orbit.json] [--plot benchmarks/orbit.svg]
                               [--page benchmarks/ORBIT.md]

Every query/key and value/output pair (G, H) of a demo goes to (G A⁻¹, H Aᵀ) with A = c U D V: U and V are random
rotations of each head, D is diagonal with logarithmically spaced entries from κ^-½ to κ^½. The scale c and the
condition κ vary, one at a time. The function stays; at c = κ = 1 so does every length. Each measure is divided by its
value on the model as it ships. Everything is in float64, on one batch of training samples.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp import demos, score
from hf_geosharp.scoring import load_pretrained
from hf_geosharp.symmetry.find import find_symmetries
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.tasks.prepare import prepare

DEMOS = ("digits-vit", "vader-bert")
SCALES = (0.01, 0.1, 1.0, 10.0, 100.0)
CONDITIONS = (1.0, 10.0, 100.0, 1000.0)
MOVES = (*((c, 1.0) for c in SCALES), *((1.0, k) for k in CONDITIONS[1:]))
"""Scale and condition of each element."""

SEED = 20250509
ITERATIONS = 100
"""Of the power iteration."""

DIGITS = 9
"""That are stored: what another run agrees in."""

SHARPNESS = {
    "geodesic, inv": "inv", "geodesic, mix": "mix", "adaptive": "adaptive", "Euclidean": "euclidean",
}  # fmt: skip
PLAIN = ("top Hessian eigenvalue", "gradient norm", "weight norm")
MEASURES = (*SHARPNESS, *PLAIN)
INVARIANT = tuple(name for name in SHARPNESS if name.startswith("geodesic"))
COLOURS = {
    "geodesic, inv": "#1f77b4", "geodesic, mix": "#17a2b8", "adaptive": "#c0504d", "Euclidean": "#e39c37",
    "top Hessian eigenvalue": "#8064a2", "gradient norm": "#9bbb59", "weight norm": "#7f7f7f",
}  # fmt: skip

Batch = Mapping[str, Any]
Row = dict[str, Any]


def moved(model: nn.Module, scale: float, condition: float = 1.0, seed: int = SEED) -> None:
    """Moves all pairs of a model by ``scale`` times a random element of that condition each, in place."""
    pairs = SymmetryMap(find_symmetries(model).pairs)
    element = pairs.random_element(model, seed, condition)
    for move in element.moves.values():
        assert isinstance(move, dict)
        move["a"] = scale * move["a"]
    pairs.apply(model, element)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def gradient_norm(model: nn.Module, batch: Batch) -> float:
    """‖∇L‖ in all parameters."""
    gradients = torch.autograd.grad(mean_loss(model, batch), list(model.parameters()), allow_unused=True)
    return float(torch.stack([g.square().sum() for g in gradients if g is not None]).sum().sqrt())


def weight_norm(model: nn.Module) -> float:
    """‖θ‖ of all parameters."""
    return float(torch.stack([p.detach().square().sum() for p in model.parameters()]).sum().sqrt())


def top_eigenvalue(model: nn.Module, batch: Batch, iterations: int = ITERATIONS) -> tuple[float, float]:
    """The eigenvalue of the Hessian that is largest in modulus, by power iteration, and its relative residual.

    The model's attention has to be differentiable twice.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(mean_loss(model, batch), parameters, create_graph=True, allow_unused=True)
    used = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    flat = torch.cat([g.reshape(-1) for _, g in used])
    x = torch.randn(len(flat), generator=torch.Generator().manual_seed(SEED), dtype=flat.dtype)
    value = residual = 0.0
    for _ in range(iterations):
        x = x / x.norm()
        product = torch.autograd.grad(flat, [p for p, _ in used], x, retain_graph=True, materialize_grads=True)
        y = torch.cat([h.reshape(-1) for h in product])
        value = float(x @ y)
        residual = float((y - value * x).norm() / abs(value))
        x = y
    return value, residual


def measure(samples: int, names: Sequence[str] = DEMOS) -> list[Row]:
    """One row for each demo and scale: every measure, and by how much the outputs moved."""
    rows = []
    for demo in names:
        outputs = None
        for move in (None, *MOVES):
            loaded = load_pretrained(f"demo:{demo}", dtype="float64")
            model = loaded.model
            data = str(demos.path(demo) / "data")
            batch = prepare(loaded, data=data, samples=samples, batch_size=samples).batches[0]
            if move is not None:
                moved(model, *move)
            with torch.no_grad():
                logits = model(**batch).logits
            outputs = logits if outputs is None else outputs
            row: Row = {"demo": demo, "move": move, "outputs": float((logits - outputs).abs().max())}
            for title, metric in SHARPNESS.items():
                result = score(model, [batch], metric=metric, reproducibility=False)
                row[title] = result.geodesic_sharpness
                row.setdefault("rho", {})[title] = result.rho
            # The only one that is differentiable twice; its softmax is in float32, so it is for this measure alone.
            model.set_attn_implementation("eager")
            row["top Hessian eigenvalue"], row["residual"] = top_eigenvalue(model, batch)
            row["gradient norm"], row["weight norm"] = gradient_norm(model, batch), weight_norm(model)
            rows.append(row)
            print(demo, move, {name: f"{row[name]:.6g}" for name in MEASURES}, flush=True)
    return rows


def ratios(rows: list[Row]) -> list[Row]:
    """The measures at each element over those of the model as it ships."""
    out = []
    for demo in DEMOS:
        base, *others = (r for r in rows if r["demo"] == demo)
        out += [{"demo": demo, "move": tuple(r["move"]), **{m: abs(r[m] / base[m]) for m in MEASURES}} for r in others]
    return out


def stored(rows: list[Row]) -> list[Row]:
    """The rows with fewer digits."""

    def short(x: Any) -> Any:
        return float(f"{x:.{DIGITS}g}") if isinstance(x, float) else x

    brief = []
    for row in rows:
        rough = {k: float(f"{row[k]:.1e}") for k in ("outputs", "residual")}
        brief.append({k: short(x) for k, x in row.items()} | rough)
    return brief


# ------------------------------------------------------------------------------------------------ picture and page


SWEEPS = (
    ("scale c", SCALES, {(c, 1.0): c for c in SCALES}),
    ("condition κ", CONDITIONS, {(1.0, k): k for k in CONDITIONS}),
)
"""Title, values, and which element has which."""


def plot(rows: list[Row], path: Path) -> None:
    """Ratio against scale and against condition, all logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "hf-geosharp", "font.size": 10})
    figure, axes = plt.subplots(len(DEMOS), 2, figsize=(9, 5.6), sharey=True, sharex="col", layout="constrained")
    table = ratios(rows)
    for line, demo in zip(axes, DEMOS, strict=True):
        for axis, (title, _, of) in zip(line, SWEEPS, strict=True):
            own = [(of[r["move"]], r) for r in table if r["demo"] == demo and r["move"] in of]
            for name in reversed(MEASURES):
                same = name in INVARIANT
                axis.plot(
                    [x for x, _ in own], [r[name] for _, r in own], color=COLOURS[name], label=name,
                    linewidth=3 if same else 1.5, linestyle="--" if name == "geodesic, mix" else "-",
                    marker="o", markersize=6 if same else 4,
                )  # fmt: skip
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set_title(f"{demo}, {title}", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(color="#dddddd", linewidth=0.6)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=4, frameon=False)
    figure.supylabel("measure / measure of the model (same function, other weights)", fontsize=10)
    figure.patch.set_facecolor("white")
    figure.savefig(path, metadata={"Date": None})


def page(rows: list[Row]) -> str:
    """What was found, as Markdown."""
    table = ratios(rows)
    exact = max(abs(r[name] - 1) for r in table for name in INVARIANT)
    # No figure has more digits than are stored.
    exact = max(exact, 10.0 ** (1 - DIGITS))
    moves, worst = (max(r[key] for r in rows) for key in ("outputs", "residual"))
    tables = []
    for demo in DEMOS:
        for title, values, of in SWEEPS:
            own = {of[r["move"]]: r for r in table if r["demo"] == demo and r["move"] in of}
            lines = [f"| {demo}, {title} | " + " | ".join(f"{x:g}" for x in values) + " |"]
            lines.append("| --- |" + " ---: |" * len(values))
            lines += [
                f"| {name} | " + " | ".join(_cell(name, own[x][name]) for x in values) + " |" for name in MEASURES
            ]
            tables.append("\n".join(lines))
    blocks = [
        "# Along the orbit",
        "Made by `make orbit` (`benchmarks/orbit.py`) from `benchmarks/data/orbit.json`; not to be edited by hand.",
        "![Each measure over its value on the model, against scale and condition of the group element](orbit.svg)",
        paragraph(
            "Every query/key and value/output pair (G, H) of a demo goes to (G A⁻¹, H Aᵀ), A = c U D V: random "
            "rotations",
            "U and V of each head, and a diagonal D of condition κ. The function is the same: outputs move by at most",
            f"{moves:.0e}. Each entry is a measure divided by its value on the model as it ships (float64, one batch,",
            f"default radii). The geodesic scores stay, to a relative {exact:.0e} at most; no other measure does.",
        ),
        *tables,
        "\n".join(
            (
                paragraph(
                    "- At c = κ = 1 only a rotation is left. Lengths stay, and with them what is Euclidean: "
                    "weight norm,",
                    "gradient norm, top eigenvalue, Euclidean sharpness. Adaptive sharpness moves a little: it "
                    "belongs to",
                    "the axes in which the weights are stored.",
                ),
                paragraph(
                    "- Scale: one factor of each pair grows and the other shrinks, and a fixed step in the small "
                    "one is a",
                    "large change of the product. What is Euclidean rises at both ends. Adaptive sharpness does "
                    "not depend",
                    "on c: a common factor of a factor's entries is what it is invariant under.",
                ),
                paragraph(
                    "- Condition: an element that is no multiple of a rotation makes large entries whose parts "
                    "cancel in the",
                    "product, and a relative change of each entry does not let them. Here adaptive sharpness "
                    "moves most.",
                ),
                paragraph(
                    "- The top eigenvalue is the one largest in modulus, with any sign (on vader-bert often negative);",
                    f"{ITERATIONS} power iterations, ‖Hx − λx‖ / |λ| at most {worst:.0e}.",
                ),
            )
        ),
    ]
    return "\n\n".join(blocks) + "\n"


def paragraph(*pieces: str) -> str:
    """Pieces of text as wrapped lines of Markdown; a list item keeps its indent."""
    text = " ".join(pieces)
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _cell(name: str, value: float) -> str:
    return f"{value:.5f}" if name in INVARIANT else f"{value:#.3g}".rstrip(".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = stored(measure(arguments.samples))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)
    if arguments.page:
        arguments.page.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
