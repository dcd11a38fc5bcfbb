"""The pages of the costs: rendered from the data, arithmetic checked; and the whole run, in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import bench, extrapolate, geometry_cost, memory, peers, results, scaling, sweeps, units
from benchmarks.extrapolate import MODELS, Costs, Model
from benchmarks.memory import NotHereError
from hf_geosharp.sharpness.settings import CLIMBS

ROOT = Path(__file__).resolve().parents[2]


def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "data" / "bench.json").read_text(encoding="utf-8"))
    return found


def ascents() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "data" / "ascent.json").read_text(encoding="utf-8"))
    return found


def test_the_pages_are_made_of_the_data() -> None:
    for path, text in results.pages(data()).items():
        assert path.read_text(encoding="utf-8") == text


def test_the_data_are_of_a_whole_run() -> None:
    found = data()
    assert set(found) == {"environment", *bench.SECTIONS}
    assert found["peers"]["settings"] == {"samples": peers.SAMPLES, "rho": peers.RHO, "steps": peers.STEPS}
    baseline = [row for row in found["peers"]["rows"] if row["measure"] == peers.BASELINE]
    assert [(row["forwards"], row["backwards"]) for row in baseline] == [(41, 20)] * 2
    assert not found["peers"]["left_out"]
    measured = [(row["model"], row["ascent"]) for row in found["memory"]]
    assert measured == [(model, ascent) for model in memory.FULL for ascent in CLIMBS]
    assert [row["sizes"] for row in found["sweeps"]["rows"]] == [list(sizes) for sizes in sweeps.SIZES.values()]
    assert [row["shape"] for row in found["units"]["rows"]] == list(units.SHAPES)
    assert (found["scaling"]["samples"], found["scaling"]["batches"]) == scaling.FULL[:2]
    cases = dict.fromkeys(row["case"] for row in found["geometry"]["steps"])
    assert list(cases) == [case.title for case in geometry_cost.CASES]


# ----------------------------------------------------------------------------------------------------- extrapolation


@pytest.mark.parametrize(("model", "billions"), list(zip(MODELS, (6.738, 68.977), strict=True)))
def test_the_parameters_are_those_that_are_published(model: Model, billions: float) -> None:
    assert model.parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_the_parameters_are_those_of_transformers() -> None:
    model = Model("small", 3, 64, 96, 8, 2, 8, 500)
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=2,
        head_dim=8, vocab_size=500,
    )  # fmt: skip
    with torch.device("meta"):
        built = transformers.LlamaForCausalLM(config)
    assert model.parameters == sum(p.numel() for p in built.parameters())


def test_a_step_by_hand() -> None:
    """Seconds of passes, geometry and communication from the formula of the page."""
    unit = Costs(6.0, {"secant": 100.0, "apgd": 50.0}, {"secant": 32.0, "apgd": 28.0})
    model = MODELS[0]
    size = model.parameters
    one = extrapolate.step(model, 8, "secant", unit)
    assert one.passes == pytest.approx(6 * 4 / 3 * size * 65536 / (8 * 33.5e12))
    assert one.geometry == pytest.approx(100 * 4 * size / (8 * 1.675e12))
    assert one.communication == pytest.approx(16 * size * 7 / 8 / 225e9)
    assert one.total == pytest.approx(one.passes + one.geometry + one.communication)
    more = extrapolate.step(model, 64, "secant", unit)
    assert one.passes / more.passes == pytest.approx(8)
    assert more.communication > one.communication


def test_what_does_not_fit_is_said() -> None:
    unit = extrapolate.costs(data())
    assert unit.held is not None
    page = extrapolate.page(data(), ascents())
    lines = [line for line in page.splitlines() if line.startswith("| Llama 2 70B, 8 GPUs")]
    assert len(lines) == 3
    assert all("does not fit" in line for line in lines)
    assert "Not measured" in page


# -------------------------------------------------------------------------------------------------------------- run


def stand_ins(monkeypatch: pytest.MonkeyPatch, **sections: Any) -> None:
    """Sections that return the stored figures, or raise."""

    def of(name: str) -> Any:
        def measure(quick: bool) -> Any:
            if isinstance(sections.get(name), Exception):
                raise sections[name]
            return sections.get(name, data()[name])

        return measure

    monkeypatch.setattr(bench, "SECTIONS", {name: (title, of(name)) for name, (title, _) in bench.SECTIONS.items()})


def test_a_run_writes_data_and_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_ins(monkeypatch)
    assert bench.run(list(bench.SECTIONS), True, tmp_path / "bench.json", tmp_path) == []
    written = json.loads((tmp_path / "bench.json").read_text())
    assert {name: written[name] for name in bench.SECTIONS} == {name: data()[name] for name in bench.SECTIONS}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["EXTRAPOLATION.md", "RESULTS.md", "bench.json"]


def test_a_section_that_fails_keeps_its_figures_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(data()))
    stand_ins(monkeypatch, peers=RuntimeError("no"), scaling={**data()["scaling"], "processes": 3})
    assert bench.run(list(bench.SECTIONS), True, path, tmp_path) == ["peers"]
    written = json.loads(path.read_text())
    assert written["peers"] == data()["peers"]
    assert written["scaling"]["processes"] == 3


def test_what_the_machine_does_not_allow_is_on_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_ins(monkeypatch, memory=NotHereError("this is no Linux"))
    assert bench.run(list(bench.SECTIONS), True, tmp_path / "bench.json", tmp_path) == []
    assert "Not measured: this is no Linux." in (tmp_path / "RESULTS.md").read_text()
    assert "Memory was not measured." in (tmp_path / "EXTRAPOLATION.md").read_text()


@pytest.mark.parametrize("name", list(bench.SECTIONS))
@pytest.mark.slow
def test_every_section_runs_in_small(name: str, tmp_path: Path) -> None:
    """And the pages can show what it gives."""
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(data()))
    assert bench.run([name], True, path, tmp_path) == []
    assert (tmp_path / "RESULTS.md").exists()
