"""Names of symmetries."""

from __future__ import annotations


class Names:
    """Names of symmetries: the module and the kind, with a number where one module has several."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}

    def __call__(self, module: str, kind: str) -> str:
        """The name of the next symmetry of this kind in a module."""
        name = f"{module}.{kind}" if module else kind
        self._used[name] = self._used.get(name, 0) + 1
        return name if self._used[name] == 1 else f"{name}.{self._used[name]}"
