"""A section of the benchmarks as a command of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging


def alone(measure: Callable[[bool], Any], page: str | None, quick: str) -> None:
    """Measures and prints; ``quick`` says what the option of that name leaves of it."""
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    measure(arguments.quick)
