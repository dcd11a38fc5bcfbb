"""Full float32: what GPUs and CPUs may round off in float32 products is larger than what a perturbation changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _switches() -> list[tuple[Any, str, Any]]:
    """Where torch keeps its permissions to round: owner, attribute, and the value that forbids it."""
    backends = torch.backends
    owners = [
        getattr(getattr(backends, library), operation, None)
        for library, operation in (
            ("cuda", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"),
        )
    ]  # fmt: skip
    # torch 2.9 has one switch an operation, and does not like to see them mixed with the older ones.
    found: list[tuple[Any, str, Any]] = [
        (owner, "fp32_precision", "ieee") for owner in owners if _has(owner, "fp32_precision")
    ]
    return found or [(backends.cuda.matmul, "allow_tf32", False), (backends.cudnn, "allow_tf32", False)]


def _has(owner: Any, name: str) -> bool:
    try:
        getattr(owner, name)
    except (AttributeError, AssertionError):
        return False
    return owner is not None


@contextmanager
def full_float32() -> Iterator[None]:
    """TF32 and bfloat16 inside float32 products and convolutions are off meanwhile, and as they were afterwards."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _switches()]
    try:
        for owner, name, value in _switches():
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
