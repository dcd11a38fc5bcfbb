"""What any document names is there: files, pages and headings that are linked, targets of make."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.page import anchors

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "metrics/geodesic_sharpness/README.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]

documents = pytest.mark.parametrize("page", PAGES, ids=[p.relative_to(ROOT).as_posix() for p in PAGES])


@documents
def test_every_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|benchmarks|hf_geosharp|cli|metrics|model_cards|docs)/[\w./-]*)`", text)
    named += re.findall(r"`(constraints[\w-]*\.txt|LICENSE)`", text)
    for path in named:
        assert (ROOT / path).exists(), path


@documents
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(((?!http)[^)\s]+)\)", page.read_text(encoding="utf-8")):
        file, _, heading = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not heading or heading in anchors(target.read_text(encoding="utf-8")), link


@documents
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:`|^\$ )make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets
