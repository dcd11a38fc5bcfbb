"""``hf-geosharp inspect``: options, outputs, exit codes, and what the tree and the tables show at 80 columns."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console

from hf_geosharp import errors, figures, heatmaps, inspection
from hf_geosharp.cli import render_inspect
from hf_geosharp.inspection import Inspection
from hf_geosharp.site_report import SiteReport, Slice, Totals
from hf_geosharp.symmetry.health import HeadHealth
from hf_geosharp.symmetry.views import Axis

Run = Callable[..., Result]

PARAMETERS = signature(inspection.inspect_pretrained).parameters


def site(module: str, kind: str = "qk", **changes: Any) -> SiteReport:
    weights = [f"{module}.{r}.weight" for r in ("query", "key")]
    result = SiteReport(
        kind=kind,
        module=module,
        name=f"{module}.{kind}",
        group="GL(64)",
        copies=12,
        dim=64,
        total_dim=12 * 64**2,
        parameters=weights,
        slices=[
            Slice(
                name, factor, "", "(n h) i", [0, 0], [Axis("n", 12, 0, 64), Axis("h", 64, 0, 1), Axis("i", 768, 1, 1)]
            )
            for name, factor in zip(weights, "gh", strict=True)
        ],
        deviation=3e-15,
        control=0.5,
        status="holds",
    )
    return dataclasses.replace(result, **changes)


def head(module: str, number: int, kind: str = "qk", **changes: Any) -> HeadHealth:
    result = HeadHealth(f"{module}.{kind}", module, kind, number, 4, 4, 10.0, 20.0, 1.5, (2.0, 1.0, 0.5, 0.1))
    return dataclasses.replace(result, **changes)


def make(**changes: Any) -> Inspection:
    modules = [f"bert.encoder.layer.{i}.attention" for i in range(12)]
    sites = [site(m, kind) for m in modules for kind in ("qk", "vo")]
    result = Inspection(
        model={"id": "owner/bert", "class": "BertModel", "parameters": 110_000_000},
        preset="full",
        inputs="2 batches made up from the config",
        deviation=3e-15,
        control=0.5,
        sites=sites,
        totals=Totals(110_000_000, 1_179_648, 108_820_352, {"qk": 589_824, "vo": 589_824}),
        unrecognised=[],
        dropped=[],
        health=[head(m, i, kind) for m in modules for kind in ("qk", "vo") for i in range(3)],
        versions={"hf-geosharp": "0.1.0"},
    )
    return dataclasses.replace(result, **changes)


def text_of(result: Inspection, *, everything: bool = False, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(render_inspect.report(result, everything=everything))
    return stream.getvalue()


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").replace("├──", " ").replace("└──", " ").split())


class Stub:
    """Plays ``inspect_pretrained``."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.behaviour: Callable[[], Inspection] = make

    def __call__(self, model_id: str, **arguments: Any) -> Inspection:
        self.calls.append({"model_id": model_id} | arguments)
        return self.behaviour()

    def fails_with(self, error: BaseException) -> None:
        def behaviour() -> Inspection:
            raise error

        self.behaviour = behaviour


@pytest.fixture
def inspecting(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub()
    monkeypatch.setattr(inspection, "inspect_pretrained", stub)
    return stub


# ------------------------------------------------------------------------------------------------------- the command


def test_every_option_is_an_argument_of_the_function_with_its_default(inspecting: Stub, run: Run) -> None:
    assert run("inspect", "m").exit_code == 0
    (call,) = inspecting.calls
    assert set(call) <= set(PARAMETERS)
    assert set(PARAMETERS) - set(call) == set()
    for name in set(call) - {"model_id", "columns"}:
        assert call[name] == PARAMETERS[name].default, name


def test_options_reach_the_function(inspecting: Stub, run: Run) -> None:
    done = run(
        "inspect", "m", "--random-init", "--no-verify", "--no-health", "--data", "d", "--data-config", "c", "--split",
        "s", "--text-column", "body", "--task", "causal-lm", "--revision", "r", "--token", "t", "--trust-remote-code",
        "--device", "cpu", "--dtype", "float64", "--seed", "3", "--symmetries", "attention", "--allow-missing",
        "--no-cache",
    )  # fmt: skip
    assert done.exit_code == 0
    (call,) = inspecting.calls
    assert call.pop("columns").named() == {"text": "body"}
    assert call.pop("progress") is None
    assert call == {
        "model_id": "m", "random_init": True, "verify": False, "health": False, "data": "d", "data_config": "c",
        "split": "s", "task": "causal-lm", "revision": "r", "token": "t", "trust_remote_code": True, "device": "cpu",
        "dtype": "float64", "seed": 3, "preset": "attention", "allow_missing": True,
        "layouts": (), "cached": False,
    }  # fmt: skip


def test_without_a_model_the_demo_is_inspected(inspecting: Stub, run: Run) -> None:
    done = run("inspect")
    assert inspecting.calls[0]["model_id"] == "demo:digits-vit"
    assert "No MODEL given" in done.stderr
    assert "No MODEL given" not in run("inspect", "--quiet").stderr


def test_json_on_stdout_is_pure(inspecting: Stub, run: Run) -> None:
    def behaviour() -> Inspection:
        warnings.warn("something to know", errors.GeosharpWarning, stacklevel=1)
        print("a library's chatter")
        return make()

    inspecting.behaviour = behaviour
    done = run("inspect", "m", "--json", "-")
    assert Inspection.from_dict(json.loads(done.stdout_bytes)) == make()
    assert done.stderr.splitlines() == ["warning: something to know", "a library's chatter"]


def test_json_file_and_tree(inspecting: Stub, run: Run, tmp_path: Path) -> None:
    target = tmp_path / "inspection.json"
    done = run("inspect", "m", "--json", str(target))
    assert Inspection.from_dict(json.loads(target.read_text())) == make()
    assert "GL(64) x 12" in done.stdout


@pytest.mark.parametrize("ending", ["png", "svg", "PDF"])
@pytest.mark.slow
def test_the_heat_map_is_the_same_file_each_time(inspecting: Stub, run: Run, tmp_path: Path, ending: str) -> None:
    target = tmp_path / f"heads.{ending}"
    done = run("inspect", "m", "--plot", str(target))
    assert done.exit_code == 0, done.stderr
    assert str(target) in done.stderr
    start = {"png": b"\x89PNG", "svg": b"<?xml", "PDF": b"%PDF"}[ending]
    first = target.read_bytes()
    assert first.startswith(start)
    assert run("inspect", "m", "--plot", str(target)).exit_code == 0
    assert target.read_bytes() == first
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["--plot", "a.gif"], 2, ".png, .svg, .pdf"),
        (["--plot", "nowhere/a.png"], 1, "no folder nowhere"),
        (["--plot", "a.png", "--no-health"], 2, "--no-health"),
        (["--plot", "a.png", "--random-init"], 2, "--random-init"),
        (["--json", "nowhere/a.json"], 1, "no folder"),
        (["--dtype", "bfloat16"], 2, "float32"),
        (["--symmetries", "most"], 2, "full"),
        (["two"], 2, "two"),
    ],
)
def test_wrong_usage_is_told_before_the_work(
    inspecting: Stub, run: Run, args: list[str], code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("inspect", "m", *args)
    assert done.exit_code == code
    assert text in done.stderr
    assert done.stdout == ""
    assert inspecting.calls == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_layouts_is_read(inspecting: Stub, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    assert run("inspect", "m", "--layout", str(path)).exit_code == 2
    path.write_text("{}")
    done = run("inspect", "m", "--layout", str(path))
    assert done.exit_code == 2
    assert "layout.json" in done.stderr
    assert inspecting.calls == []
    layout = {"name": "mine", "q": "a", "k": "b", "v": "c", "o": "d"}
    path.write_text(json.dumps({"schema": 1, "layouts": [layout]}))
    assert run("inspect", "m", "--layout", str(path)).exit_code == 0
    assert [x.name for x in inspecting.calls[0]["layouts"]] == ["mine"]


def test_without_matplotlib_a_heat_map_says_how_to_get_it(
    inspecting: Stub, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("inspect", "m", "--plot", str(tmp_path / "a.png"))
    assert done.exit_code == 1
    assert "pip install" in done.stderr
    assert inspecting.calls == []
    assert run("inspect", "m").exit_code == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("this is wrong"), 2),
        (errors.ModelError("this is wrong"), 1),
        (errors.UnsupportedModelError("this is wrong"), 3),
        (errors.HubError("this is wrong"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_failures_end_with_message_and_code(
    inspecting: Stub, run: Run, tmp_path: Path, error: BaseException, code: int
) -> None:
    inspecting.fails_with(error)
    done = run("inspect", "m", "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png"))
    assert done.exit_code == code
    assert done.stdout == ""
    assert "this is wrong" in done.stderr or code == 130
    assert list(tmp_path.iterdir()) == []


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from hf_geosharp.cli import main\n"
        "main(['inspect', '--help'], standalone_mode=False)\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'rich', 'matplotlib') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_demo_from_end_to_end(run: Run) -> None:
    done = run("inspect", "demo:digits-vit", "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    seen = flat(done.stdout)
    assert re.search(r"layers?\.0-1 \(2 alike\)", seen)  # 4.x and 5.x of transformers name them differently
    assert "qk GL(8) x 4, dim 256 holds" in seen
    assert "parameters 18,218" in seen
    assert "Health of the heads" in seen


# ------------------------------------------------------------------------------------------------ tree and tables


def test_layers_that_are_alike_are_one() -> None:
    text = text_of(make())
    assert max(map(len, text.splitlines())) <= 80
    seen = flat(text)
    assert "owner/bert BertModel" in seen
    assert "bert.encoder.layer 0-11 (12 alike)" in seen.replace("layer.0-11", "layer 0-11")
    assert seen.count("GL(64) x 12, dim 49,152 holds 3.0e-15, control 0.5") == 2
    assert "query.weight <> key.weight" in seen
    assert "symmetry 1,179,648 dimensions (qk 589,824, vo 589,824)" in seen
    assert "effective 108,820,352 parameters" in seen
    assert "outputs change by 3.0e-15 along the orbit, by 0.5 when the symmetry is broken on purpose" in seen


def test_all_shows_every_layer_and_head() -> None:
    text = text_of(make(), everything=True)
    assert "alike" not in text
    assert text.count("GL(64) x 12") == 24
    rows = [line.split() for line in text.partition("Health")[2].splitlines()]
    assert ["11", "vo", "2", "4/4", "20", "1.5", "2.29"] in rows


def test_the_worst_of_those_alike_is_shown() -> None:
    sites = [site(f"h.{i}.attn", deviation=10.0 ** (i - 9), control=0.1 * (i + 1)) for i in range(3)]
    assert "holds 1.0e-07, control 0.1" in flat(text_of(make(sites=sites)))


def test_layers_that_differ_stay_apart() -> None:
    sites = [site(f"h.{i}.attn", group="GL(1,C)" if i == 1 else "GL(64)") for i in range(4)]
    sites[3] = dataclasses.replace(sites[3], status="failed", deviation=0.2)
    seen = flat(text_of(make(sites=sites)))
    assert "0, 2 (2 alike)" in seen
    assert "1.attn" in seen
    assert "failed 2.0e-01" in seen


def test_parts_of_fused_parameters_are_shown() -> None:
    fused = Slice("h.0.attn.c.weight", "g", "[:, 0:32]", "i (n h)", [0, 0], [])
    seen = flat(text_of(make(sites=[site("h.0.attn", slices=[fused], parameters=["h.0.attn.c.weight"])])))
    assert "c.weight[:, 0:32]" in seen


def test_what_is_wrong_stands_out() -> None:
    low = head("l.0", 2, rank=3, condition_g=None, flags=("rank-deficient",))
    dead = head("l.1", 0, "vo", rank=0, balance=None, condition_h=None, singular_values=(0.0,) * 4, flags=("dead",))
    seen = flat(
        text_of(
            make(
                health=[head("l.0", 1), low, head("l.1", 1, "vo"), dead],
                dropped=["l.3.qk: outputs move by 0.1"],
                unrecognised=["l.4.mixer: [odd]"],
                warnings=["a\nb"],
            )
        )
    )
    assert "0 qk 2 3-4/4 20 1.5 2.29 1 rank-deficient" in seen
    assert "1 vo 2 0-4/4 20 1.5 1.15 (to 2.29) 1 dead" in seen
    assert "Flagged heads (2) - l.0 qk head 2: rank-deficient (rank 3 of 4) - l.1 vo head 0: dead (rank 0 of 4)" in seen
    assert "Not recognised (1) - l.4.mixer: [odd]" in seen
    assert "Dropped (1) - l.3.qk: outputs move by 0.1" in seen
    assert "Warnings - a b" in seen


def test_nothing_found_and_nothing_verified() -> None:
    empty = make(sites=[], health=[], deviation=None, control=None, totals=Totals(20, 0, 20, {}))
    seen = flat(text_of(empty))
    assert "symmetry 0 dimensions effective 20 parameters" in seen
    assert "none: not verified; found on 2 batches made up from the config" in seen
    assert "Health" not in seen


def test_a_site_of_the_model_itself() -> None:
    seen = flat(text_of(make(sites=[site("", parameters=["q"], slices=[])])))
    assert "owner/bert BertModel qk GL(64) x 12" in seen


def test_names_are_not_markup() -> None:
    assert "[bold]x" in text_of(make(model={"id": "[bold]x", "class": "C"}))


# ---------------------------------------------------------------------------------------------------------- heat map


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        ([], []),
        (["h.3.attn"], ["3"]),
        (["attn"], ["attn"]),
        (["h.0.attn", "h.1.attn"], ["0", "1"]),
        (["e.0.self", "d.0.self", "d.0.cross"], ["e.0.self", "d.0.self", "d.0.cross"]),
        (["a.b", "a.b.c"], ["a.b", "c"]),
    ],
)
def test_labels_are_what_tells_modules_apart(names: list[str], labels: list[str]) -> None:
    assert heatmaps.short_labels(names) == labels


def test_the_heat_map_shows_every_head_of_every_layer() -> None:
    heads = [head(f"h.{i}.attn", n, kind) for i in range(60) for kind in ("qk", "vo") for n in range(2 + i % 2)]
    heads[0] = dataclasses.replace(heads[0], condition_g=None, balance=None, rank=0, flags=("dead",))
    figure = heatmaps.health_figure(heads)
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in maps] == [
        f"{kind}: {what}"
        for kind in ("query/key", "value/output")
        for what in ("balance", "condition", "rank / columns")
    ]
    balance, condition, rank = (axes.images[0].get_array() for axes in maps[:3])
    assert balance.shape == (60, 3)
    # Heads that are not there, and what has no value, are masked.
    assert balance.mask[0].tolist() == [True, False, True]
    assert condition.mask[1].tolist() == [False, False, False]
    assert (condition[1, 2], rank[0, 0], rank[1, 0]) == (20, 0, 1)
    labels = [t.get_text() for t in maps[0].get_yticklabels()]
    assert labels[:2] == ["0", "2"]
    assert len(maps[0].collections) == 1
    with pytest.raises(errors.UsageError, match="no head"):
        heatmaps.health_figure([])


def test_a_failed_write_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.png"
    target.write_bytes(b"old")
    figure = heatmaps.health_figure([head("h.0", 0)])

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    for owner, name in ((figure, "savefig"), (os, "fsync"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(errors.GeosharpError, match="No space left"):
                figures.save(figure, target)
        assert target.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [target]
