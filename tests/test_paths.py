"""Names of files as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_geosharp.errors import UsageError
from hf_geosharp.paths import path_of


def test_home_is_put_in_and_other_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of("~/model") == tmp_path / "model"
    assert path_of(tmp_path / "x") == tmp_path / "x"
    assert path_of("owner/name") == Path("owner/name")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("~nobody-of-this-name/x", "no home of that user here"),
        (300 * "a", "a{60}... is too long"),
        ("", "is empty; for the folder that you are in write ."),
    ],
)
def test_names_that_no_file_can_have_are_told(name: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        path_of(name)
