"""The table of what inspections cost is that of the measured data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import inspect_cost

STAGE = {"seconds": 2.0, "cpu": 3.0, "peak": 3 << 30, "more": 1 << 29}
ROW = {
    "first": {
        "parameters": 5_000_000, "symmetry_dim": 1234, "failed": [], "deviation": 1e-6, "control": 0.5,
        "stages": {"load": STAGE, "find": STAGE, "verify": {**STAGE, "peak": 5 << 30}},
    },
    "again": {"stages": {"load": STAGE, "find": {"seconds": 0.25, "cpu": 0.5, "peak": 0}}},
    "load": 1.75,
}  # fmt: skip


def test_a_row_has_each_stage_in_seconds_and_the_highest_peak() -> None:
    row = inspect_cost.table({"small": ROW}).splitlines()[-1]
    times = "3.0 s (2.0 s) | 3.0 s (2.0 s) | 3.0 s (2.0 s) | 0.5 s (0.2 s)"
    assert row == f"| small | 5 M | 1,234 | {times} | 5.0 GiB | 0.50 GiB | 1e-06 of 5e-01 | 2 |"


def test_what_is_measured_is_written_and_other_models_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, page = tmp_path / "inspect.json", tmp_path / "README.md"
    page.write_text(f"before\n\n{inspect_cost.BEGIN}old\n{inspect_cost.END}after\n")
    monkeypatch.setattr(inspect_cost, "DATA", data)
    monkeypatch.setattr(inspect_cost, "PAGE", page)
    inspect_cost.save({"one": ROW})
    inspect_cost.save({"two": ROW})
    assert list(json.loads(data.read_text())["models"]) == ["one", "two"]
    table = inspect_cost.table({"one": ROW, "two": ROW})
    assert page.read_text() == f"before\n\n{inspect_cost.BEGIN}{table}\n{inspect_cost.END}after\n"


@pytest.mark.skipif(not inspect_cost.DATA.exists(), reason="nothing has been measured yet")
def test_the_page_has_the_table_of_the_data() -> None:
    models = json.loads(inspect_cost.DATA.read_text())["models"]
    assert inspect_cost.table(models) in inspect_cost.PAGE.read_text()
    assert all(not row["first"]["failed"] for row in models.values())


@pytest.mark.skipif(not inspect_cost.DATA.exists(), reason="nothing has been measured yet")
def test_what_finding_takes_hardly_grows_with_the_width() -> None:
    """What is copied for a trial grows with the number of heads and of hidden units alone."""
    models = json.loads(inspect_cost.DATA.read_text())["models"]
    first, *_, last = (models[f"llama, 1 layer, hidden {width}"]["first"] for width in inspect_cost.WIDE)
    wider = inspect_cost.WIDE[-1] / inspect_cost.WIDE[0]
    assert last["parameters"] > 0.9 * wider**2 * first["parameters"]
    assert last["stages"]["find"]["more"] < 1.2 * wider * first["stages"]["find"]["more"]
    assert last["stages"]["find"]["more"] < 0.2 * 4 * last["parameters"]
