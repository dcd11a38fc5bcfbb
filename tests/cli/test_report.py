"""``hf-geosharp report``: what it reads, where it writes, streams and exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.report.html_page import Page
from tests.report.results import bare, full
from tests.results import write

pytest.importorskip("matplotlib")

Run = Callable[..., Result]


@pytest.fixture
def one(tmp_path: Path) -> str:
    return str(write(tmp_path, "one", bare("me/one")))


def test_the_page_goes_to_a_file_and_stdout_stays_empty(run: Run, one: str, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    done = run("report", one, "-o", str(target))
    assert done.exit_code == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr == f"Wrote {target}.\n"
    assert Page(target.read_text(encoding="utf-8")).headings[0] == "me/one"
    assert run("report", one, "-o", str(target), "-q").stderr == ""
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


def test_the_page_goes_to_stdout(run: Run, one: str, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    run("report", one, "-o", str(target))
    done = run("report", one, "-o", "-")
    assert done.exit_code == 0
    assert done.stderr == ""
    assert done.stdout_bytes == target.read_bytes()


@pytest.mark.slow
def test_every_picture_as_png_and_svg(run: Run, tmp_path: Path) -> None:
    result = str(write(tmp_path, "one", full("me/one")))
    done = run("report", result, "--plots", str(tmp_path / "new" / "plots"))
    assert done.exit_code == 0, done.stderr
    assert done.stdout == ""
    assert "Wrote 10 pictures" in done.stderr
    folder = tmp_path / "new" / "plots"
    names = {f"{key}.{kind}" for key in ("curve", "share", "layers", "profile", "batches") for kind in ("png", "svg")}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert "Sharpness by radius, me/one" in (folder / "curve.svg").read_text(encoding="utf-8")


def test_outputs_have_a_home_too(run: Run, one: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell puts it in for ``--plots ~/x``, not for ``--plots=~/x``."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = run("report", one, "--output=~/page.html", "--plots=~/pictures")
    assert done.exit_code == 0, done.stderr
    assert run("demo", "vader-bert", "--output=~/demo").exit_code == 0
    assert {entry.name for entry in (tmp_path / "home").iterdir()} == {"page.html", "pictures", "demo"}
    assert list((tmp_path / "here").iterdir()) == []


def test_a_folder_of_several_results(run: Run, tmp_path: Path) -> None:
    # As compare writes them, and as score --json does, with something else beside them.
    folder = tmp_path / "scores"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        write(folder / name, "result", bare(f"me/{name}"))
    write(folder, "c", bare("me/c"))
    (folder / "ranking.json").write_text('{"kind": "comparison"}')
    page = tmp_path / "report.html"
    done = run("report", str(folder), "-o", str(page), "--plots", str(tmp_path / "plots"))
    assert done.exit_code == 0, done.stderr
    assert f"warning: left out {folder / 'ranking.json'}" in done.stderr
    assert "Wrote" in done.stderr
    assert Page(page.read_text(encoding="utf-8")).headings[0] == "Sharpness of 3 results"
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "me-a", "me-b", "me-c", "ranking.png", "ranking.svg",
    }  # fmt: skip


def test_a_folder_that_score_wrote(run: Run, tmp_path: Path) -> None:
    write(tmp_path, "result", bare("me/one"))
    (tmp_path / "journal-0.jsonl").write_text("{}\n")
    done = run("report", str(tmp_path), "-o", "-")
    assert done.exit_code == 0, done.stderr
    assert Page(done.stdout).headings[0] == "me/one"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "Missing argument"),
        (["one.json"], 2, "say where to write"),
        (["one.json", "-o", "none/report.html"], 1, "-o: there is no folder"),
        (["one.json", "-o", "."], 1, "-o: "),
        (["one.json", "--plots", "one.json"], 2, "is a file"),
        (["none.json", "-o", "-"], 1, "there is no file or folder none.json"),
        (["empty", "-o", "-"], 1, "empty holds no result"),
        (["broken", "-o", "-"], 1, "bad.json is not JSON"),
        (["broken/bad.json", "-o", "-"], 1, "bad.json is not the JSON of a result"),
        (["comparison.json", "-o", "-"], 1, "it holds something else (comparison). Make one with 'hf-geosharp score"),
        (["inspection.json", "-o", "-"], 1, "it holds something else (inspection)"),
        (["other.json", "-o", "-"], 1, "schema None"),
        (["edited.json", "-o", "-"], 1, "its score is not that of its curve"),
        (["one.json", "one.json", "-o", "-"], 1, "2 times"),
        (["folder", "-o", "-"], 1, "edited.json is not what a score wrote"),
    ],
)
def test_bad_input(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "broken", "folder"):
        Path(name).mkdir()
    write(tmp_path, "one", bare("one"))
    write(tmp_path, "edited", bare("two"), geodesic_sharpness=0.1)
    write(tmp_path / "folder", "edited", bare("two"), geodesic_sharpness=0.1)
    Path("broken/bad.json").write_text("{")
    Path("comparison.json").write_text(json.dumps({"schema": 1, "kind": "comparison", "ranking": []}))
    Path("inspection.json").write_text(json.dumps({"schema": 1, "sites": []}))
    Path("other.json").write_text(json.dumps({"ranking": []}))
    done = run("report", *arguments)
    assert done.exit_code == code, done.output
    assert said in done.stderr
    assert done.stdout == ""


def test_without_matplotlib_it_says_how_to_get_it(run: Run, one: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    done = run("report", one, "-o", "-")
    assert done.exit_code == 1
    assert "pip install matplotlib" in done.stderr


def test_two_models_of_one_name_are_told_apart(run: Run, tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "same", bare("me/one"))
    done = run("report", str(tmp_path / "x"), str(tmp_path / "y"), "-o", "-")
    assert done.exit_code == 0, done.stderr
    names = [heading for heading in Page(done.stdout).headings if heading.startswith("me/one (")]
    assert len(set(names)) == 2


# ---------------------------------------------------------------------------------------------------- in a real browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--allow-file-access-from-files",
    "--virtual-time-budget=5000",
)  # fmt: skip
# The page itself runs no script, so it is looked at from outside, in a frame as wide as a small phone.
_FRAME = """<!DOCTYPE html><iframe id="f" src="report.html" style="width:360px;height:800px;border:0"></iframe>
<script>addEventListener("load", () => {
  const page = document.getElementById("f").contentDocument, wide = [];
  for (const e of page.body.querySelectorAll("*"))
    if (!e.closest("svg") && e.getBoundingClientRect().right > 360.5) wide.push(e.tagName);
  const texts = [...page.querySelectorAll("svg text")].map(e => e.getBoundingClientRect().height);
  document.title = JSON.stringify({width: page.documentElement.scrollWidth, wide, smallest: Math.min(...texts),
    pictures: page.querySelectorAll("svg").length, dark: getComputedStyle(page.body).backgroundColor});
});</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it_on_a_phone_without_scrolling_sideways(run: Run, tmp_path: Path, dark: bool) -> None:
    names = ("me/" + "a-very-long-name-of-a-model" * 4, "me/b")
    for number, name in enumerate(names):
        write(tmp_path, f"r{number}", full(name, share={f"{'module.' * 12}0.attention.qk": 0.75, "w" * 90: 0.25}))
    assert run("report", str(tmp_path), "-o", str(tmp_path / "report.html")).exit_code == 0
    (tmp_path / "frame.html").write_text(_FRAME)
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = subprocess.run(
        [str(CHROMIUM), *_FLAGS, *scheme, profile, "--dump-dom", (tmp_path / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    found = json.loads(shown.split("<title>")[1].split("</title>")[0])
    assert found["wide"] == []
    assert found["width"] <= 360
    assert found["pictures"] == 11
    assert found["smallest"] > 8
    assert found["dark"] == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
