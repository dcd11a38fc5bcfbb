"""Loading without chatter: the libraries' reports off, their progress bars only on a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' load report: what matters of it is raised as an error instead."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silences datasets' bars where stderr is not a terminal, and what its readers log of errors that they raise."""
    import datasets

    readers = logging.getLogger("datasets.packaged_modules")
    level = readers.level
    readers.setLevel(logging.CRITICAL)
    silenced = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if silenced:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        readers.setLevel(level)
        if silenced:
            datasets.enable_progress_bars()
