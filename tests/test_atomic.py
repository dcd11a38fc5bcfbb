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
from hf_geosharp.sharpness.journal import write_result


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
    target.write_json(Result())


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


def to_journal(path: Path) -> None:
    write_result(path.parent, "{}\n")


@pytest.mark.parametrize("write", [*WRITERS, to_journal])
def test_permissions_stay_and_new_files_have_those_of_the_umask(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    before = os.umask(0o027)
    try:
        write(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        write(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == ["result.json"]


def test_writers_of_one_file_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    contents = [bytes([65 + i]) * 100_000 for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: atomic.put(tmp_path / "file", content), contents))
    assert (tmp_path / "file").read_bytes() in contents
    assert os.listdir(tmp_path) == ["file"]


def test_a_name_may_be_as_long_as_one_can_be(tmp_path: Path) -> None:
    atomic.put(tmp_path / ("n" * 255), b"new")
    assert (tmp_path / ("n" * 255)).read_bytes() == b"new"


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        atomic.put(tmp_path / "folder", b"new")
    assert os.listdir(tmp_path) == ["folder"]
    assert atomic.destination(tmp_path / "none") == tmp_path.resolve() / "none"
