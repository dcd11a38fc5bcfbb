"""Settings of the whole suite: no network, one thread (tiny tensors gain nothing from two)."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The tests of registration undo this in caches of their own.
os.environ.setdefault("HF_GEOSHARP_NO_REGISTER", "1")
# Each test finds symmetries anew, but for those of the cache.
os.environ.setdefault("HF_GEOSHARP_CACHE", "")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _finds(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("finds"))


@pytest.fixture
def finds_kept(_finds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found of one architecture is kept, as it is for users: for tests that score it again and again."""
    monkeypatch.setenv("HF_GEOSHARP_CACHE", _finds)
