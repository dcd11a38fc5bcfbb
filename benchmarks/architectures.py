"""What is found on every model type that transformers can build: ``python -m benchmarks.architectures``.

For each type a tiny model with random parameters is built (``tiny.py``), run on made-up inputs, searched for
symmetries, and everything found is proved on other inputs. Each type has its own limits of time and memory; results
are kept, so that a run that was stopped goes on (``--again`` forgets them). Writes ``data/architectures.json`` and
``ARCHITECTURES.md``.
"""

from __future__ import annotations

import re
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.each_type import OutOfTime, Record, every_type, main

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / "build" / "architectures.jsonl"
DATA = HERE / "data" / "architectures.json"
PAGE = HERE / "ARCHITECTURES.md"

TOKENS = (19, 23)
"""Lengths of the sequences to find with and to prove on: more than twice a head."""

STATUS = ("found", "partly", "nothing", "no attention", "does not run", "not buildable", "failed")


# ---------------------------------------------------------------------------------------------------- one type


def examine(model_type: str) -> Record:
    """Builds, runs, finds and proves; the record says how far that went."""
    from benchmarks import tiny
    from hf_geosharp.symmetry.find import find_symmetries
    from hf_geosharp.symmetry.inputs import synthetic
    from hf_geosharp.symmetry.verify import verify

    record: Record = {"type": model_type}
    stage = "not buildable"
    try:
        model = tiny.build(model_type)
        record |= {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
        stage = "does not run"
        try:
            batches = [synthetic(model, seed=s, tokens=n) for s, n in enumerate(TOKENS)]
            usable = not _gives_nan(model, batches[0])
        except ValueError:
            usable = False
        if not usable:  # some code is for single precision only
            model.float()
            record["dtype"] = "float32"
            batches = [synthetic(model, seed=s, tokens=n) for s, n in enumerate(TOKENS)]
        record["inputs"] = {k: list(v.shape) for k, v in batches[0].items()}
        attentions = attention_modules(model, batches[0])
        record["attentions"] = len(attentions)
        stage = "failed"
        begin = time.process_time()
        found = find_symmetries(model, batches[0], cached=False)
        record["find_seconds"] = round(time.process_time() - begin, 2)
        proof = verify(model, found, batches)
        record["verify_seconds"] = round(time.process_time() - begin - record["find_seconds"], 2)
        record |= {"deviation": proof.deviation, "control": proof.control}
        record |= account(proof.map, attentions)
        record["refuted"] = list(proof.map.dropped[len(found.dropped) :])
        record["dropped"] = list(found.dropped)
        record["unrecognised"] = list(found.unrecognised)
    except (Exception, OutOfTime) as error:
        where = traceback.extract_tb(error.__traceback__)
        ours = [f for f in where if "hf_geosharp" in f.filename] or where
        record |= {
            "status": stage,
            "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            "at": [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in (ours[-1], where[-1])],
        }
    return record


def _gives_nan(model: Any, batch: Any) -> bool:
    """Whether nothing is seen of an output: a mask times a number that is too small for its precision, say."""
    import torch

    from hf_geosharp.symmetry.inputs import call, output_tensors

    with torch.no_grad():
        return any(t.numel() and bool(t.isnan().all()) for t in output_tensors(call(model, batch))[:1])


def attention_modules(model: Any, batch: Any) -> list[str]:
    """Modules that call a softmax of attention themselves (or leave it to the fused function), by name."""
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    from hf_geosharp.symmetry.inputs import call

    names = {m: n for n, m in model.named_modules()}
    scope: list[str] = []
    found: dict[str, None] = {}

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            fused = func in (functional.scaled_dot_product_attention, functional.multi_head_attention_forward)
            plain = func in (functional.softmax, torch.softmax, torch.Tensor.softmax)
            path = next((s for s in reversed(scope) if not s.endswith(("softmax", "dropout"))), "")
            if fused or (plain and (args[0].ndim >= 4 or (args[0].ndim == 3 and "att" in path.lower()))):
                found.setdefault(path)
            return func(*args, **(kwargs or {}))

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda m, _: scope.append(names[m])))
        handles.append(module.register_forward_hook(lambda m, *_: scope.pop() and None, always_call=True))
    try:
        with torch.no_grad(), Watch():
            call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    # Modules that share all their weights are one, under two names.
    modules = dict(model.named_modules(remove_duplicate=False))
    weights = {name: frozenset(map(id, modules[name].parameters())) for name in found}
    return [
        name for i, name in enumerate(found) if not weights[name] or weights[name] not in list(weights.values())[:i]
    ]


def account(symmetries: Any, attentions: list[str]) -> Record:
    """Dimensions by kind and group, and on how many attention modules each kind was found."""
    dimensions: Counter[str] = Counter()
    groups: dict[str, dict[str, int]] = {}
    for s in symmetries.symmetries:
        dimensions[s.kind] += s.dimension
    modules: dict[str, set[str]] = {"qk": set(), "vo": set()}
    for p in symmetries.pairs:
        groups.setdefault(p.kind, {})
        groups[p.kind][p.group.name] = groups[p.kind].get(p.group.name, 0) + p.copies
        side = p.kind.split("_")[0]
        if side in modules:
            modules[side] |= {a for a in attentions if _same_place(a, p)}
    have = {k: len(v) for k, v in modules.items()}
    status = status_of(len(attentions), have, groups, symmetries.unrecognised)
    return {"status": status, "dimensions": dict(dimensions), "groups": groups, "with": have}


def status_of(attentions: int, have: Mapping[str, int], groups: Mapping[str, Any], unrecognised: Sequence[str]) -> str:
    """How much was found, by the number of attention modules and of those with each side of one."""
    if attentions:
        whole = all(n == attentions for n in have.values())
        return "found" if whole else "partly" if any(have.values()) else "nothing"
    # No module runs a softmax that its hooks see: attention has none, or is in a function of its own.
    sides = {kind.split("_")[0] for kind in groups} & {"qk", "vo"}
    open_ = any(re.search(r"\.(qk|vo): ", text) for text in unrecognised)
    if not sides:
        return "nothing" if open_ else "no attention"
    return "partly" if open_ or len(sides) < 2 else "found"


def _same_place(attention: str, pair: Any) -> bool:
    """Whether a pair belongs to an attention module: in it, around it, or next to it with a parameter in it."""
    places = [pair.module, *(p.rpartition(".")[0] for p in pair.parameters)]
    return any(p == attention or p.startswith(f"{attention}.") for p in places) or attention.startswith(
        f"{pair.module}."
    )


# ---------------------------------------------------------------------------------------------------- all types


def page(records: list[Record]) -> str:
    """The table as a page."""
    counts = Counter(r["status"] for r in records)
    # What is dead moves nothing, broken or not: that refutes nothing.
    refuted = sum(any(": dead" not in claim for claim in r.get("refuted") or ()) for r in records)
    lines = [
        "# Architectures",
        "",
        "Made by `python -m benchmarks.architectures`: for every model type of transformers a tiny model with random",
        "parameters, what was found on it, and the proof. *found*: query/key and value/output of every attention",
        "module.",
        "Dimensions are those of the groups over the whole model; *other* counts biases, norms, MLPs and the rest.",
        "",
        f"{len(records)} types: " + ", ".join(f"{counts[s]} {s}" for s in STATUS if counts[s]) + ".",
        f"Types with a claim that the proof refuted (and so was not made): {refuted}.",
        "",
        "| type | status | attentions | qk | vo | other | deviation | control | s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in sorted(records, key=lambda r: (STATUS.index(r["status"]), r["type"])):
        if r["status"] not in STATUS[:4]:
            continue
        d = dict(r["dimensions"])
        qk, vo = d.pop("qk", 0), d.pop("vo", 0)
        evidence = [f"{r[k]:.0e}" if r.get(k) is not None else "" for k in ("deviation", "control")]
        cells = [r["type"], r["status"], r["attentions"], qk, vo, sum(d.values()), *evidence, r["find_seconds"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for status in STATUS[4:]:
        those = sorted((r for r in records if r["status"] == status), key=lambda r: r["type"])
        if those:
            lines += ["", f"## {status[0].upper()}{status[1:]}", ""]
            lines += [f"- {r['type']}: {re.sub(r'[|`*<>]', ' ', r.get('reason', ''))[:160]}" for r in those]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(__doc__, "benchmarks.architectures", CACHE, examine, every_type, (DATA, PAGE, page))
