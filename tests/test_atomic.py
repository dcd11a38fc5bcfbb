"""Files are put in place whole; devices and pipes are written to, and stay what they are."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hf_geosharp import atomic
from hf_geosharp.cards import files as cards
from hf_geosharp.cli.files import Target
from hf_geosharp.cli.output import JsonTarget


class Result:
    def to_json(self) -> str:
        return "{}"


def to_option(path: Path) -> None:
    target = Target("--csv", path)
    target.check()
    target.write("{}\n")


def to_json(path: Path) -> None:
    target = JsonTarget(str(path))
    target.check()
    target.write(Result())


def to_card(path: Path) -> None:
    cards.write(path, b"{}\n", cards.read(path))


WRITERS: tuple[Any, ...] = (to_option, to_json, to_card)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("write", WRITERS)
def test_a_pipe_is_written_to(write: Callable[[Path], None], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        write(pipe)
        assert read.result(timeout=20) == b"{}\n"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("write", WRITERS)
def test_a_link_stays_one(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "{}\n"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        atomic.put(tmp_path / "folder", b"new")
    assert os.listdir(tmp_path) == ["folder"]
    assert atomic.destination(tmp_path / "none") == tmp_path.resolve() / "none"
