"""``hf-geosharp card`` and ``score --card``: which card is changed, what is printed where, and the exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from hf_geosharp import demos
from hf_geosharp.cards import card, section
from hf_geosharp.errors import DataError, HubError
from tests.cards.results import make_result
from tests.hub_stand_in import HANG, Answer, StandIn

Run = Callable[..., Result]
CARD = b"---\nlicense: mit # yes\n---\n\n# Title\n"


@pytest.fixture
def score_file(tmp_path: Path) -> str:
    path = tmp_path / "score.json"
    path.write_text(make_result().to_json(), encoding="utf-8")
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "small-bert"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_bytes(CARD)
    return folder


def test_a_result_goes_into_the_card_of_a_folder(run: Run, model: Path, score_file: str, scoring: Any) -> None:
    done = run("card", str(model), "--result", score_file)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "Wrote" in done.stderr
    assert (model / "README.md").read_bytes() == card.merge(CARD, make_result(), "small-bert")
    assert scoring.calls == []
    again = run("card", str(model), "--result", score_file)
    assert "needs no change" in again.stderr
    assert run("card", str(model / "README.md"), "--remove").exit_code == 0
    assert (model / "README.md").read_bytes() == CARD


def test_what_is_no_card_is_not_written_as_one(run: Run, model: Path, score_file: str, scoring: Any) -> None:
    """Front matter before a config or a table would leave no model and no data."""
    table = model.parent / "data.csv"
    table.write_text("text,label\nfine,1\n")
    for file in (model / "config.json", table):
        before = file.read_bytes()
        for given in (["card", str(file), "--result", score_file], ["score", str(model), "--card", str(file)]):
            done = run(*given)
            assert (done.exit_code, "is no model card" in done.stderr) == (2, True), done.stderr
        assert file.read_bytes() == before
    done = run("card", str(model), "--result", score_file, "--to", str(model / "config.json"))
    assert (done.exit_code, "is a part of the model" in done.stderr) == (2, True)
    assert (model / "config.json").read_text() == "{}"
    assert scoring.calls == []


@pytest.mark.parametrize("config", ["config.json", "adapter_config.json"])
def test_without_a_result_the_model_is_scored(run: Run, model: Path, scoring: Any, config: str) -> None:
    (model / "config.json").rename(model / config)
    for target in (model, model / "README.md"):
        assert run("card", str(target), "--metric", "mix", "--samples", "64", "-q").exit_code == 0
        call = scoring.calls.pop()
        assert (call["model_id"], call["metric"], call["samples"]) == (str(model), "mix", 64)
    assert b"0.0123457" in (model / "README.md").read_bytes()


def test_a_card_is_begun_where_none_is(run: Run, model: Path, score_file: str) -> None:
    (model / "README.md").unlink()
    assert run("card", str(model), "--result", score_file).exit_code == 0
    text = (model / "README.md").read_text(encoding="utf-8")
    assert "# small-bert\n" in text
    assert section.START in text


def test_a_dry_run_shows_and_changes_nothing(run: Run, model: Path, score_file: str) -> None:
    done = run("card", str(model), "--result", score_file, "--dry-run")
    assert done.exit_code == 0
    assert "+model-index:" in done.stdout
    assert " license: mit # yes" in done.stdout
    assert "Nothing was changed" in done.stderr
    assert (model / "README.md").read_bytes() == CARD
    assert len(os.listdir(model)) == 2


def test_the_card_may_go_elsewhere(run: Run, model: Path, score_file: str, tmp_path: Path) -> None:
    expected = card.merge(CARD, make_result(), "small-bert")
    assert run("card", str(model), "--result", score_file, "--to", str(tmp_path / "out.md")).exit_code == 0
    assert (tmp_path / "out.md").read_bytes() == expected
    assert run("card", str(model), "--result", score_file, "--to", "-").stdout_bytes == expected
    assert (model / "README.md").read_bytes() == CARD


def test_the_card_of_a_demo_is_printed(run: Run, score_file: str) -> None:
    done = run("card", "demo:vader-bert", "--result", score_file, "-q")
    before = (demos.path("vader-bert") / "README.md").read_bytes()
    assert done.stdout_bytes == card.merge(before, make_result(), "vader-bert")
    assert "warning: the score is of small-bert, but the card is of vader-bert" in done.stderr


def test_a_score_of_another_model_needs_to_be_forced(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(make_result(model={**make_result().model, "id": "demo:digits-vit", "revision": None}).to_json())
    done = run("card", "demo:vader-bert", "--result", str(path), "-q")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the score is of digits-vit, but the card is of vader-bert. Use a score of vader-bert, or pass --force" in (
        done.stderr
    )
    done = run("card", "demo:vader-bert", "--result", str(path), "--force", "-q")
    assert done.exit_code == 0
    assert "warning: the score is of digits-vit, but the card is of vader-bert" in done.stderr
    assert run("card", "demo:digits-vit", "--result", str(path), "-q").stderr == ""
    assert run("card", "demo:digits-vit", "--force").exit_code == 2


def result_in(path: Path, model: str) -> str:
    path.write_text(make_result(model={**make_result().model, "id": model, "revision": None}).to_json())
    return str(path)


@pytest.mark.parametrize(
    "elsewhere", ["./large-bert", "/models/large-bert", "~/runs/1/large-bert", r"C:\runs\large-bert"]
)
def test_a_score_of_another_folder_needs_to_be_forced(run: Run, model: Path, tmp_path: Path, elsewhere: str) -> None:
    score = result_in(tmp_path / "other.json", elsewhere)
    done = run("card", str(model), "--result", score)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the score is of large-bert, but the card is of small-bert. Use a score of small-bert" in done.stderr
    assert (model / "README.md").read_bytes() == CARD
    done = run("card", str(model), "--result", score, "--force")
    assert done.exit_code == 0
    assert "warning: the score is of large-bert" in done.stderr


def test_a_score_in_memory_may_be_of_a_model_that_was_saved_elsewhere(run: Run, model: Path, tmp_path: Path) -> None:
    """It has the name of the folder that its training began with, or none."""
    (tmp_path / "large-bert").mkdir()
    for name, said in ((str(tmp_path / "large-bert"), "warning: the score is of large-bert, but"), ("", "")):
        path = tmp_path / "memory.json"
        path.write_text(make_result(model={"id": name, "class": "BertModel", "task": None}).to_json())
        done = run("card", str(model), "--result", str(path))
        assert done.exit_code == 0
        assert said in done.stderr
        assert ("warning" in done.stderr) == bool(said)


def test_a_folder_of_the_same_name_elsewhere_is_warned_of_and_one_of_two_names_is_not(
    run: Run, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "small-bert").mkdir(parents=True)
    (tmp_path / "latest").symlink_to(model)
    done = run("card", str(model), "--result", result_in(tmp_path / "a.json", str(tmp_path / "runs" / "small-bert")))
    assert done.exit_code == 0
    assert f"warning: the score is of {tmp_path / 'runs' / 'small-bert'}, but the card is of small-bert" in done.stderr
    for same in (str(model), str(tmp_path / "latest"), "/models/small-bert"):
        assert "warning" not in run("card", str(model), "--result", result_in(tmp_path / "b.json", same)).stderr


def test_a_card_beside_no_model_takes_any_score_with_a_warning(run: Run, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    done = run("card", str(tmp_path / "docs"), "--result", result_in(tmp_path / "a.json", "./small-bert"))
    assert done.exit_code == 0
    assert "warning: the score is of small-bert, but the card is of docs" in done.stderr


@pytest.mark.parametrize("args", [[], ["--dry-run"]])
def test_a_card_that_cannot_be_merged_is_left_alone(run: Run, model: Path, score_file: str, args: list[str]) -> None:
    broken = b"---\nlicense: [mit\n---\n"
    (model / "README.md").write_bytes(broken)
    done = run("card", str(model), "--result", score_file, *args)
    assert done.exit_code == 5
    assert "not valid YAML" in done.stderr
    # What to paste is on stdout.
    assert "model-index:\n- name: small-bert" in done.stdout
    assert section.START in done.stdout
    assert (model / "README.md").read_bytes() == broken


def test_that_is_known_before_a_score_is_taken(run: Run, model: Path, scoring: Any) -> None:
    (model / "README.md").write_bytes(section.START.encode())
    for line in (["card", str(model)], ["score", "m", "--card", str(model)]):
        assert run(*line).exit_code == 5
    assert scoring.calls == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--to", "no/such/place.md"], "--to: there is no folder "),
        (["--to", "."], "is a folder; give the name of a file"),
        (["--plot"], "--plot: "),
    ],
)
def test_where_nothing_can_be_written_no_score_is_taken(
    run: Run, model: Path, scoring: Any, args: list[str], says: str
) -> None:
    (model / "geodesic-sharpness.png").mkdir()
    done = run("card", str(model), *args)
    assert done.exit_code == 1
    assert says in done.stderr
    assert scoring.calls == []
    assert (model / "README.md").read_bytes() == CARD


def test_a_card_that_must_not_be_written_takes_no_score(
    run: Run, model: Path, scoring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    for line in (["card", str(model)], ["score", "m", "--card", str(model)]):
        done = run(*line)
        assert done.exit_code == 1
        assert f"card: no permission to write {model / 'README.md'}" in done.stderr
    assert scoring.calls == []
    assert run("card", str(model), "--dry-run").exit_code == 0


def test_a_score_that_cannot_be_pushed_is_printed(run: Run, scoring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that will fail is refused before the score; where it fails all the same the score is not lost."""
    from hf_geosharp.cards.push import Hub, RemoteCard

    def fails(*_: Any, **__: Any) -> None:
        raise HubError("the Hub has a fault of its own")

    monkeypatch.setattr(Hub, "read", lambda _: RemoteCard("0" * 40, CARD))
    monkeypatch.setattr(Hub, "check_push", fails)
    assert run("card", "me/small-bert", "--push").exit_code == 4
    assert scoring.calls == []
    monkeypatch.setattr(Hub, "check_push", lambda _: None)
    monkeypatch.setattr(Hub, "push", fails)
    done = run("card", "me/small-bert", "--push")
    assert done.exit_code == 4
    assert len(scoring.calls) == 1
    assert "Into the front matter:" in done.stdout
    assert "value: 0.0123457" in done.stdout


def test_a_failed_score_leaves_the_card(run: Run, model: Path, scoring: Any) -> None:
    scoring.fails_with(DataError("empty"))
    assert run("card", str(model)).exit_code == 1
    assert (model / "README.md").read_bytes() == CARD


def test_score_puts_its_result_into_a_card_as_well(run: Run, model: Path, scoring: Any) -> None:
    done = run("score", "some/model", "--card", str(model), "--json", "-")
    assert done.exit_code == 0
    assert done.stdout.startswith("{")
    assert b"value: 0.0123457" in (model / "README.md").read_bytes()
    assert "warning: the score is of digits-vit, but the card is of small-bert" in done.stderr
    assert run("score", "m", "--card", "no/such/place.md").exit_code == 1
    assert run("score", "m", "--card", "owner/name").exit_code == 1
    assert len(scoring.calls) == 1


@pytest.mark.slow
def test_the_picture_lies_beside_the_card(run: Run, model: Path, score_file: str) -> None:
    pytest.importorskip("matplotlib")
    assert run("card", str(model), "--result", score_file, "--plot").exit_code == 0
    picture = (model / "geodesic-sharpness.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert "](geodesic-sharpness.png)" in (model / "README.md").read_text(encoding="utf-8")
    # The same again: neither changes.
    before = (model / "README.md").read_bytes()
    assert run("card", str(model), "--result", score_file, "--plot").exit_code == 0
    assert ((model / "README.md").read_bytes(), (model / "geodesic-sharpness.png").read_bytes()) == (before, picture)


def test_a_picture_is_only_written_with_the_card(run: Run, model: Path, score_file: str) -> None:
    pytest.importorskip("matplotlib")
    assert run("card", str(model), "--result", score_file, "--plot", "--dry-run").exit_code == 0
    (model / "README.md").write_bytes(section.START.encode())
    assert run("card", str(model), "--result", score_file, "--plot").exit_code == 5
    assert sorted(os.listdir(model)) == ["README.md", "config.json"]


@pytest.mark.parametrize("line", [["SELF", "--to", "-"], ["demo:digits-vit"], ["demo:digits-vit", "--dry-run"]])
def test_a_card_that_is_printed_links_no_picture(run: Run, model: Path, score_file: str, line: list[str]) -> None:
    """It would be written nowhere."""
    pytest.importorskip("matplotlib")
    target = str(model) if line[0] == "SELF" else line[0]
    done = run("card", target, *line[1:], "--result", score_file, "--plot")
    assert done.exit_code == 2
    assert "--plot writes the picture next to the card, and this card is only printed" in done.stderr
    assert done.stdout == ""


def test_a_picture_is_written_next_to_the_copy_of_a_card(
    run: Run, model: Path, tmp_path: Path, score_file: str
) -> None:
    pytest.importorskip("matplotlib")
    copy = tmp_path / "copy"
    copy.mkdir()
    done = run("card", "demo:digits-vit", "--result", score_file, "--plot", "--to", str(copy / "README.md"))
    assert done.exit_code == 0
    assert sorted(os.listdir(copy)) == ["README.md", "geodesic-sharpness.png"]


def test_without_matplotlib_it_says_how_to_get_it(
    run: Run, model: Path, scoring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("card", str(model), "--plot")
    assert done.exit_code == 1
    assert "pip install matplotlib" in done.stderr
    assert scoring.calls == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--remove", "--result", "r.json"], "--remove and --result"),
        (["--remove", "--plot"], "--remove and --plot"),
        (["--push", "--plot"], "--push and --plot"),
        (["--push", "--to", "x"], "--push and --to"),
        (["--dry-run", "--to", "x"], "--dry-run and --to"),
        (["--create-pr"], "--create-pr needs --push"),
        (["--no-create-pr"], "--create-pr needs --push"),
        (["--commit-message", "x"], "--commit-message needs --push"),
        (["--result", "r.json", "--steps", "3"], "--steps is for computing a score, which --result does not do"),
        (["--remove", "--rho", "1"], "--rho is for computing a score, which --remove does not do"),
        (["--push"], "--push needs the id of a model on the Hub"),
    ],
)
def test_options_that_do_not_go_together(run: Run, model: Path, args: list[str], says: str) -> None:
    done = run("card", str(model), *args)
    assert done.exit_code == 2
    assert says in done.stderr
    assert (model / "README.md").read_bytes() == CARD


def test_a_readme_without_a_model_needs_a_result(run: Run, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(CARD)
    done = run("card", str(tmp_path / "README.md"))
    assert done.exit_code == 2
    assert "--result" in done.stderr


@pytest.mark.parametrize("target", ["./no-such-folder", "no/such/README.md", "/nowhere/README.md"])
def test_there_must_be_a_place(run: Run, target: str, score_file: str) -> None:
    done = run("card", target, "--result", score_file)
    assert done.exit_code == 1
    assert "there is no" in done.stderr


def test_nothing_to_remove_from(run: Run, tmp_path: Path) -> None:
    done = run("card", str(tmp_path), "--remove")
    assert done.exit_code == 1
    assert "no card" in done.stderr


def test_other_ranks_write_nothing(run: Run, model: Path, score_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run("card", str(model), "--result", score_file).exit_code == 0
    assert (model / "README.md").read_bytes() == CARD


class Shell:
    """The command in a process of its own, with a stand-in for the Hub behind HF_ENDPOINT."""

    def __init__(self, hub: StandIn, home: Path):
        self.hub = hub
        self._environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_TOKEN": "hf_secret",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_ETAG_TIMEOUT": "1",
        }

    def __call__(self, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hf_geosharp.cli", "card", *args],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | self._environment | environment,
        )


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    with StandIn() as hub:
        hub.add("me/small-bert", CARD)
        hub.add("you/small-bert", CARD)
        yield Shell(hub, tmp_path / "home")


@pytest.mark.slow
def test_a_card_of_the_hub_is_compared_and_then_pushed(shell: Shell, score_file: str) -> None:
    repo = shell.hub.repos["me/small-bert"]
    compared = shell("me/small-bert", "--result", score_file)
    assert compared.returncode == 0, compared.stderr
    assert "+model-index:" in compared.stdout
    assert "--push commits it" in compared.stderr
    assert shell.hub.count("commit") == 0
    pushed = shell("me/small-bert", "--result", score_file, "--push")
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.strip() == f"{shell.hub.url}/me/small-bert/commit/{repo.heads['main']}"
    assert repo.card() == card.merge(CARD, make_result(), "me/small-bert")
    assert "needs no change" in shell("me/small-bert", "--result", score_file, "--push").stderr
    removed = shell("me/small-bert", "--remove", "--push", "--commit-message", "Without it")
    assert (removed.returncode, repo.card(), shell.hub.messages[-1]) == (0, CARD, "Without it")


def test_a_score_of_another_model_of_the_hub_is_not_pushed(shell: Shell, score_file: str) -> None:
    shell.hub.add("me/large-bert", CARD)
    done = shell("me/large-bert", "--result", score_file, "--push")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the score is of me/small-bert, but the card is of me/large-bert" in done.stderr
    assert shell.hub.count("commit") == 0


def test_elsewhere_a_pull_request_is_opened(shell: Shell, score_file: str) -> None:
    done = shell("you/small-bert", "--result", score_file, "--push")
    assert done.returncode == 0, done.stderr
    assert "warning: the score is of me/small-bert, but the card is of you/small-bert" in done.stderr
    assert done.stdout.strip() == f"{shell.hub.url}/you/small-bert/discussions/1"
    assert shell.hub.repos["you/small-bert"].card() == CARD


@pytest.mark.parametrize(
    ("endpoint", "answer", "says"),
    [
        ("info", Answer(403, "GatedRepo"), "access is gated"),
        ("commit", Answer(412), "somebody else changed"),
        ("whoami", HANG, "did not answer in time"),
    ],
    ids=["gated", "conflict", "hanging"],
)
@pytest.mark.slow
def test_failures_of_the_hub_end_with_4(
    shell: Shell, score_file: str, endpoint: str, answer: Answer | str, says: str
) -> None:
    shell.hub.faults[endpoint] = answer
    done = shell("me/small-bert", "--result", score_file, "--push")
    assert done.returncode == 4
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "hf_secret" not in done.stdout + done.stderr
    assert shell.hub.repos["me/small-bert"].card() == CARD


def test_offline_ends_with_4(shell: Shell, score_file: str) -> None:
    done = shell("me/small-bert", "--result", score_file, HF_HUB_OFFLINE="1")
    assert done.returncode == 4
    assert "HF_HUB_OFFLINE is set" in done.stderr
