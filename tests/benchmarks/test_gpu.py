"""The benchmark of GPUs, every piece of it on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import gpu
from benchmarks.gpu import Case
from hf_geosharp.errors import ModelError


def test_without_a_device_it_says_so_and_that_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main([])
    assert capsys.readouterr().out.startswith("skipped: no CUDA device")


@pytest.mark.slow
def test_every_piece_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--device", "cpu", "--tiny", "--json", str(tmp_path / "gpu.json")])
    found = json.loads((tmp_path / "gpu.json").read_text())
    text = capsys.readouterr().out
    assert found["device"] == "CPU"
    assert found["equal"]
    assert len(found["equality"]) == 6
    assert all(row["difference"] <= 1e-6 for row in found["equality"])
    assert [(row["model"], row["ascent"]) for row in found["rows"]] == [
        (case.title, ascent) for case in gpu.TINY for ascent in gpu.ASCENTS
    ]
    for row in found["rows"]:
        assert row["pass_seconds"] > 0 < row["step_seconds"]
        assert row["step_tokens"] > 0 < row["pass_tokens"]
        assert row["model"] in text
    assert not found["left_out"]


def fake(monkeypatch: pytest.MonkeyPatch, difference: float, error: Exception | None = None) -> list[str]:
    asked = []

    def cost(case: Case, device: str) -> list[Any]:
        asked.append(case.title)
        if error is not None:
            raise error
        return []

    row = {"model": "m", "ascent": "apgd", "cpu": 1.0, "device": 1.0 + difference, "difference": difference}
    monkeypatch.setattr(gpu, "equality", lambda device: [row])
    monkeypatch.setattr(gpu, "cost", cost)
    return asked


def test_scores_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake(monkeypatch, 2e-4)
    with pytest.raises(SystemExit, match="differ"):
        gpu.main(["--device", "cpu", "--tiny"])
    assert "NOT EQUAL" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ModelError("out of memory with one sample"), RuntimeError("CUDA out of memory")])
def test_what_does_not_fit_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    asked = fake(monkeypatch, 0.0, error)
    found = gpu.run("cpu", gpu.TINY)
    assert asked == list(found["left_out"]) == [case.title for case in gpu.TINY]
    assert "left out, does not fit" in gpu.table(found)


def test_another_error_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, 0.0, RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes"):
        gpu.run("cpu", gpu.TINY)


def test_no_model_is_begun_after_the_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake(monkeypatch, 0.0)
    found = gpu.run("cpu", gpu.TINY, minutes=0.0)
    assert not asked
    assert set(found["left_out"].values()) == {"0 minutes were over"}


def test_the_large_llama_has_a_billion_parameters() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**gpu.LLAMA))
    assert 1e9 < sum(p.numel() for p in model.parameters()) < 1.4e9
