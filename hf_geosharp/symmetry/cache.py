"""Finds kept on disk: what was found on one architecture holds for the next model of it, to be verified anew.

A find depends on the configuration, the code, the parameters' names, shapes and places in memory (some may be one) and
the versions of the libraries, not on the weights; all of that is in the key. One that misses something, or of which
claims were refuted, is kept for the inputs that it was found on alone, and one in modules of which nothing shows, on
weights of zero say, not at all. Files are written under another name and moved into place, so that processes may share
a folder; what cannot be read counts as not there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

from hf_geosharp import atomic
from hf_geosharp.symmetry.fingerprint import LIBRARIES, implementations, of_batches, of_code, of_config, of_layout
from hf_geosharp.symmetry.fold import (
    Fold,
    Gain,
    KeyBias,
    LayerScale,
    Mean,
    Reader,
    ReadMean,
    StreamBias,
    ValueBias,
    Writer,
)
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.pairs import Between, Pair
from hf_geosharp.symmetry.scales import Scale
from hf_geosharp.symmetry.views import Axis, View

SCHEMA = 12
"""Of the files; a change of how they are written raises it."""

PACKAGE = Path(__file__).parents[1]

ENVIRONMENT = "HF_GEOSHARP_CACHE"
"""Names the folder; an empty value turns the cache off."""


def folder() -> Path | None:
    """Where finds are kept, by default with the other caches of Hugging Face; None if the cache is off."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen is not None:
        return Path(chosen) if chosen else None
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser() / "hf-geosharp" / "symmetries"


def key(model: nn.Module, preset: str, inputs: Mapping[str, Any], proved: bool = True) -> str | None:
    """What a find depends on, as a digest; None for models without a configuration, whose code is not known."""
    settings = of_config(model)
    if settings is None:
        return None
    found = {
        "schema": SCHEMA,
        "preset": preset,
        "proved": proved,
        "code": of_code(model),
        "config": settings,
        "implementations": implementations(getattr(model, "config", None)),
        "parameters": of_layout(model),
        "inputs": sorted(k for k in inputs if not k.startswith("_")),
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def on(digest: str, inputs: Mapping[str, Any]) -> str:
    """The key of a find that may be due to the inputs, which on others may be more."""
    return hashlib.sha256(f"{digest} {of_batches([inputs])}".encode()).hexdigest()


def versions() -> list[tuple[str, str | None]]:
    """Of what finds depend on: this package's code, and the libraries whose code is known by its version."""
    code = ("code of hf-geosharp", of_package(PACKAGE))
    return [code, *((name, _version(name)) for name in ("hf-geosharp", *LIBRARIES))]


@lru_cache
def of_package(folder: Path) -> str:
    """The source of a package, as a digest: between two releases the same version finds more or less."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def load(digest: str) -> SymmetryMap | None:
    """The find of this key, or None."""
    try:
        data = recall(digest)
        return decode(data) if data is not None and data.get("schema") == SCHEMA else None
    except (ValueError, KeyError, TypeError):
        return None


def store(digest: str, found: SymmetryMap) -> None:
    """Keeps a find; a disk that cannot be written is no reason to fail."""
    keep(digest, encode(found))


def recall(digest: str) -> dict[str, Any] | None:
    """What is kept under a key, or None."""
    place = folder()
    if place is None:
        return None
    try:
        data = json.loads((place / f"{digest}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def keep(digest: str, data: Mapping[str, Any]) -> None:
    """Keeps data under a key, as far as the disk can be written."""
    place = folder()
    if place is None:
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        atomic.put(place / f"{digest}.json", json.dumps(data, separators=(",", ":")).encode())
    except OSError:
        return


# ---------------------------------------------------------------------------------------------------------- as JSON

_KINDS = (
    Pair, Between, KeyBias, ValueBias, Mean, ReadMean, StreamBias, Gain, LayerScale, Scale, Reader, Writer, Group,
    View, Axis,
)  # fmt: skip
_CLASSES: dict[str, type[Any]] = {c.__name__: c for c in _KINDS}


def encode(found: SymmetryMap) -> dict[str, Any]:
    """A map as JSON-able data."""
    return {
        "schema": SCHEMA,
        "pairs": [_encode(p) for p in found.pairs],
        "folds": [_encode(f) for f in found.folds],
        "scales": [_encode(s) for s in found.scales],
        "dropped": list(found.dropped),
        "unrecognised": list(found.unrecognised),
        "missed": list(found.missed),
        "limited": list(found.limited),
    }


def decode(data: Mapping[str, Any]) -> SymmetryMap:
    """The inverse of :func:`encode`.

    Raises:
        KeyError, TypeError: it is something else.
    """
    pairs, folds, scales = (tuple(map(_decode, data[k])) for k in ("pairs", "folds", "scales"))
    if not all(isinstance(p, Pair) for p in pairs) or not all(isinstance(f, Fold) for f in folds):
        raise TypeError("not a map of symmetries")
    dropped, unrecognised, missed, limited = (tuple(data[k]) for k in ("dropped", "unrecognised", "missed", "limited"))
    return SymmetryMap(pairs, folds, dropped, unrecognised, scales, missed, limited)


def _encode(x: Any) -> Any:
    if is_dataclass(x):
        return {"=": type(x).__name__, **{f.name: _encode(getattr(x, f.name)) for f in fields(x)}}
    return [_encode(v) for v in x] if isinstance(x, tuple) else x


def _decode(x: Any) -> Any:
    if isinstance(x, dict):
        given = dict(x)
        return _CLASSES[given.pop("=")](**{k: _decode(v) for k, v in given.items()})
    return tuple(_decode(v) for v in x) if isinstance(x, list) else x
