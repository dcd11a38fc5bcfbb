"""Geodesic sharpness of transformers: how sharp the loss is around a model, invariant to the model's symmetries.

Names are imported when they are first used, so that ``import hf_geosharp`` stays cheap. The import also makes
``evaluate.load("geodesic_sharpness")`` work (see :mod:`hf_geosharp.registration`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_geosharp.registration import metric_path, register_at_import

if TYPE_CHECKING:
    from hf_geosharp.comparable import Named, read_results
    from hf_geosharp.comparison import compare_pretrained
    from hf_geosharp.correlation import correlate
    from hf_geosharp.errors import GeosharpError, GeosharpWarning
    from hf_geosharp.inspection import Inspection, inspect, inspect_pretrained
    from hf_geosharp.metric import GeodesicSharpness
    from hf_geosharp.scoring import load_pretrained, score, score_pretrained
    from hf_geosharp.sharpness.result import SharpnessResult
    from hf_geosharp.symmetry.find import find_symmetries
    from hf_geosharp.symmetry.layouts import Layout, read_layouts
    from hf_geosharp.symmetry.map import SymmetryMap
    from hf_geosharp.tasks.columns import Columns
    from hf_geosharp.tasks.loaded import LoadedModel
    from hf_geosharp.trainer import GeodesicSharpnessCallback

__all__ = [
    "Columns",
    "GeodesicSharpness",
    "GeodesicSharpnessCallback",
    "GeosharpError",
    "GeosharpWarning",
    "Inspection",
    "Layout",
    "LoadedModel",
    "Named",
    "SharpnessResult",
    "SymmetryMap",
    "compare_pretrained",
    "correlate",
    "find_symmetries",
    "inspect",
    "inspect_pretrained",
    "load_pretrained",
    "metric_path",
    "read_layouts",
    "read_results",
    "score",
    "score_pretrained",
]

_WHERE = {
    "Columns": "hf_geosharp.tasks.columns",
    "GeodesicSharpness": "hf_geosharp.metric",
    "GeodesicSharpnessCallback": "hf_geosharp.trainer",
    "GeosharpError": "hf_geosharp.errors",
    "GeosharpWarning": "hf_geosharp.errors",
    "Inspection": "hf_geosharp.inspection",
    "Layout": "hf_geosharp.symmetry.layouts",
    "LoadedModel": "hf_geosharp.tasks.loaded",
    "Named": "hf_geosharp.comparable",
    "SharpnessResult": "hf_geosharp.sharpness.result",
    "SymmetryMap": "hf_geosharp.symmetry.map",
    "compare_pretrained": "hf_geosharp.comparison",
    "correlate": "hf_geosharp.correlation",
    "find_symmetries": "hf_geosharp.symmetry.find",
    "inspect": "hf_geosharp.inspection",
    "inspect_pretrained": "hf_geosharp.inspection",
    "load_pretrained": "hf_geosharp.scoring",
    "read_layouts": "hf_geosharp.symmetry.layouts",
    "read_results": "hf_geosharp.comparable",
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


register_at_import()
