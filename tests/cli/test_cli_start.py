"""Help, version and completion: at once, and without anything heavy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hf_geosharp.cli import main

HEAVY = ("torch", "transformers", "datasets", "evaluate", "accelerate", "huggingface_hub", "numpy", "rich")
COMMANDS = ("score", "inspect", "compare", "correlate", "card", "demo", "register", "report")


def start(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hf_geosharp.cli", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("args", [[], ["score"], ["demo"]])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    program = (
        "import sys\n"
        "from hf_geosharp.cli import main\n"
        f"main({[*args, '--help']!r}, standalone_mode=False)\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_help_is_fast() -> None:
    def once() -> float:
        started = time.perf_counter()
        assert start("score", "--help").returncode == 0
        return time.perf_counter() - started

    # The best of several: the machine may be busy with something else.
    assert min(once() for _ in range(5)) < 0.5


def test_help_names_commands_and_exit_codes() -> None:
    help_text = start("--help").stdout
    assert all(command in help_text for command in COMMANDS)
    assert "130 interrupted" in " ".join(help_text.split())


def test_version() -> None:
    done = start("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("hf-geosharp, version ")


def test_without_a_command_shows_help_as_usage_error() -> None:
    done = start()
    assert done.returncode == 2
    assert "Usage:" in done.stdout + done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    done = start(_HF_GEOSHARP_COMPLETE=f"{shell}_source")
    # click looks at the version of bash, which need not be installed.
    assert done.returncode == 0
    assert "_HF_GEOSHARP_COMPLETE" in done.stdout


def test_completion_of_commands_and_values() -> None:
    done = start(_HF_GEOSHARP_COMPLETE="bash_complete", COMP_WORDS="hf-geosharp sc", COMP_CWORD="1")
    assert done.stdout.split() == ["plain,score"]
    done = start(_HF_GEOSHARP_COMPLETE="bash_complete", COMP_WORDS="hf-geosharp score --metric m", COMP_CWORD="3")
    assert done.stdout.split() == ["plain,mix"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_value_is_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the shell that is not set: to Python an empty name is the folder that one is in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("# Mine\n")
    found = main.get_command(click.Context(main), command)
    assert found is not None
    valued = [p for p in found.params if not (isinstance(p, click.Option) and p.is_flag)]
    for parameter in valued:
        given = [""] if isinstance(parameter, click.Argument) else ["x", parameter.opts[-1], ""]
        done = CliRunner().invoke(main, [command, *given])
        assert (done.exit_code, "it is empty" in done.stderr) == (2, True), (parameter.name, done.stderr)
    assert valued or command == "register"
    assert [entry.name for entry in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "# Mine\n"
