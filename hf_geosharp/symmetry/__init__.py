"""Which directions of a model's weights the model cannot feel."""

from hf_geosharp.symmetry.find import find_symmetries
from hf_geosharp.symmetry.map import Element, SymmetryMap
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.views import View

__all__ = ["Element", "Pair", "SymmetryMap", "View", "find_symmetries"]
