"""What is missed on every model type that transformers can build: ``python -m benchmarks.missed``.

Of a very small model with random parameters the directions are counted in which weights can move and no output does:
the null space of the derivatives of many random sums of its outputs, on inputs of several lengths, by brute force in
double precision. That is compared with the dimensions of what is found. Weights are all that some output feels, but for
tables of embeddings and convolutions over many inputs, as many as fit (``MOST`` entries; the first layers come first).

What differs is not always a symmetry of larger models: matrices of very small ones have null spaces by their shapes.
Results are kept as ``benchmarks.architectures`` keeps them. Writes ``data/missed.json`` and ``MISSED.md``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import architectures
from benchmarks.each_type import OutOfTime, Record, main
from benchmarks.tiny import Sizes, build
from hf_geosharp.symmetry.base import Symmetry

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / "build" / "missed.jsonl"
DATA = HERE / "data" / "missed.json"
PAGE = HERE / "MISSED.md"

SMALL = Sizes(width=16, inner=20, head=4, layers=1)
MOST = 3000
"""Entries of the weights whose derivatives are taken, at most."""
LARGEST = 3000
"""Entries of one parameter, at most."""
LARGEST_CONVOLUTION = 600
"""Entries of a convolution, at most: those that read images have null spaces where few patches are seen."""
MORE = 40
"""Random sums beyond the number of entries."""
SUMS, TOKENS = 24, 23
"""Random sums of the outputs of one input; the length of the shortest one."""
NOTHING = 1e-10
"""Singular value, relative to the largest, of a direction that is not felt: rounding is 1e-14."""
FEELING = 1e-2
"""What norms add to a square, so that they feel lengths."""


def examine(model_type: str) -> Record:
    """Counts the directions that are not felt, and those found."""
    from hf_geosharp.symmetry.find import find_symmetries
    from hf_geosharp.symmetry.inputs import recipe

    begin, record = time.process_time(), {"type": model_type}
    try:
        model = build(model_type, sizes=SMALL)
        for module in model.modules():
            for name in ("eps", "variance_epsilon"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, FEELING)
        inputs = recipe(model, tokens=TOKENS)
        names = _chosen(model)
        weights = dict(model.named_parameters())
        parts = _derivatives(model, names, inputs).split([weights[n].numel() for n in names], 1)
        felt = {n: part for n, part in zip(names, parts, strict=True) if bool(part.any())}
        found = find_symmetries(model, inputs.first, cached=False)
        own = [s for s in found.symmetries if _moved(s, weights) <= set(felt)]
        dimension = sum(s.dimension for s in own)
        null = null_space(felt)
        record |= {
            "entries": sum(part.shape[1] for part in felt.values()),
            "of": sum(p.numel() for p in model.parameters()),
            "not_felt": null.dimension,
            "found": dimension,
            "gap": [null.nothing, null.something],
            "seconds": round(time.process_time() - begin, 1),
            "status": "all found" if null.dimension == dimension else "differs",
            "named": list(found.unrecognised),
        }
        if record["status"] == "differs":
            record |= {"dimensions": {x.name: x.dimension for x in own}, "where": null.where}
    except (Exception, OutOfTime) as error:
        record |= {
            "status": "does not run so small",
            "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
        }
    return record


def _moved(symmetry: Symmetry, weights: Mapping[str, nn.Parameter]) -> set[str]:
    """The parameters that it moves: some are only read, the gain of a norm say."""
    before = {n: weights[n].detach().clone() for n in symmetry.parameters}
    after = {n: x.clone() for n, x in before.items()}
    symmetry.apply(after, symmetry.random(after, torch.Generator().manual_seed(0), 10.0))
    return {n for n in before if not torch.equal(before[n], after[n])}


def _chosen(model: nn.Module) -> list[str]:
    """Names of the parameters that are moved: all that a module has by itself, or nothing."""
    convolved = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
    left: set[int] = set()
    for m in model.modules():
        own = list(m.parameters(recurse=False))
        largest = LARGEST_CONVOLUTION if isinstance(m, convolved) else LARGEST
        if isinstance(m, nn.Embedding) or any(p.numel() > largest or not p.is_floating_point() for p in own):
            left |= set(map(id, own))
    chosen, count = [], 0
    for name, p in model.named_parameters():
        if id(p) in left:
            continue
        if count + p.numel() > MOST:
            break
        chosen.append(name)
        count += p.numel()
    return chosen


def _derivatives(model: nn.Module, names: Sequence[str], inputs: Any) -> Tensor:
    """Those of random sums of outputs in the weights: (sums, entries)."""
    from hf_geosharp.symmetry.trials.probe import Widened, double_by_default

    weights = dict(model.named_parameters())
    leaves = [weights[n] for n in names]
    for p in model.parameters():
        p.requires_grad_(any(p is x for x in leaves))
    generator = torch.Generator().manual_seed(0)
    count, rows = sum(p.numel() for p in leaves) + MORE, list[Tensor]()
    seed = 0
    while len(rows) < count:
        batch = inputs.batch(rows=2, tokens=TOKENS + seed % 5, seed=seed)
        seed += 1
        with Widened(), double_by_default():
            outputs = list(_seen(model(**batch)))
            for _ in range(min(SUMS, count - len(rows))):
                total = sum(
                    (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
                    / x.numel() ** 0.5
                    for x in outputs
                )
                got = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
                rows.append(
                    torch.cat(
                        [
                            (torch.zeros_like(p) if g is None else g).flatten().double()
                            for p, g in zip(leaves, got, strict=True)
                        ]
                    )
                )
    return torch.stack(rows)


def _seen(outputs: Any) -> Iterator[Tensor]:
    """All tensors that depend on weights, but for caches."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point() and outputs.requires_grad:
            yield outputs
    elif isinstance(outputs, Mapping):
        for name, value in outputs.items():
            if name != "past_key_values":
                yield from _seen(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from _seen(value)


@dataclass(frozen=True)
class NullSpace:
    """Its dimension, the singular values on either side of the gap, and how much of it lies in which parameter."""

    dimension: int
    nothing: float
    something: float
    where: dict[str, float]


def null_space(rows: Mapping[str, Tensor]) -> NullSpace:
    """That of derivatives (sums, entries) by parameter, whatever the lengths of the rows."""
    whole = torch.cat(list(rows.values()), 1)
    _, values, directions = torch.linalg.svd(whole / whole.norm(dim=1, keepdim=True), full_matrices=False)
    none = values <= NOTHING * values[0]
    parts = directions[none].split([part.shape[1] for part in rows.values()], 1)
    shares = {n: float(part.square().sum()) for n, part in zip(rows, parts, strict=True)}
    least = float(values[~none][-1]), float(values[none][0]) if bool(none.any()) else 0.0
    return NullSpace(int(none.sum()), least[1], least[0], {n: round(s, 3) for n, s in shares.items() if s > 1e-6})


def distinct() -> list[str]:
    """One of all types in which the same is found."""
    records = json.loads(architectures.DATA.read_text())
    kinds: dict[str, str] = {}
    for r in records:
        if r["status"] in architectures.STATUS[:4]:
            kinds.setdefault(json.dumps([r["attentions"], r["dimensions"], r["groups"], r["unrecognised"]]), r["type"])
    return list(kinds.values())


def page(records: list[Record]) -> str:
    """The table as a page."""
    ran = [r for r in records if "entries" in r]
    agree = [r["type"] for r in ran if r["status"] == "all found"]
    more = [r for r in ran if r["found"] > r["not_felt"]]
    lines = [
        "# Missed",
        "",
        "Made by `python -m benchmarks.missed`: of very small models with random parameters the directions in which no",
        "output changes are counted, by brute force, and compared with the dimensions of what is found. One type",
        "stands for all in which the same is found; those that do not run so small are left out. Not all that differs",
        "is a symmetry of larger models: small matrices have null spaces by their shapes.",
        "",
        f"{len(records)} of {len(distinct())} types were tried, {len(ran)} of them ran: {len(agree)} agree,",
        f"{len(ran) - len(agree)} differ; of {len(more)} more is found than is not felt. *Named* are those of which",
        "`inspect` says that something was not taken apart.",
        "",
        "Agree: " + ", ".join(sorted(agree)) + ".",
        "",
        "| type | entries | not felt | found | named |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for r in sorted((r for r in ran if r["status"] == "differs"), key=lambda r: r["type"]):
        named = "yes" if r["named"] else ""
        lines.append(f"| {r['type']} | {r['entries']} | {r['not_felt']} | {r['found']} | {named} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(__doc__, "benchmarks.missed", CACHE, examine, distinct, (DATA, PAGE, page))
