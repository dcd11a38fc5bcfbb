"""Imports go down only: each module imports what is below it in the order of CONTRIBUTING.md, and nothing above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the top to the bottom; packages stand for all that is in them. What hf_geosharp holds, and its largest package.
ORDERS = {
    "hf_geosharp": (
        "__init__", "cli", "metrics", "metric", "trainer", "report", "cards",
        "charts", "comparison", "correlation", "members", "comparable", "checkpoints",
        "heatmaps", "plots", "figures", "places", "inspection", "example_batches", "site_report", "scoring",
        "tasks", "sharpness", "parallel", "launchers", "symmetry", "geometry",
        "demos", "registration", "record", "wrappers", "evaluating", "carried", "atomic", "paths", "layers",
        "untouched", "randomness", "arguments", "errors",
    ),
    "hf_geosharp.symmetry": (
        "__init__", "find", "overlooked", "layouts", "verify", "health", "cache", "fingerprint",
        "folding", "hidden", "attention", "trials", "tracing", "inputs", "grouped",
        "map", "parameters", "partition", "linear", "names", "scales", "fold", "pairs", "views", "groups", "base",
    ),
}  # fmt: skip


def module(file: Path) -> str:
    """The dotted name of a file; ``cli`` and ``metrics`` are installed as parts of hf_geosharp."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "hf_geosharp" else ("hf_geosharp", *parts))


def unit(name: str, package: str) -> str:
    """Which part of a package the dotted name of something in it belongs to."""
    first = name.removeprefix(package).lstrip(".").split(".")[0]
    return first if first in ORDERS[package] else "__init__"


MODULES = {
    module(file): file
    for folder in ("hf_geosharp", "cli", "metrics")
    for file in sorted((ROOT / folder).glob("**/*.py"))
}


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that is imported, inside functions and for type checkers included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def within(package: str) -> dict[str, Path]:
    """The modules of a package."""
    return {name: file for name, file in MODULES.items() if f"{name}.".startswith(f"{package}.")}


@pytest.mark.parametrize("package", ORDERS)
def test_every_module_has_its_place(package: str) -> None:
    there = {name.removeprefix(package).lstrip(".").split(".")[0] for name in within(package)}
    assert there == set(ORDERS[package])
    assert len(ORDERS[package]) == len(set(ORDERS[package]))


@pytest.mark.parametrize(("package", "name"), [(package, name) for package, order in ORDERS.items() for name in order])
def test_imports_go_down_only(package: str, name: str) -> None:
    order = ORDERS[package]
    up = [
        f"{file.relative_to(ROOT)}:{line} imports {other}"
        for own, file in within(package).items()
        if unit(own, package) == name
        for line, other in imported(file)
        if f"{other}.".startswith(f"{package}.") and order.index(unit(other, package)) < order.index(name)
    ]
    assert not up, "\n".join(up)


@pytest.mark.parametrize("package", ORDERS)
def test_contributing_has_the_same_order(package: str) -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## Layers\n")[1].split("\n## ")[0]
    table = section.split("### ")[list(ORDERS).index(package)]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", re.sub(r"\(.*?\)", "", row))]
    assert tuple(name.removeprefix("hf_geosharp/").strip("/").removesuffix(".py") for name in named) == ORDERS[package]
