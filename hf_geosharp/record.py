"""What is written as JSON and read again: records that say what they are, and refuse to be read as something else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from hf_geosharp.errors import DataError


class Record:
    """A frozen dataclass with a kind and a schema."""

    KIND: ClassVar[str]
    SCHEMA: ClassVar[int]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; keys in a fixed order."""
        return {"schema": self.SCHEMA, "kind": self.KIND, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    def to_json(self, indent: int | None = 2) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def fields_of(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """The fields in what :meth:`to_dict` wrote.

        Raises:
            DataError: it is of another kind or schema.
        """
        if not isinstance(data, Mapping):
            raise DataError(f"no {cls.KIND} but {data!r:.60}: from_dict takes what to_dict gave")
        if data.get("kind") != cls.KIND or data.get("schema") != cls.SCHEMA:
            raise DataError(
                f"no {cls.KIND} of schema {cls.SCHEMA}: kind {data.get('kind')!r}, schema {data.get('schema')!r}"
            )
        return {name: value for name, value in data.items() if name not in ("kind", "schema")}
