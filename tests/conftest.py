"""Settings of the whole suite: no network, one thread (tiny tensors gain nothing from two)."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The tests of registration undo this in caches of their own.
os.environ.setdefault("HF_GEOSHARP_NO_REGISTER", "1")

import pytest
import torch

torch.set_num_threads(1)

FINDS = "HF_GEOSHARP_TESTS_FINDS"


def pytest_configure(config: pytest.Config) -> None:
    """What is found of one architecture is kept, as it is for users: most tests score the same few again and again.

    One folder for all processes of the suite; what a user has kept is not looked at. See ``finds_anew``.
    """
    if FINDS not in os.environ:
        os.environ[FINDS] = tempfile.mkdtemp(prefix="geosharp-finds-")
        atexit.register(shutil.rmtree, os.environ[FINDS], ignore_errors=True)
    os.environ["HF_GEOSHARP_CACHE"] = os.environ[FINDS]


@pytest.fixture
def finds_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symmetries are found anew: for the tests of finding."""
    monkeypatch.setenv("HF_GEOSHARP_CACHE", "")
