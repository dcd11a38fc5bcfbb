"""Geodesic sharpness during training: a callback for transformers' Trainer."""

from __future__ import annotations

from hf_geosharp.trainer.callback import GeodesicSharpnessCallback

__all__ = ["GeodesicSharpnessCallback"]
