"""What hangs together: a partition that grows coarser as its elements are joined (union-find)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Partition(Generic[T]):
    """Elements in groups; an element that nobody has joined is a group by itself.

    Args:
        elements: known from the beginning; others become known when they are first asked for.
    """

    def __init__(self, elements: Iterable[T] = ()) -> None:
        self._root = {x: x for x in elements}

    def __contains__(self, x: T) -> bool:
        return x in self._root

    def __iter__(self) -> Iterator[T]:
        """The elements, in the order in which they became known."""
        return iter(self._root)

    def group(self, x: T) -> T:
        """The element that stands for the group of this one."""
        root = self._root
        root.setdefault(x, x)
        while root[x] != x:
            root[x] = root[root[x]]  # or chains of thousands of elements are walked over and over
            x = root[x]
        return x

    def join(self, a: T, b: T) -> bool:
        """Makes one group of two; whether they were two."""
        one, other = self.group(a), self.group(b)
        self._root[one] = other
        return one != other

    def groups(self) -> dict[T, list[T]]:
        """The groups by what stands for them; they and their elements in the order in which they became known."""
        found: dict[T, list[T]] = {}
        for x in list(self._root):
            found.setdefault(self.group(x), []).append(x)
        return found
