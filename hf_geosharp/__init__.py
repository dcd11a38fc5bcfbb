"""Geodesic sharpness of transformers: how sharp the loss is around a model, whatever weights it is written in.

Names are imported when they are first used, so that ``import hf_geosharp`` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_geosharp.scoring import score, score_pretrained
    from hf_geosharp.sharpness.result import SharpnessResult
    from hf_geosharp.symmetry.find import find_symmetries

__all__ = ["SharpnessResult", "find_symmetries", "score", "score_pretrained"]

_WHERE = {
    "SharpnessResult": "hf_geosharp.sharpness.result",
    "find_symmetries": "hf_geosharp.symmetry.find",
    "score": "hf_geosharp.scoring",
    "score_pretrained": "hf_geosharp.scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
