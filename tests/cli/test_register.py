"""``hf-geosharp register``: what it says, and what it ends with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from hf_geosharp import registration

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_MODULES_CACHE", raising=False)
    monkeypatch.setattr(registration, "_settled", lambda: None)
    return tmp_path / "hf"


def test_register_check_and_unregister(run: Run, cache: Path) -> None:
    checked = run("register", "--check")
    assert checked.exit_code == 1
    assert checked.stdout == ""
    assert "Run: hf-geosharp register" in checked.stderr
    done = run("register")
    assert done.exit_code == 0
    assert Path(done.stdout.strip()).is_relative_to(cache)
    assert Path(done.stdout.strip()).is_file()
    assert "HF_EVALUATE_OFFLINE=1" in done.stderr
    assert run("register").stdout == done.stdout
    checked = run("register", "--check")
    assert checked.exit_code == 0
    assert checked.stdout == done.stdout
    removed = run("register", "--unregister")
    assert removed.exit_code == 0
    assert removed.stdout.strip() == str(Path(done.stdout.strip()).parent)
    assert "HF_GEOSHARP_NO_REGISTER=1" in removed.stderr
    assert run("register", "--check").exit_code == 1
    again = run("register", "--unregister")
    assert again.exit_code == 0
    assert "nothing to remove" in again.stderr


def test_quiet(run: Run) -> None:
    assert run("register", "-q").stderr == ""
    assert run("register", "-q", "--check").stderr == ""


def test_check_and_unregister_exclude_each_other(run: Run, cache: Path) -> None:
    assert run("register", "--check", "--unregister").exit_code == 2
    assert not cache.exists()


def test_a_cache_that_cannot_be_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", "/dev/null/modules")
    done = run("register")
    assert done.exit_code == 1
    assert "Error: Cannot write" in done.stderr


def test_the_hf_command(run: Run, tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("huggingface_hub.cli.extensions", exc_type=ImportError)
    assert run("register", "--hf-cli", "--check").exit_code == 1
    done = run("register", "--hf-cli")
    assert done.exit_code == 0
    assert Path(done.stdout.strip()) == tmp_path / ".local/share/hf/extensions/hf-geosharp/manifest.json"
    assert "`hf geosharp` runs this installation" in done.stderr
    assert run("register", "--hf-cli", "--check").stdout == done.stdout
    assert run("register", "--hf-cli", "--unregister").exit_code == 0
    assert "nothing to remove" in run("register", "--hf-cli", "--unregister").stderr
    # The name in evaluate is another matter.
    assert not cache.exists()


@pytest.mark.parametrize("start", [["-m", "hf_geosharp.cli"], None], ids=["module", "script"])
def test_the_command_itself_does_not_register(start: list[str] | None, cache: Path) -> None:
    program = [sys.executable, *start] if start else [str(Path(sys.executable).with_name("hf-geosharp"))]
    environment = {name: value for name, value in os.environ.items() if name != registration.OPT_OUT}
    for arguments in (["--version"], ["register", "--check"]):
        done = subprocess.run([*program, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert not cache.exists()
    assert subprocess.run([*program, "register"], env=environment, capture_output=True).returncode == 0
    assert subprocess.run([*program, "register", "--check"], env=environment, capture_output=True).returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["--check"], []])
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom hf_geosharp.cli import main\n"
        f"main({['register', *arguments]!r}, standalone_mode=False)\n"
        "print([name for name in ('torch', 'evaluate', 'huggingface_hub', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
