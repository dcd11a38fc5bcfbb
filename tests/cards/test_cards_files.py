"""Cards on disk, and scores from JSON files."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hf_geosharp.cards import files
from hf_geosharp.errors import CardError, DataError, GeosharpError
from hf_geosharp.sharpness.reading import read_result
from tests.cards.results import make_result


def test_a_card_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_bytes(b"old")
    path.chmod(0o640)
    files.write(path, b"new", b"old")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["README.md"]


def test_a_new_card_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"")
    files.write(tmp_path / "README.md", b"new", None)
    assert (tmp_path / "README.md").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.md").write_bytes(b"old")
    link = tmp_path / "README.md"
    link.symlink_to("real.md")
    files.write(link, b"new", b"old")
    assert link.is_symlink()
    assert (tmp_path / "real.md").read_bytes() == b"new"


def test_what_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_bytes(b"newer")
    for before in (b"old", None):
        with pytest.raises(GeosharpError, match="meanwhile"):
            files.write(path, b"new", before)
    assert path.read_bytes() == b"newer"


def test_a_failure_leaves_the_card_and_no_debris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "README.md"
    path.write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(GeosharpError, match="No space left"):
        files.write(path, b"new", b"old")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["README.md"]


def test_a_folder_is_no_card(tmp_path: Path) -> None:
    with pytest.raises(GeosharpError, match="cannot read"):
        files.read(tmp_path)


def test_the_cache_of_the_hub_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--a--b" / "snapshots" / "123"
    blobs = cache / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0").write_bytes(b"old")
    (snapshot / "README.md").symlink_to(blobs / "0")
    outside = tmp_path / "README.md"
    outside.symlink_to(snapshot / "README.md")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    for path in (snapshot / "README.md", outside, blobs / "0"):
        with pytest.raises(CardError, match="Hub's cache"):
            files.write(path, b"new", b"old")
    assert (blobs / "0").read_bytes() == b"old"


def test_a_score_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(make_result().to_json(), encoding="utf-8")
    assert read_result(path) == make_result()


def edited(change: Callable[[dict[str, Any]], Any]) -> str:
    data = make_result().to_dict()
    change(data)
    return json.dumps(data)


PART = {"part": "a", "by": "layer", "layer": 0, "head": None, "kind": None, "value": 0.1, "stderr": None}

NO_RESULTS: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "not the JSON of a result"),
    "NaN": ('{"schema": NaN}', "NaN is not a number"),
    "a list": ("[]", "no JSON object"),
    "nothing in it": ("{}", "schema None"),
    "deeply nested": ("[" * 100000, "not the JSON of a result"),
    "another schema": (edited(lambda d: d.update(schema=2)), "schema 2"),
    "an unknown key": (edited(lambda d: d.update(extra=1)), "extra"),
    "a key missing": (edited(lambda d: d.pop("rho")), "rho"),
    "an unknown key inside": (edited(lambda d: d["pairs"].update(extra=1)), "extra"),
    "a list for an object": (edited(lambda d: d.update(pairs=[])), "is not a result"),
    "null for a list": (edited(lambda d: d.update(curve=None)), "is not a result"),
    "an interval of one": (edited(lambda d: d.update(interval95=[1])), "is not a result"),
    "text for the score": (edited(lambda d: d.update(geodesic_sharpness="0.0125")), "geodesic_sharpness is no finite"),
    "no score": (edited(lambda d: d.update(geodesic_sharpness=None)), "geodesic_sharpness is no finite"),
    "true for a number": (edited(lambda d: d.update(rho=True)), "rho is no finite"),
    "steps and a half": (edited(lambda d: d.update(steps=1.5)), "steps is no whole"),
    "a part without a number": (edited(lambda d: d.update(per=[{**PART, "value": "much"}])), r"per\[0\].value"),
    "a part with too much": (edited(lambda d: d.update(per=[{**PART, "colour": "red"}])), "is not a result"),
    "a profile with a gap": (
        edited(lambda d: d.update(profile={"t": [0, 1], "geodesic": [0, 1], "straight": [0], "radius": 0.1})),
        "its profile has gaps",
    ),
    "a profile without a point": (
        edited(lambda d: d.update(profile={"t": [], "geodesic": [], "straight": [], "radius": 0.1})),
        "its profile has gaps",
    ),
    "a profile without a line": (edited(lambda d: d.update(profile={"t": [0.0], "radius": 0.1})), "is not a result"),
    "a better score": (edited(lambda d: d.update(geodesic_sharpness=0.001)), "not that of its curve"),
    "a better score, in the curve too": (
        edited(lambda d: (d.update(geodesic_sharpness=0.01), d["curve"][1].update(geodesic_sharpness=0.01))),
        "not the mean of its batches",
    ),
    "a narrower interval": (edited(lambda d: d.update(interval95=[0.0124, 0.0126])), "interval is not that"),
    "a smaller error": (edited(lambda d: d.update(stderr=0.0)), "standard error is not that"),
    "another radius": (edited(lambda d: d.update(rho=0.2)), "does not have its rho"),
    "a negative radius": (edited(lambda d: (d.update(rho=-1), d["curve"][1].update(rho=-1))), "rho is not above 0"),
    "no batches": (edited(lambda d: d.update(per_batch=[])), "no samples or no batches"),
    "an interval elsewhere": (
        edited(lambda d: (d.update(interval95=[1, 2]), d["curve"][1].update(interval95=[1, 2]))),
        "not inside its interval",
    ),
    "a text for a model": (edited(lambda d: d.update(model="m")), "model is no object"),
    "a list for baselines": (edited(lambda d: d.update(baselines=[])), "baselines is no object"),
    "a number that no float holds": (edited(lambda d: d.update(stderr=10**400)), "stderr is no finite"),
    "such a number in an interval": (edited(lambda d: d.update(interval95=[0, 10**400])), "is not a result"),
    "a batch without a loss": (edited(lambda d: d["per_batch"][1].update(base_loss=None)), r"per_batch\[1\].base"),
    "a batch that may have converged": (edited(lambda d: d["per_batch"][0].update(converged=None)), "no truth value"),
    "a batch twice": (edited(lambda d: d["per_batch"][1].update(index=0)), "a batch twice"),
    "a spread in words": (edited(lambda d: d["reproducible"].update(spread="small")), "reproducible.spread is"),
    "a number of dropped pairs": (edited(lambda d: d["pairs"].update(dropped=5)), "pairs.dropped is no list"),
    "a part of a numbered kind": (edited(lambda d: d.update(per=[{**PART, "by": 5}])), r"per\[0\].by is no text"),
    "a share in words": (edited(lambda d: d.update(share={"a": "all"})), "share.a is no finite"),
    "a text for pairs": (edited(lambda d: d["pairs"].update(count="9")), "pairs.count is no whole number"),
}


@pytest.mark.parametrize(("text", "says"), NO_RESULTS.values(), ids=NO_RESULTS.keys())
def test_what_no_score_wrote_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=says) as caught:
        read_result(path)
    assert str(path) in str(caught.value)


def test_what_is_no_file_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_result(tmp_path / "r.json")
    with pytest.raises(DataError, match="cannot read"):
        read_result(tmp_path)
    (tmp_path / "r.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(DataError, match="not UTF-8"):
        read_result(tmp_path / "r.json")
