"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, in the code that it has gradients in.

    Afterwards every module is in its own mode again, and what passes have left in plain attributes and buffers is gone.
    """
    from hf_geosharp.carried import Carried

    modes = [(module, module.training) for module in model.modules()]
    carried = Carried(model)
    try:
        carried.take_graphs()
        with no_fast_path():
            model.eval()
            yield
    finally:
        # A module's own train() may have touched them.
        carried.put_back(whole=True)
        for module, mode in modes:
            module.training = mode


@contextmanager
def no_fast_path() -> Iterator[None]:
    """The fused path that ``nn.TransformerEncoder`` and its parts take where no gradient is asked for is left out.

    It treats padding in another way (its outputs there are 0), so that a loss would depend on whether a gradient is
    wanted, and it hides what it computes.
    """
    import torch

    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
