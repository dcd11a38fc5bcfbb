"""The page about symmetries: the count is that of the table, presets are those there are, files exist."""

from __future__ import annotations

import re
from pathlib import Path

from hf_geosharp.symmetry.find import PRESETS
from tests.symmetry.table import TABLE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "symmetries.md").read_text(encoding="utf-8")


def test_the_count_of_families_is_that_of_the_table() -> None:
    text = " ".join(PAGE.split())
    assert (
        f"In all {len(TABLE)} families and variants whose groups were worked out by hand both dimensions agree" in text
    )


def test_every_preset_has_its_row() -> None:
    assert re.findall(r"^\| `(\w+)`", PAGE, flags=re.MULTILINE) == list(PRESETS)
