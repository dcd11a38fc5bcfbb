"""Geodesic sharpness for evaluate; the metric itself is in the package hf-geosharp.

Nothing else that is a metric may be imported here: evaluate takes the first one it finds in this module.
"""

from hf_geosharp.metric import GeodesicSharpness

__all__ = ["GeodesicSharpness"]
