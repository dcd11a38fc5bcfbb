"""``hf-geosharp score``: arguments, exit codes, and what goes to which stream."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import Result

from hf_geosharp import errors
from hf_geosharp.cli import progress
from hf_geosharp.sharpness.result import SharpnessResult

Run = Callable[..., Result]


def test_without_a_model_scores_the_demo_and_says_so(run: Run, scoring: Any) -> None:
    done = run("score")
    assert done.exit_code == 0
    assert scoring.calls[0]["model_id"] == "demo:digits-vit"
    assert "demo:digits-vit" in done.stderr
    assert "0.0123457" in done.stdout


def test_quiet_says_nothing_on_stderr(run: Run, scoring: Any) -> None:
    done = run("score", "-q")
    assert done.stderr == ""
    assert "0.0123457" in done.stdout


def test_defaults(run: Run, scoring: Any) -> None:
    run("score", "some/model")
    call = scoring.calls[0]
    columns, world = call.pop("columns"), call.pop("world")
    assert (world.rank, world.size) == (0, 1)
    assert (columns.text, columns.text_pair, columns.image, columns.label) == (None, None, None, None)
    assert call == {
        "model_id": "some/model",
        "data": None,
        "data_config": None,
        "split": None,
        "task": "auto",
        "metric": "inv",
        "geodesic": None,
        "symmetries": "full",
        "rho": None,
        "ascent": "auto",
        "steps": 20,
        "max_length": None,
        "starts": 1,
        "samples": 1024,
        "batch_size": 128,
        "seed": 0,
        "average": False,
        "baselines": (),
        "device": "auto",
        "dtype": "float32",
        "revision": None,
        "token": None,
        "trust_remote_code": False,
        "label_map": None,
        "labels": "data",
        "allow_missing": False,
        "micro_batch": None,
        "gradient_checkpointing": False,
        "compile": False,
        "params": "all",
        "per": None,
        "profile": False,
        "shard": "batches",
        "on_nan": "stop",
        "output": None,
        "timeout": 1800.0,
        "progress": None,
    }


def test_the_average_case_searches_nothing(run: Run, scoring: Any) -> None:
    assert run("score", "m", "--average", "--steps", "4").exit_code == 0
    assert (scoring.calls[0]["average"], scoring.calls[0]["steps"]) == (True, 4)
    done = run("score", "m", "--average", "--ascent", "auto")
    assert done.exit_code == 2
    assert "--ascent is for the worst case" in done.output


def test_every_option_arrives(run: Run, scoring: Any) -> None:
    line = (
        "score m --data d --data-config c --split test --task seq2seq --metric mix --geodesic exact --symmetries paper "
        "--rho 0.1 --rho 1e-3 --ascent apgd --steps 3 --starts 2 --max-length 64 --samples 4 --batch-size 2 --seed 7 "
        "--baselines --labels model --device cuda:1 --dtype float64 --revision r --token t "
        "--trust-remote-code --allow-missing --text-column a --micro-batch 3 --gradient-checkpointing --compile "
        "--params lora --per head --profile --shard samples --on-nan skip --output o "
        "--timeout 60 --text-pair-column b --image-column i --label-column l --label-map"
    )
    done = run(*line.split(), '{"neg": 0, "pos": "POSITIVE"}')
    assert done.exit_code == 0, done.output
    call = scoring.calls[0]
    columns, world = call.pop("columns"), call.pop("world")
    assert (world.rank, world.size) == (0, 1)
    assert (columns.text, columns.text_pair, columns.image, columns.label) == ("a", "b", "i", "l")
    assert call == {
        "model_id": "m",
        "data": "d",
        "data_config": "c",
        "split": "test",
        "task": "seq2seq",
        "metric": "mix",
        "geodesic": "exact",
        "symmetries": "paper",
        "rho": [0.1, 1e-3],
        "ascent": "apgd",
        "steps": 3,
        "max_length": 64,
        "starts": 2,
        "samples": 4,
        "batch_size": 2,
        "seed": 7,
        "average": False,
        "baselines": ("adaptive",),
        "device": "cuda:1",
        "dtype": "float64",
        "revision": "r",
        "token": "t",
        "trust_remote_code": True,
        "label_map": {"neg": 0, "pos": "POSITIVE"},
        "labels": "model",
        "allow_missing": True,
        "micro_batch": 3,
        "gradient_checkpointing": True,
        "compile": True,
        "params": "lora",
        "per": "head",
        "profile": True,
        "shard": "samples",
        "on_nan": "skip",
        "output": "o",
        "timeout": 60.0,
        "progress": None,
    }


@pytest.mark.parametrize(
    "args",
    [
        ["--rho", "0"],
        ["--rho", "-1"],
        ["--rho", "nan"],
        ["--rho", "inf"],
        ["--rho", "much"],
        ["--steps", "0"],
        ["--starts", "0"],
        ["--samples", "0"],
        ["--batch-size", "0"],
        ["--seed", "-1"],
        ["--micro-batch", "0"],
        ["--micro-batch", "many"],
        ["--shard", "layers"],
        ["--per", "block"],
        ["--params", "adapter"],
        ["--on-nan", "hope"],
        ["--timeout", "0"],
        ["--processes", "0"],
        ["--metric", "flat"],
        ["--geodesic", "third"],
        ["--dtype", "float16"],
        ["--labels", "mine"],
        ["--label-map", "{not json"],
        ["--label-map", "[1]"],
        ["--label-map", "{}"],
        ["--label-map", '{"a": 1.5}'],
        ["--label-map", '{"a": true}'],
        ["--no-such-option"],
        ["one", "two"],
    ],
)
def test_wrong_usage(run: Run, scoring: Any, args: list[str]) -> None:
    done = run("score", *args)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Error:" in done.stderr
    assert scoring.calls == []


class HfHubHTTPError(OSError):
    """Plays the class of this name in huggingface_hub."""


HfHubHTTPError.__module__ = "huggingface_hub.errors"


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.GeosharpError("this is wrong"), 1),
        (errors.DataError("this is wrong"), 1),
        (errors.ModelError("this is wrong"), 1),
        (errors.UsageError("this is wrong"), 2),
        (errors.UnsupportedModelError("this is wrong"), 3),
        (errors.HubError("this is wrong"), 4),
        (HfHubHTTPError("this is wrong"), 4),
        (ConnectionError("this is wrong"), 4),
        (_caused(OSError("this is wrong"), HfHubHTTPError("404")), 4),
        (ValueError("this is wrong"), 1),
        (ValueError("this is\nwrong"), 1),
    ],
)
def test_failures_end_with_message_and_code(run: Run, scoring: Any, error: Exception, code: int) -> None:
    scoring.fails_with(error)
    done = run("score", "m")
    assert done.exit_code == code
    assert done.stdout == ""
    assert "this is wrong" in done.stderr
    assert "Traceback" not in done.stderr
    assert ("--debug" in done.stderr) == (not isinstance(error, errors.GeosharpError))


def test_out_of_memory_says_what_helps(run: Run, scoring: Any) -> None:
    scoring.fails_with(MemoryError())
    done = run("score", "m")
    assert done.exit_code == 1
    assert "--batch-size" in done.stderr


def test_interrupt(run: Run, scoring: Any, tmp_path: Path) -> None:
    scoring.fails_with(KeyboardInterrupt())
    done = run("score", "m", "--json", str(tmp_path / "result.json"))
    assert done.exit_code == 130
    assert done.stdout == ""
    assert "Interrupted" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [["--debug", "score", "m"], ["score", "m", "--debug"]])
def test_debug_shows_the_traceback(run: Run, scoring: Any, args: list[str]) -> None:
    scoring.fails_with(errors.HubError("offline"))
    done = run(*args)
    assert done.exit_code == 4
    assert "Traceback" in done.stderr


def test_debug_by_environment(run: Run, scoring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DEBUG", "1")
    scoring.fails_with(ValueError("odd"))
    done = run("score", "m")
    assert done.exit_code == 1
    assert "Traceback" in done.stderr


def test_json_on_stdout_is_pure(run: Run, scoring: Any, result_with: Callable[..., SharpnessResult]) -> None:
    def behaviour() -> SharpnessResult:
        warnings.warn("something to know", errors.GeosharpWarning, stacklevel=1)
        print("a library's chatter")
        return result_with(model={"id": "modèle/π"})

    scoring.behaviour = behaviour
    done = run("score", "--json", "-")
    assert done.exit_code == 0
    assert SharpnessResult.from_dict(json.loads(done.stdout_bytes)) == result_with(model={"id": "modèle/π"})
    assert "warning: something to know" in done.stderr.splitlines()
    assert "a library's chatter" in done.stderr.splitlines()


def test_json_file_and_table(run: Run, scoring: Any, tmp_path: Path, result_with: Any) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    done = run("score", "--json", str(target))
    assert done.exit_code == 0
    assert "0.0123457" in done.stdout
    assert SharpnessResult.from_dict(json.loads(target.read_text())) == result_with()
    assert list(tmp_path.iterdir()) == [target]


def test_json_through_a_link_keeps_the_link(run: Run, scoring: Any, tmp_path: Path) -> None:
    target, link = tmp_path / "result.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    assert run("score", "--json", str(link)).exit_code == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["schema"] == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
def test_a_score_that_cannot_be_written_is_shown_all_the_same(run: Run, scoring: Any) -> None:
    done = run("score", "--json", "/dev/full")
    assert done.exit_code == 1
    assert "Geodesic sharpness" in done.stdout
    assert "--json: cannot write /dev/full" in done.stderr


def test_json_to_a_device_leaves_the_device(run: Run, scoring: Any) -> None:
    assert run("score", "--json", os.devnull).exit_code == 0
    assert not Path(os.devnull).is_file()


def test_failure_leaves_the_old_json(run: Run, scoring: Any, tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    scoring.fails_with(errors.ModelError("NaN"))
    assert run("score", "m", "--json", str(target)).exit_code == 1
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("target", ["missing/result.json", "."])
def test_json_target_is_checked_before_scoring(run: Run, scoring: Any, tmp_path: Path, target: str) -> None:
    done = run("score", "--json", str(tmp_path / target))
    assert done.exit_code == 1
    assert "--json" in done.stderr
    assert scoring.calls == []


def test_only_warnings_of_the_package_are_shown(run: Run, scoring: Any, result_with: Any) -> None:
    def behaviour() -> SharpnessResult:
        warnings.warn("two\nlines", errors.GeosharpWarning, stacklevel=1)
        warnings.warn("noise", FutureWarning, stacklevel=1)
        result: SharpnessResult = result_with()
        return result

    scoring.behaviour = behaviour
    assert run("score", "m").stderr == "warning: two lines\n"
    with pytest.warns(FutureWarning, match="noise"):
        run("score", "m", "--debug")


def test_no_output_is_written_over_the_model(run: Run, scoring: Any, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "score.json"):
        (tmp_path / name).write_text("{}")
        for command in (["score"], ["inspect"], ["compare", "demo:vader-bert"]) if name != "score.json" else ():
            done = run(*command, str(tmp_path), "--json", str(tmp_path / name))
            assert (done.exit_code, "is a part of the model" in done.stderr) == (2, True), (command, done.stderr)
        assert (tmp_path / name).read_text() == "{}"
    assert scoring.calls == []
    # A score that an earlier run has put there is replaced, as anywhere else.
    assert run("score", str(tmp_path), "--json", str(tmp_path / "score.json")).exit_code == 0
    assert len(scoring.calls) == 1


def test_libraries_are_hushed_but_not_over_the_user(
    run: Run, scoring: Any, monkeypatch: pytest.MonkeyPatch, result_with: Any
) -> None:
    monkeypatch.setenv("DATASETS_VERBOSITY", "info")
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.delenv(name, raising=False)
    seen: dict[str, str] = {}

    def behaviour() -> SharpnessResult:
        seen.update(os.environ)
        result: SharpnessResult = result_with()
        return result

    scoring.behaviour = behaviour
    run("score", "m")
    assert seen["TRANSFORMERS_VERBOSITY"] == "error"
    assert seen["DATASETS_VERBOSITY"] == "info"
    assert seen["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"


class TestProgress:
    @pytest.fixture
    def terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)

    def test_wanted_on_a_terminal_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stderr.isatty", lambda: False)
        assert not progress.wanted(quiet=False)

    @pytest.mark.usefixtures("terminal")
    def test_wanted_unless_somebody_says_no(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert progress.wanted(quiet=False)
        assert not progress.wanted(quiet=True)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        assert not progress.wanted(quiet=False)

    def test_draws_to_stderr_and_is_gone_after_a_failure(self, capsys: pytest.CaptureFixture[str]) -> None:
        class State:
            stage, batch, batches, step, steps, rho, value, done, total, ranks = (
                "score",
                1,
                2,
                1,
                20,
                0.05,
                0.1,
                3,
                42,
                1,
            )

        with pytest.raises(KeyboardInterrupt), progress.shown(True) as update:  # noqa: PT012
            assert update is not None
            update(State())  # type: ignore[arg-type]
            raise KeyboardInterrupt
        assert capsys.readouterr().out == ""


def test_choices_are_those_of_the_package() -> None:
    """They stand by themselves, so that --help need not import torch."""
    from hf_geosharp.cli import options
    from hf_geosharp.geometry.metrics import METRICS, PAIR_METRICS, Order
    from hf_geosharp.parallel import TIMEOUT
    from hf_geosharp.sharpness import choices
    from hf_geosharp.sharpness.settings import CLIMBS
    from hf_geosharp.symmetry.find import PRESETS

    assert set(choices.METRICS) == set(METRICS)
    assert {name for name, metric in choices.METRICS.items() if metric.paired} == set(PAIR_METRICS)
    assert get_args(Order) == choices.GEODESICS
    assert set(choices.SYMMETRIES) == set(PRESETS)
    assert ("auto", *CLIMBS) == choices.ASCENTS
    assert set(options.BASELINES) <= set(choices.BASELINES)
    assert options.TIMEOUT == TIMEOUT


@pytest.mark.parametrize(
    ("line", "both"),
    [
        ("score m --json SAME --card SAME", "--json and --card"),
        ("compare a b --json SAME --csv LINK", "--json and --csv"),
        ("compare a b --csv SAME.svg --plot SAME.svg", "--csv and --plot"),
        ("correlate a --target t.csv --json SAME.svg --plot SAME.svg", "--json and --plot"),
        ("inspect m --json SAME.svg --plot SAME.svg", "--json and --plot"),
    ],
)
def test_two_options_do_not_write_one_file(run: Run, scoring: Any, tmp_path: Path, line: str, both: str) -> None:
    """The card was merged into the JSON that had just been written, and a table replaced it."""
    (tmp_path / "same").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "same")
    args = line.replace("SAME", str(tmp_path / "same")).replace("LINK", str(tmp_path / "link")).split()
    done = run(*args)
    assert done.exit_code == 2
    assert f"{both} would both write" in done.stderr
    assert scoring.calls == []
    assert (tmp_path / "same").read_text() == "{}"


def test_the_data_are_no_card(run: Run, scoring: Any, tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("text,label\na,0\n")
    done = run("score", "m", "--data", str(data), "--card", str(data))
    assert done.exit_code == 2
    assert "is an input, which would be lost" in done.stderr
    assert scoring.calls == []


@pytest.mark.parametrize("line", ["score m --json FILE", "compare m n --csv FILE", "card demo:digits-vit --to FILE"])
def test_a_file_of_layouts_is_not_written_over(run: Run, scoring: Any, line: str, tmp_path: Path) -> None:
    file = tmp_path / "layouts.md"
    file.write_text('{"schema": 1, "layouts": []}')
    done = run(*line.replace("FILE", str(file)).split(), "--layout", str(file))
    assert done.exit_code == 2, done.stderr
    assert "is an input, which would be lost" in done.stderr
    assert scoring.calls == []


def test_into_a_device_several_may_write() -> None:
    from hf_geosharp.cli import files

    files.check_apart(("--json", "/dev/null"), ("--csv", "/dev/null"), ("--plot", None))
