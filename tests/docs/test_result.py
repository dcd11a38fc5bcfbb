"""The page about the fields of a result: it has all of them."""

from __future__ import annotations

from pathlib import Path

from hf_geosharp.sharpness.result import SharpnessResult

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "result.md").read_text(encoding="utf-8")


def test_every_field_of_a_result_is_in_the_table() -> None:
    for field in SharpnessResult.__dataclass_fields__:
        assert f"`{field}" in PAGE, field
