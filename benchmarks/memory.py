"""Peak memory of a score by size of the model, in units of its float32 parameters.

    python -m benchmarks.memory [--quick]

Each score runs in a process of its own, on a batch so small that activations hardly count: peak resident memory less
what was resident before the model was made. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks import subjects
from benchmarks.subjects import Subject

Row = dict[str, Any]

STEPS = 4
BERTS = {
    "BERT, 2 layers, hidden 32": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 1000
    },
    "BERT, 4 layers, hidden 128": {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512,
    },
    "BERT, 6 layers, hidden 384": {
        "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536,
    },
    "BERT-base": {},
}  # fmt: skip
LLAMAS = {
    "Llama, 4 layers, hidden 512": {
        "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 1376, "vocab_size": 4000,
    },
    "Llama, 4 layers, hidden 1024": {
        "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 2752, "vocab_size": 4000,
    },
    "Llama, 4 layers, hidden 2048": {
        "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 8192, "vocab_size": 32000,
    },
}  # fmt: skip
SMALLEST, *FULL = (*BERTS, *LLAMAS)


class NotHereError(RuntimeError):
    """What this machine, or what is installed, does not allow to measure."""


def build(title: str) -> Subject:
    """With a batch of 2 x 8 tokens."""
    make = subjects.bert if title in BERTS else subjects.llama
    return make(2, 8, **{**BERTS, **LLAMAS}[title])


def resident(peak: bool) -> int:
    """Resident bytes of this process, or their peak: what getrusage says of a child includes its parent's.

    Raises:
        NotHereError: the system does not say.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:" if peak else "VmRSS:"):
            return 1024 * int(line.split()[1])
    raise NotHereError("peak memory is read from /proc/self/status, which is there on Linux only")


def forget_peak() -> None:
    """From now on the peak is that of what follows; where the system does not let us, an earlier one stays."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def measure_here(title: str, ascent: str) -> Row:
    """In this process, which must have done nothing else."""
    from hf_geosharp.sharpness.estimate import estimate
    from hf_geosharp.sharpness.settings import Settings

    small, batch = build(SMALLEST)
    # Loads what a pass and a score load.
    estimate(small, [batch], Settings(steps=1, ascent=ascent))
    gc.collect()
    forget_peak()
    before = resident(peak=False)
    model, batch = build(title)
    size = 4 * subjects.parameters(model)
    estimate(model, [batch], Settings(steps=STEPS, ascent=ascent))
    peak = resident(peak=True) - before
    return {
        "model": title, "ascent": ascent, "parameters": size // 4, "peak_bytes": peak, "times": peak / size,
        "bytes_per_parameter": 4 * peak / size,
    }  # fmt: skip


def measure(quick: bool = False) -> list[Row]:
    """One row for each size and ascent.

    Raises:
        NotHereError: not on Linux.
    """
    from hf_geosharp.sharpness.settings import CLIMBS

    resident(peak=True)
    rows = []
    for title in (SMALLEST,) if quick else FULL:
        for ascent in CLIMBS:
            code = f"from benchmarks.memory import main; main([{title!r}, {ascent!r}])"
            ran = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE, text=True)
            if ran.returncode == -signal.SIGKILL:
                print(f"  {title}, {ascent}: not measured, the system ended it for want of memory", flush=True)
                continue
            ran.check_returncode()
            rows.append(json.loads(ran.stdout.strip().splitlines()[-1]))
            row = rows[-1]
            print(f"  {title}, {ascent}: {row['times']:.2f} times {4e-6 * row['parameters']:.0f} MB", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    logging.set_verbosity_error()
    if arguments:
        print(json.dumps(measure_here(*arguments)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    print(f"torch {torch.__version__}")
    measure(parser.parse_args().quick)


if __name__ == "__main__":
    main()
