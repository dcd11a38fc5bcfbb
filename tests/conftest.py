"""Settings of the whole suite: no network, one thread (tiny tensors gain nothing from two)."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections import Counter

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The tests of registration undo this in caches of their own.
os.environ.setdefault("HF_GEOSHARP_NO_REGISTER", "1")

import pytest
import torch

torch.set_num_threads(1)

FINDS = "HF_GEOSHARP_TESTS_FINDS"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--cases N``: of each test no more than so many of its cases, the first ones."""
    parser.addoption("--cases", type=int, default=0, help="run no more than so many cases of each test")


@pytest.hookimpl(trylast=True)  # the first of those that are left by -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves cases out where that is asked for."""
    most = config.getoption("--cases")
    if not most:
        return
    seen = Counter[str]()
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        (kept if seen[test] <= most else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


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
