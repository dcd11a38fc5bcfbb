"""A score on a GPU: equality with the CPU, geometry on top of a pass, memory and tokens a second. One table.

    python -m benchmarks.gpu [--json FILE] [--minutes 8]
    python -m benchmarks.gpu --device cpu --tiny      # every piece of it, where there is no GPU

Float32 throughout (TF32 is off while a score is taken). First the demos and a tiny Llama are scored on CPU and device:
the values have to agree to a relative 1e-4 (exit code 1 if they do not). Then BERT-base, ViT-B/16 and a Llama of 1.2
billion parameters, with random weights: seconds of a plain forward and backward pass, of the rest of a step of the
ascent, tokens a second of both, and peak memory. What does not fit the device's memory, or the minutes, is told and
left out. Without a CUDA device it says so and ends with exit code 0.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks import subjects
from benchmarks.clock import rounded, seconds, wait
from benchmarks.geometry_cost import Run, timed
from benchmarks.subjects import Batch, Subject
from hf_geosharp.errors import ModelError
from hf_geosharp.sharpness.estimate import estimate
from hf_geosharp.sharpness.memory import is_out_of_memory
from hf_geosharp.sharpness.objective import Objective
from hf_geosharp.sharpness.precision import full_float32
from hf_geosharp.sharpness.settings import Settings

AGREEMENT = 1e-4
ASCENTS = ("secant", "apgd")
STEPS = 4
"""Of each ascent that is timed."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model with random weights on a device, with a batch, and the positions that a sample of it has."""

    title: str
    build: Callable[[str], Subject]


def _positions(batch: Batch) -> int:
    """Tokens of a batch, or patches with the class token of a ViT with patches of 16."""
    if "input_ids" in batch:
        return subjects.tokens(batch)
    rows, _, height, width = batch["pixel_values"].shape
    return rows * ((height // 16) * (width // 16) + 1)


LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
TINY_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100,
}  # fmt: skip
TINY_BERT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 100,
}  # fmt: skip
TINY_VIT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
}  # fmt: skip

CASES = (
    Case("BERT-base, 32 x 128 tokens", lambda device: subjects.bert(32, 128, device)),
    Case("ViT-B/16, 32 images of 224 x 224", lambda device: subjects.vit(32, device)),
    Case("Llama 1.2 B, 4 x 512 tokens", lambda device: subjects.llama(4, 512, device, **LLAMA)),
)
TINY = (
    Case("BERT, tiny", lambda device: subjects.bert(4, 8, device, **TINY_BERT)),
    Case("ViT, tiny", lambda device: subjects.vit(4, device, **TINY_VIT)),
    Case("Llama, tiny", lambda device: subjects.llama(4, 8, device, **TINY_LLAMA)),
)


# --------------------------------------------------------------------------------------------------------- equality


def equality(device: str, samples: int = 64) -> list[Row]:
    """Scores of small models on CPU and device, with their relative difference."""
    rows = []
    for title, model, batch in _small(samples):
        for ascent in ASCENTS:
            say(f"equality: {title}, {ascent}")
            settings = Settings(ascent=ascent, reproducibility=False)
            here = estimate(model, [batch], settings).geodesic_sharpness
            there = estimate(copy.deepcopy(model).to(device), [batch], settings).geodesic_sharpness
            rows.append(
                {"model": title, "ascent": ascent, "cpu": here, "device": there, "difference": abs(there / here - 1)}
            )
    return rows


def _small(samples: int) -> Iterator[tuple[str, nn.Module, Batch]]:
    for demo in ("digits-vit", "vader-bert"):
        model, (batch,) = subjects.demo(demo, samples)
        yield demo, model, batch
    yield "Llama, tiny", *subjects.llama(8, 16, **TINY_LLAMA)


# ------------------------------------------------------------------------------------------------------------- cost


def cost(case: Case, device: str, repeats: int = 3) -> list[Row]:
    """A row for each ascent: what a pass and a step cost, and what memory they take.

    Raises:
        ModelError: a batch does not fit the device's memory.
    """
    model, batch = case.build(device)
    size, positions = subjects.parameters(model), _positions(batch)
    with _peak(device) as plain:
        one_pass = _pass(model, batch, device, repeats)
    rows = []
    for ascent in ASCENTS:
        with _peak(device) as whole:
            start = time.perf_counter()
            result = estimate(
                model, [batch], Settings(ascent=ascent, steps=STEPS, reproducibility=False, verify=False)
            )  # fmt: skip
            wait(device)
            total = time.perf_counter() - start
        _, times = timed(model, batch, (Run("inv", "second", ascent, repeats),), STEPS, device)[0]
        best = min(times, key=lambda t: t.rest)
        step = best.one_pass + best.rest
        rows.append(
            {"model": case.title, "ascent": ascent, "parameters": size, "tokens": positions, "pass_seconds": one_pass,
             "step_seconds": best.rest, "ratio": best.rest / best.one_pass, "pass_tokens": positions / one_pass,
             "step_tokens": positions / step, "score_seconds": total, "evaluations": result.passes.forwards,
             "plain_bytes": plain.bytes, "score_bytes": whole.bytes,
             "times": None if whole.bytes is None else whole.bytes / (4 * size)}
        )  # fmt: skip
    return rows


def _pass(model: nn.Module, batch: Batch, device: str, repeats: int) -> float:
    """The least seconds of a plain forward and backward pass in float32, after one that warms up."""
    objective = Objective(model, batch)
    with full_float32():
        objective.evaluate(True)
        least = min(seconds(lambda: objective.evaluate(True), device)[0] for _ in range(repeats))
    model.zero_grad()
    return least


class _Bytes:
    """Peak memory of a device; None where torch does not count it."""

    bytes: int | None = None


@contextmanager
def _peak(device: str) -> Iterator[_Bytes]:
    found = _Bytes()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    if device.startswith("cuda"):
        found.bytes = torch.cuda.max_memory_allocated(device)


# -------------------------------------------------------------------------------------------------------------- run


def run(device: str, cases: tuple[Case, ...], minutes: float = 8.0) -> dict[str, Any]:
    """Equality, then the cost of each case, as far as time and memory go."""
    start = time.perf_counter()
    same = equality(device)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for case in cases:
        if time.perf_counter() - start > 60 * minutes:
            left_out[case.title] = f"{minutes:g} minutes were over"
            continue
        say(case.title)
        try:
            rows += cost(case, device)
        except (ModelError, RuntimeError, MemoryError) as error:
            if not (is_out_of_memory(error) or (isinstance(error, ModelError) and "memory" in str(error))):
                raise
            left_out[case.title] = "does not fit the device's memory"
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    return {
        "device": name_of(device), "torch": torch.__version__, "transformers": transformers.__version__,
        "agreement": AGREEMENT, "equal": all(r["difference"] <= AGREEMENT for r in same), "equality": same,
        "rows": rows, "left_out": left_out, "seconds": time.perf_counter() - start,
    }  # fmt: skip


def say(text: str) -> None:
    """What is being done, beside the table."""
    print(f"... {text}", file=sys.stderr, flush=True)


def name_of(device: str) -> str:
    """What the maker calls it."""
    if not device.startswith("cuda"):
        return "CPU"
    about = torch.cuda.get_device_properties(device)
    return f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def table(found: dict[str, Any]) -> str:
    """Everything, as text."""
    lines = [f"{found['device']}; torch {found['torch']}, transformers {found['transformers']}", ""]
    lines.append(f"{'score, float32':34} {'ascent':7} {'CPU':>12} {'device':>12} {'difference':>11}")
    for r in found["equality"]:
        mark = "" if r["difference"] <= found["agreement"] else "   NOT EQUAL"
        lines.append(
            f"{r['model']:34} {r['ascent']:7} {r['cpu']:12.6g} {r['device']:12.6g} {r['difference']:11.1e}{mark}"
        )
    lines += ["", f"{'':34} {'':7} {'pass':>9} {'rest of a step':>20} {'tokens/s':>9} {'in ascent':>9}   peak memory"]
    for r in found["rows"]:
        memory = "not counted"
        if r["times"] is not None:
            memory = f"{r['score_bytes'] / 1e9:.1f} GB ({r['times']:.1f} x; a pass {r['plain_bytes'] / 1e9:.1f} GB)"
        lines.append(
            f"{r['model']:34} {r['ascent']:7} {1e3 * r['pass_seconds']:6.1f} ms {1e3 * r['step_seconds']:9.1f} ms"
            f" ({r['ratio']:5.1%}) {r['pass_tokens']:9.0f} {r['step_tokens']:9.0f}   {memory}"
        )
    lines += [f"{title}: left out, {why}" for title, why in found["left_out"].items()]
    lines.append(f"{found['seconds']:.0f} s in all")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="no model is begun after so many")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("skipped: no CUDA device is present. --device cpu --tiny runs every piece of it on the CPU.")
        return
    found = run(options.device, TINY if options.tiny else CASES, options.minutes)
    print(table(found))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rounded(found, 6), indent=1) + "\n", encoding="utf-8")
    if not found["equal"]:
        sys.exit(f"scores on {options.device} and CPU differ by more than a relative {AGREEMENT:g}")


if __name__ == "__main__":
    main()
