"""Keeps the libraries underneath quiet, and shows the package's own warnings as one line each."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hf_geosharp.errors import DataWarning, GeosharpWarning

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
}
_NO_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def hush(*, debug: bool, bars: bool) -> None:
    """Set the libraries' environment variables, unless the user has.

    They are read when a library is first imported, so this has to come before.
    """
    wanted = ({} if debug else _QUIET) | ({} if bars else _NO_BARS)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


@contextmanager
def warnings_as(say: Callable[[str], None], *, debug: bool) -> Iterator[None]:
    """Hand the package's warnings to ``say``, one line each; those of other libraries only when debugging.

    What is the same for every model, because it is about the data, is said once.
    """
    said: set[str] = set()
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
        warnings.simplefilter("always", GeosharpWarning)
        show = warnings.showwarning

        def one_line(message: Warning | str, category: type[Warning], *where: object) -> None:
            if issubclass(category, GeosharpWarning):
                text = " ".join(str(message).split())
                if not (issubclass(category, DataWarning) and text in said):
                    say(f"warning: {text}")
                said.add(text)
            else:
                show(message, category, *where)  # type: ignore[arg-type]

        warnings.showwarning = one_line  # type: ignore[assignment]
        yield
