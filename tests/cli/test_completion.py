"""Completion in bash, zsh and fish: each shell's script, and answers that need nothing heavy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHELLS = ("bash", "zsh", "fish")
HEAVY = ("torch", "transformers", "datasets", "evaluate", "accelerate", "huggingface_hub", "numpy", "rich")
DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")

# What the shell runs, which ends by telling what it has imported.
PROGRAM = f"""
import sys
from hf_geosharp.cli import main
try:
    main(prog_name="hf-geosharp")
finally:
    print("HEAVY", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""


def complete(shell: str, words: str) -> set[str]:
    """What a shell is offered for the last word."""
    *before, last = words.split(" ")
    line = " ".join([*before, last])
    # fish hands over the word itself, the others its number.
    current = last if shell == "fish" else str(len(before))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"_HF_GEOSHARP_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": current},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1] == "HEAVY []", done.stderr
    lines = done.stdout.splitlines()
    if shell == "zsh":
        # Three lines each: kind, word, help.
        return set(lines[1::3])
    kinds = [re.split(r"[,\t]", line.replace("plain,", "", 1)) for line in lines]
    return {parts[0] for parts in kinds}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_geosharp.cli"],
        env=os.environ | {"_HF_GEOSHARP_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert f"_HF_GEOSHARP_COMPLETE={shell}_complete" in done.stdout
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=done.stdout, text=True).returncode == 0


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("hf-geosharp reg", {"register"}),
        ("hf-geosharp score --metric m", {"mix"}),
        ("hf-geosharp score --symmetries ", {"full", "paper", "attention"}),
        ("hf-geosharp register --un", {"--unregister"}),
    ],
)
def test_what_is_offered(shell: str, words: str, offered: set[str]) -> None:
    assert complete(shell, words) == offered


@pytest.mark.parametrize(
    "words",
    [
        "score ./my", "score my", "score --data rev", "score m --json res", "score m --output ou", "card ./my",
        "card m --to RE", "card m --result res", "compare a ./b", "report res", "report r -o pa", "correlate a b",
        "correlate a --target ta", "inspect ./my", "inspect m --layout la", "inspect m --data ba",
    ],
)  # fmt: skip
def test_where_files_are_meant_the_shell_offers_its_own(words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {
            "_HF_GEOSHARP_COMPLETE": "bash_complete", "COMP_WORDS": f"hf-geosharp {words}",
            "COMP_CWORD": str(len(words.split())),
        },
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    kind, _, word = done.stdout.strip().partition(",")
    assert kind in ("file", "dir")
    assert word == words.split()[-1]
    assert done.stderr.splitlines()[-1] == "HEAVY []"


def test_demos_are_offered_by_name() -> None:
    offered = complete("fish", "hf-geosharp score demo:")
    assert {"demo:digits-vit", "demo:digits-vit-twin", "demo:vader-bert"} <= offered


@pytest.mark.parametrize("shell", SHELLS)
def test_the_document_says_how(shell: str) -> None:
    assert f"_HF_GEOSHARP_COMPLETE={shell}_source hf-geosharp" in DOCUMENT
