"""What an inspection costs: seconds of each stage and memory, the first time and when it was done before.

    python -m benchmarks.inspect_cost [--only bert-base --only llama-1b] [--quick]

Models are built from a configuration alone, with random weights from a seed; the time that takes is told apart as
loading. Each inspection runs in a process of its own, with two threads; the second one of a model finds what the first
has kept on disk. Seconds are those that the two threads computed, together, and in brackets those of the clock, which
other work on the machine lengthens: the load of the machine meanwhile stands beside them. Writes
``benchmarks/data/inspect.json`` and the table of ``benchmarks/README.md``. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from benchmarks.clock import rounded
from benchmarks.memory import forget_peak, resident
from benchmarks.tables import markdown

HERE = Path(__file__).resolve().parent
DATA, PAGE = HERE / "data" / "inspect.json", HERE / "README.md"
BEGIN, END = "<!-- inspect-table -->\n", "<!-- /inspect-table -->"

THREADS = 2

WIDE = (2560, 4096, 8192)


def _wide(width: int) -> dict[str, Any]:
    """One layer of a Llama with heads of 128."""
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width, "num_hidden_layers": 1,
        "num_attention_heads": width // 128, "num_key_value_heads": width // 512, "head_dim": 128,
        "intermediate_size": 11 * width // 4, "vocab_size": 1000, "tie_word_embeddings": True,
    }  # fmt: skip


def _divided(width: int) -> dict[str, Any]:
    """One layer whose code takes the size of its heads, of 128, from the width of what it reads."""
    return {
        "model_type": "blip_vision_model", "architectures": ["BlipVisionModel"], "hidden_size": width,
        "num_hidden_layers": 1, "num_attention_heads": width // 128, "intermediate_size": 11 * width // 4,
        "image_size": 64, "patch_size": 16,
    }  # fmt: skip


def _mixture(layers: int, experts: int) -> dict[str, Any]:
    """Layers of experts that are small: how many there are is what finding takes long for."""
    return {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 256,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "moe_intermediate_size": 96, "num_experts": experts, "num_experts_per_tok": min(8, experts),
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 1000,
    }  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "bert-base": {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
    "llama-1b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
        "vocab_size": 128256, "tie_word_embeddings": True,
    },
    **{f"llama, 1 layer, hidden {width}": _wide(width) for width in WIDE},
    "blip, 1 layer, hidden 4096": _divided(4096),
    "qwen3 moe, 8 layers of 128 experts": _mixture(8, 128),
}  # fmt: skip
SMALL = {
    "bert-base": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "llama-1b": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                 "intermediate_size": 64},
    **{f"llama, 1 layer, hidden {width}": _wide(256) for width in WIDE},
    "blip, 1 layer, hidden 4096": _divided(256),
    "qwen3 moe, 8 layers of 128 experts": _mixture(1, 4),
}  # fmt: skip
"""What ``--quick`` makes of them."""

Row = dict[str, Any]


def measure(names: Sequence[str], quick: bool) -> dict[str, Row]:
    """A row for each model: the first inspection, and one of the same weights after it."""
    rows = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            settings = {**MODELS[name], **(SMALL[name] if quick else {})}
            (Path(folder) / "config.json").write_text(json.dumps(settings))
            rows[name] = {"first": _apart(Path(folder)), "again": _apart(Path(folder)), "load": os.getloadavg()[2]}
        print(name, json.dumps(rounded(rows[name], 3)), flush=True)
    return rows


def _apart(folder: Path) -> Row:
    """One inspection in a process of its own.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", "benchmarks.inspect_cost", "--worker", str(folder)]
    # Threads that wait for each other sleep: other work on the machine would have them count as computing.
    environment = {**os.environ, "HF_GEOSHARP_CACHE": str(folder / "cache"), "OMP_WAIT_POLICY": "passive"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"an inspection failed:\n{ended.stderr[-2000:]}")
    found: Row = json.loads(ended.stdout.splitlines()[-1])
    return found


def work(folder: Path) -> Row:
    """Inspects in this process; peak memory is told for each stage."""
    from hf_geosharp.inspection import inspect_pretrained

    logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    marks: list[tuple[str, float, float, int, int]] = []

    def mark(stage: str) -> None:
        marks.append((stage, time.perf_counter(), time.process_time(), resident(True), resident(False)))
        forget_peak()

    mark("start")
    result = inspect_pretrained(str(folder), random_init=True, progress=mark)
    mark("end")
    stages = {
        stage: {"seconds": end - begin, "cpu": cpu_end - cpu, "peak": peak, "more": peak - before}
        for (stage, begin, cpu, _, before), (_, end, cpu_end, peak, _) in pairwise(marks)
        if stage != "start"
    }
    return {
        "parameters": result.totals.parameters,
        "symmetry_dim": result.totals.symmetry_dim,
        "failed": [s.name for s in result.sites if s.status == "failed"],
        "deviation": result.deviation,
        "control": result.control,
        "stages": stages,
    }


def table(rows: dict[str, Row]) -> str:
    """The rows as a table."""
    times = ["loading", "finding", "proof", "again"]
    head = ["model", "parameters", "dimension", *times, "peak memory", "of finding", "deviation", "load"]
    return markdown(head, [_cells(name, row) for name, row in rows.items()])


def _cells(name: str, row: Row) -> list[str]:
    first, again = row["first"], row["again"]["stages"]
    stages = first["stages"]
    return [
        name,
        f"{first['parameters'] / 1e6:,.0f} M",
        f"{first['symmetry_dim']:,}",
        _time([stages["load"]]),
        _time([stages["find"]]),
        _time([stages["verify"]]),
        _time([s for stage, s in again.items() if stage != "load"] or [{"seconds": 0, "cpu": 0}]),
        f"{max(s['peak'] for s in stages.values()) / 2**30:.1f} GiB",
        f"{stages['find']['more'] / 2**30:.2f} GiB",
        f"{first['deviation']:.0e} of {first['control']:.0e}",
        f"{row['load']:.0f}",
    ]


def _time(stages: Sequence[Row]) -> str:
    return f"{sum(s['cpu'] for s in stages):.1f} s ({sum(s['seconds'] for s in stages):.1f} s)"


def save(rows: dict[str, Row]) -> None:
    """Writes the data, those of other models kept, and the table."""
    data = json.loads(DATA.read_text()) if DATA.exists() else {"models": {}}
    data["environment"] = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": THREADS}
    data["models"] |= rounded(rows)
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table(data['models'])}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(MODELS), help="one of the models; may be repeated")
    parser.add_argument("--quick", action="store_true", help="tiny models, nothing written: does it run")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options.worker)))
        return
    rows = measure(options.only or list(MODELS), options.quick)
    if not options.quick:
        save(rows)
    print(table(rows))


if __name__ == "__main__":
    main()
