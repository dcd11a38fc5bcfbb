"""What a module was called with, kept to call it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def has_modules(self) -> bool:
        """Whether modules were among them."""
        return any(isinstance(x, nn.Module) for x in (*self.args, *self.kwargs.values()))


def detached(x: Any) -> Any:
    """A copy of arguments that shares neither memory nor graph with them; caches of earlier keys become None."""
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, (list, tuple)):
        return type(x)(detached(v) for v in x)
    if isinstance(x, dict):
        return {k: detached(v) for k, v in x.items()}
    # A cache of earlier keys would grow with every replay.
    return None if hasattr(x, "get_seq_length") else x
