"""Symmetries are found anew in each test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _found_anew(finds_anew: None) -> None:
    """What another test has kept would hide what this one is for."""
