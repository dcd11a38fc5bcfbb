"""What a module was called with, kept to call it again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a module.

    Attributes:
        read: which of the tensors that it returned somebody reads, as far as that is known: a module may return keys
            and values, or what it looked like inside, next to what its model goes on with.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    read: set[int] = field(default_factory=set)

    @property
    def has_modules(self) -> bool:
        """Whether modules were among them, or functions, which may be of a module or call one."""
        return any(callable(x) for x in (*self.args, *self.kwargs.values()))


def mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments in which each thing is changed, in lists, tuples and dicts of the same kinds; plain ones if need be."""
    if isinstance(x, (list, tuple)):
        items = [mapped(v, change) for v in x]
        try:
            # A named tuple takes its fields one by one.
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        except TypeError:  # its constructor wants something else
            return tuple(items) if isinstance(x, tuple) else items
    if isinstance(x, dict):
        changed = {key: mapped(value, change) for key, value in x.items()}
        try:
            made = copy.copy(x)
            for key, value in changed.items():
                made[key] = value
        except TypeError:  # it cannot be written to
            return changed
        return made
    return change(x)


def detached(x: Any) -> Any:
    """A copy of arguments that shares neither memory nor graph with them; caches of earlier keys become None."""

    def apart(v: Any) -> Any:
        if isinstance(v, Tensor):
            return v.detach().clone()
        # A cache of earlier keys would grow with every replay.
        return None if hasattr(v, "get_seq_length") else v

    return mapped(x, apart)
