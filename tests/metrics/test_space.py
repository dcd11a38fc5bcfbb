"""The folder of the metric as a Space of the Hub: its card, its page, its test cases."""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_geosharp.errors import UsageError
from hf_geosharp.metrics.geodesic_sharpness import tests as of_the_space

FOLDER = Path(__file__).resolve().parents[2] / "metrics" / "geodesic_sharpness"
CARD = (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", of_the_space.test_cases)
@pytest.mark.slow
def test_the_test_cases(metric: Any, case: dict[str, Any]) -> None:
    arguments = {name: value for name, value in case.items() if name != "result"}
    # Written with six digits.
    assert metric.compute(**arguments) == pytest.approx(case["result"], rel=1e-5)


def test_the_folder_has_what_a_space_needs() -> None:
    assert {"geodesic_sharpness.py", "README.md", "requirements.txt", "app.py", "tests.py"} <= {
        entry.name for entry in FOLDER.iterdir()
    }
    assert (FOLDER / "requirements.txt").read_text().split() == ["hf-geosharp"]


def test_the_front_matter() -> None:
    front = yaml.safe_load(CARD.split("---\n")[1])
    assert front["sdk"] == "gradio"
    assert re.fullmatch(r"\d+\.\d+\.\d+", front["sdk_version"])
    assert (FOLDER / front["app_file"]).is_file()
    assert {"evaluate", "metric"} <= set(front["tags"])
    assert {"title", "description", "datasets", "pinned"} <= set(front)


def test_the_sections_of_the_card() -> None:
    found = re.findall(r"^#+ (.*)$", CARD, flags=re.MULTILINE)
    wanted = [
        "Metric Card for Geodesic Sharpness",
        "Metric Description",
        "How to Use",
        "Inputs",
        "Output Values",
        "Examples",
        "Limitations and Bias",
        "Citation",
        "Further References",
    ]
    assert [name for name in found if name in wanted] == wanted


@pytest.mark.slow
def test_the_examples_of_the_card_run(metric: Any, capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", CARD, flags=re.MULTILINE | re.DOTALL)
    assert len(snippets) == 3
    names: dict[str, Any] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"the card, example {number}", "exec"), names)
    assert capsys.readouterr().out.count("geodesic_sharpness") == 3


class Recorder(types.ModuleType):
    """Plays gradio: keeps what is built."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("gradio")
        self.built: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.clicks: list[tuple[Any, dict[str, Any]]] = []

    def __getattr__(self, kind: str) -> Any:
        if kind.startswith("__"):
            raise AttributeError(kind)
        recorder = self

        class Part:
            def __init__(self, *args: Any, **options: Any):
                self.args = args
                recorder.built.append((kind, args, options))

            def __enter__(self) -> Part:
                return self

            def __exit__(self, *error: object) -> None:
                return None

            def click(self, function: Any, **options: Any) -> None:
                recorder.clicks.append((function, options))

        return Part


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Recorder]:
    gradio = Recorder()
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    name = "hf_geosharp.metrics.geodesic_sharpness.app"
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name), gradio


def test_the_page_is_a_form_for_the_metric(app: tuple[Any, Recorder]) -> None:
    module, gradio = app
    [(function, wiring)] = gradio.clicks
    assert function is module.measure
    assert len(wiring["inputs"]) == module.measure.__code__.co_argcount
    assert len(wiring["outputs"]) == 2
    [text] = [args[0] for kind, args, _ in gradio.built if kind == "Markdown"]
    assert text.lstrip().startswith("# Metric Card")


def test_the_page_measures(app: tuple[Any, Recorder], metric: Any) -> None:
    module, _ = app
    value, details = module.measure(" demo:digits-vit ", "", "inv", 0, 64.0, 32.0, 2.0)
    expected = metric.compute(model_id="demo:digits-vit", samples=64, batch_size=32, steps=2)
    assert value == expected["geodesic_sharpness"]
    assert details["samples"] == 64


def test_the_page_shows_errors(app: tuple[Any, Recorder]) -> None:
    module, gradio = app
    with pytest.raises(gradio.Error, match="there is no demo 'nothing'") as caught:
        module.measure("demo:nothing", "", "inv", 0, 64, 32, 2)
    assert isinstance(caught.value.__cause__, UsageError)


def test_the_page_offers_the_metrics_there_are(app: tuple[Any, Recorder]) -> None:
    from hf_geosharp.geometry.metrics import METRICS

    assert set(app[0].METRICS) == set(METRICS)
