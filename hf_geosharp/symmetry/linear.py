"""Linear maps y = W x + b on a model, independent of how their weight is stored."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LinearMap:
    """A module that is a linear map with its weight as one parameter.

    ``in_axis`` and ``out_axis`` say which axis of the weight reads and which writes.
    """

    module: nn.Module
    in_axis: int
    out_axis: int

    @property
    def weight(self) -> nn.Parameter:
        """The weight."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, if there is one."""
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, nn.Parameter) else None

    @property
    def out_features(self) -> int:
        """Size of the output."""
        return self.weight.shape[self.out_axis]

    @property
    def in_features(self) -> int:
        """Size of the input."""
        return self.weight.shape[self.in_axis]


def as_linear(module: nn.Module | None) -> LinearMap | None:
    """The module as a linear map, or None if it is not one whose weight can be read as such.

    The code that it runs tells, which a class of one's own may have from ``nn.Linear`` or from transformers' ``Conv1D``
    (y = x W + b, its weight stored [in, out]).
    """
    from transformers.pytorch_utils import Conv1D

    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, nn.Parameter) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    code = getattr(type(module), "forward", None)  # a scripted class has none of its own
    if code is nn.Linear.forward:
        return LinearMap(module, in_axis=1, out_axis=0)
    if code is Conv1D.forward:
        return LinearMap(module, in_axis=0, out_axis=1)
    return None
