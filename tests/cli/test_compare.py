"""``hf-geosharp compare`` and ``correlate``: arguments, streams, exit codes, files and pictures."""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from hf_geosharp.errors import DataWarning, GeosharpWarning
from tests.results import result_of, write

Run = Callable[..., Result]


@pytest.fixture
def zoo(tmp_path: Path) -> list[str]:
    """Five results: the first two cannot be told apart."""
    values = {"a": [1.0, 1.2, 1.4], "b": [1.1, 1.3, 1.2], "c": [3.0, 3.2, 3.4], "d": [4.0, 4.2, 4.1], "e": [9, 9.5, 10]}
    return [str(write(tmp_path, name, result_of(name, own))) for name, own in values.items()]


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "gap.csv"
    path.write_text("model,gap\na,0.1\nb,0.3\nc,0.2\nd,0.4\ne,0.5\n")
    return str(path)


# ------------------------------------------------------------------------------------------------------------- compare


def test_the_table_says_which_neighbours_cannot_be_told_apart(run: Run, zoo: list[str]) -> None:
    done = run("compare", *zoo)
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["1", "(1-2)", "a", "1.20000", "0.7032", "to", "1.697", "0.5"] in lines
    # The paired differences of the first two are 0.1, 0.1, -0.2: Student's interval is 4.3027 times 0.1 to both sides.
    assert [line[-4:] for line in lines if line[:2] == ["2", "b"]] == [["-0.4303", "to", "0.4303", "NO"]]
    assert "1 of 4 neighbours cannot be told apart" in " ".join(done.stdout.split())
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_a_narrow_terminal_loses_no_column(run: Run, zoo: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    printed = []
    for columns in ("80", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        printed.append(run("compare", *zoo).stdout)
    assert printed[0] == printed[1]


def test_json_goes_to_stdout_alone(run: Run, zoo: list[str]) -> None:
    done = run("compare", *zoo, "--json", "-")
    found = json.loads(done.stdout)
    assert (found["schema"], found["kind"]) == (1, "comparison")
    assert [held["name"] for held in found["ranking"]][2:] == ["c", "d", "e"]


def test_csv_goes_to_stdout_alone(run: Run, zoo: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("compare", *zoo, "--csv", "-")
    assert done.exit_code == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert [row["name"] for row in rows][2:] == ["c", "d", "e"]
    assert list(tmp_path.glob("-")) == []
    assert run("compare", *zoo, "--csv", "-", "--json", "-").exit_code == 2


def test_files_and_pictures(run: Run, zoo: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / f"{name}.png" for name in ("one", "two")]
    for picture in pictures:
        done = run("compare", *zoo, "--csv", str(tmp_path / "r.csv"), "--plot", str(picture), "-q")
        assert done.exit_code == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text())))
    assert [row["apart_from_next"] for row in rows] == ["False", "True", "True", "True", ""]
    assert pictures[0].read_bytes()[:4] == b"\x89PNG"
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_what_was_forced_together_is_marked_in_every_output(run: Run, zoo: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    odd = str(write(tmp_path, "odd", result_of("odd", [2.0, 2.5, 2.6], rho=0.5)))
    refused = run("compare", *zoo, odd)
    assert refused.exit_code == 2
    assert "odd: rho 0.5 here, 0.1 in a" in refused.stderr
    picture, rows = tmp_path / "p.svg", tmp_path / "r.csv"
    done = run(
        "compare", *zoo, odd, "--force", "--plot", str(picture), "--csv", str(rows), "--json", str(tmp_path / "j")
    )
    assert done.exit_code == 0, done.stderr
    assert "FORCED" in done.stdout
    assert "rho 0.5 here" in done.stdout
    assert "FORCED" in picture.read_text()
    assert all("rho 0.5" in row["forced"] for row in csv.DictReader(io.StringIO(rows.read_text())))
    assert json.loads((tmp_path / "j").read_text())["forced"] == ["odd: rho 0.5 here, 0.1 in a"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["one.json"], 2, "at least two models"),
        (["one.json", "one.json"], 1, "2 times"),
        (["one.json", "none.json"], 1, "no file or folder"),
        (["one.json", "two.json", "--rank-by", "flatness"], 2, "sharpness, base_loss"),
        (["one.json", "two.json", "--csv", "no/where.csv"], 1, "--csv: there is no folder"),
        (["one.json", "two.json", "--csv", "."], 1, "--csv: "),
        (["one.json", "two.json", "--plot", "p.gif"], 2, "ends in none of"),
        (["one.json", "bad.json"], 1, "bad.json is not the JSON of a result"),
        (["one.json", "./none"], 1, "no folder ./none"),
        ([], 2, "Missing argument"),
    ],
)
def test_bad_input(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "one", result_of("one", [1.0, 2.0]))
    write(tmp_path, "two", result_of("two", [1.0, 2.5]))
    Path("bad.json").write_text("{")
    done = run("compare", *arguments)
    assert done.exit_code == code, done.output
    assert said in done.stderr
    assert done.stdout == ""


def test_no_input_is_written_over(run: Run, zoo: list[str], table: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "scores" / "one").mkdir(parents=True)
    folder = write(tmp_path / "scores" / "one", "result", result_of("one", [1.0, 2.0]))
    (tmp_path / "link.json").symlink_to(zoo[0])
    before = {path: path.read_bytes() for path in (*map(Path, zoo), folder, Path(table))}
    link = str(tmp_path / "link.json")
    for line in (
        ["compare", *zoo, "--json", zoo[0]],
        ["compare", *zoo, "--csv", link],
        ["compare", link, *zoo[1:], "--csv", zoo[0]],
        ["compare", *zoo, str(folder.parent), "--json", str(folder)],
        ["report", *zoo, "-o", zoo[4]],
        ["correlate", *zoo, "--target", table, "--json", zoo[1]],
        ["correlate", *zoo, "--target", table, "--json", table],
        ["compare", *zoo, str(folder.parent.parent), "--csv", str(folder)],
        ["report", str(folder.parent.parent), "-o", str(folder)],
        ["card", str(tmp_path), "--result", zoo[0], "--to", zoo[0]],
        ["card", str(tmp_path), "--data", table, "--to", table],
        ["score", "m", "--data", table, "--json", table],
        ["inspect", "m", "--data", table, "--json", table],
        ["inspect", "m", "--layout", zoo[0], "--json", zoo[0]],
        ["compare", "m", "n", "--data", table, "--csv", table],
    ):
        done = run(*line)
        assert done.exit_code == 2, line
        assert "is an input, which would be lost" in done.stderr
    assert {path: path.read_bytes() for path in before} == before


def test_a_launched_world_is_refused(run: Run, zoo: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("compare", *zoo)
    assert done.exit_code == 2
    assert "--processes N --json FILE" in done.stderr


def test_the_options_of_a_score_arrive(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_geosharp import comparison
    from tests.results import many

    calls: list[Any] = []

    def stand_in(models: Any, **arguments: Any) -> Any:
        calls.append((models, arguments))
        return comparison.compare(many(a=[1.0, 2.0], b=[2.0, 3.0]))

    monkeypatch.setattr(comparison, "compare_pretrained", stand_in)
    line = "m n@v1 --data d --rho 0.2 --samples 8 --output o --rank-by adaptive --baselines --revision r --force"
    done = run("compare", *line.split())
    assert done.exit_code == 0, done.output
    models, arguments = calls[0]
    assert models == ("m", "n@v1")
    expected = {"data": "d", "rho": [0.2], "samples": 8, "output": "o", "rank_by": "adaptive", "force": True}
    assert {name: arguments[name] for name in expected} == expected
    assert (arguments["baselines"], arguments["revision"]) == (("adaptive",), "r")
    assert not {"shard", "timeout"} & set(arguments)


def test_what_is_about_the_data_is_said_once_and_what_is_about_a_model_each_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_geosharp import comparison
    from tests.results import many

    def stand_in(models: Any, *, told: Any, **_: Any) -> Any:
        for model in models:
            told(model)
            # Others change the filters in between, which makes Python forget what it has shown.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
            warnings.warn("few rows", DataWarning, stacklevel=1)
            warnings.warn("symmetry dropped", GeosharpWarning, stacklevel=1)
        return comparison.compare(many(a=[1.0, 2.0], b=[2.0, 3.0]))

    monkeypatch.setattr(comparison, "compare_pretrained", stand_in)
    said = ["m", "warning: few rows", "warning: symmetry dropped", "n", "warning: symmetry dropped"]
    for _ in range(2):
        assert run("compare", "m", "n").stderr.splitlines() == said


# ----------------------------------------------------------------------------------------------------------- correlate


def test_the_correlations_and_a_scatter_plot_with_names(run: Run, zoo: list[str], table: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "s.svg"
    done = run("correlate", *zoo, "--target", table, "--plot", str(picture))
    assert done.exit_code == 0, done.stderr
    assert "Kendall tau-b" in done.stdout
    assert "p: two-sided, by permutation" in " ".join(done.stdout.split())
    drawn = picture.read_text()
    assert all(f">{name}<" in drawn for name in "abcde")
    found = json.loads(run("correlate", *zoo, "--target", table, "--json", "-").stdout)
    assert (found["schema"], found["kind"], found["models"], found["target"]) == (1, "correlation", 5, "gap")
    assert found["statistics"][0]["exact"] is True


def test_forced_results_are_marked_there_too(run: Run, zoo: list[str], table: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    zoo[4] = str(write(tmp_path, "e", result_of("e", [9.0, 9.5, 10.0], seed=9)))
    refused = run("correlate", *zoo, "--target", table)
    assert refused.exit_code == 2
    assert "e: seed 9 here, 0 in a" in refused.stderr
    picture = tmp_path / "s.svg"
    done = run("correlate", *zoo, "--target", table, "--force", "--plot", str(picture))
    assert done.exit_code == 0, done.stderr
    assert "FORCED" in done.stdout
    assert "FORCED" in picture.read_text()


def test_bad_targets(run: Run, zoo: list[str], table: str, tmp_path: Path) -> None:
    short = tmp_path / "short.csv"
    short.write_text("model,gap\na,1\nb,2\nc,3\nd,4\nf,5\n")
    done = run("correlate", *zoo, "--target", str(short))
    assert done.exit_code == 1
    assert "no value for e. It has f" in done.stderr
    assert run("correlate", *zoo[:3], "--target", table).exit_code == 2
    assert run("correlate", *zoo, "--target", "accuracy").exit_code == 2
    assert run("correlate", *zoo).exit_code == 2
    done = run("correlate", *zoo, "--target", table, "--by", "adaptive")
    assert done.exit_code == 2
    assert "score with baselines (--baselines) to have more" in done.stderr
    assert run("correlate", *zoo, "--target", "model-index:f1").exit_code in (1, 4)
