"""What there is to know beside a score: for the result, and for whoever is there."""

from __future__ import annotations

from hf_geosharp.errors import warn


class Notes(list[str]):
    """Texts, in the order in which they came up."""

    def warn(self, text: str) -> None:
        """Adds one and warns of it at once, at the place from where a score was asked for."""
        self.append(text)
        warn(text)
