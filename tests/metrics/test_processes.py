"""The metric in processes that a launcher started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
from hf_geosharp import GeodesicSharpness

rank = int(os.environ["RANK"])
call = {"model_id": "demo:vader-bert", "steps": 2, "batch_size": 2, "device": "cpu"}
texts = ["a wonderful film", "dull and far too long", "the cast is superb", "a waste of time"]
labels = ["positive", "negative", "positive", "negative"]

shared = GeodesicSharpness().compute(predictions=texts, references=labels, **call)
own = GeodesicSharpness(num_process=2, process_id=rank, experiment_id="launched")
half = slice(2 * rank, 2 * rank + 2)
gathered = own.compute(predictions=texts[half], references=labels[half], **call)
with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
    json.dump([shared, gathered], file)
"""


@pytest.mark.slow
def test_they_share_a_score_or_the_first_takes_it_alone(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:0",
    ]
    done = subprocess.run(
        [sys.executable, *launcher, str(program), str(tmp_path)],
        env=os.environ | {"HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    (first, alone), (second, nothing) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert nothing is None
    assert alone == pytest.approx(first, rel=1e-5)
