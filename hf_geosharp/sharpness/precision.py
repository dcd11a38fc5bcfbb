"""Full float32: what GPUs and CPUs may round off in float32 products is larger than what a perturbation changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

_DEVICES = ("cpu", "cuda", "mps", "xpu")

_Switch = tuple[Callable[[], Any], Callable[[Any], None], Any]
"""How it is read, how it is set, and the value that forbids rounding."""


def _switches() -> list[_Switch]:
    """Where torch keeps its permissions to round, in the order in which they have to be set."""
    backends = torch.backends
    owners = [
        getattr(getattr(backends, library), operation, None)
        for library, operation in (
            ("cuda", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"),
        )
    ]  # fmt: skip
    # torch 2.9 has one switch an operation next to the older ones. Code that reads an older one, as a CTC loss does,
    # fails where they contradict each other. Setting an older one sets newer ones, which therefore come last.
    return [
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
        _of(backends.cudnn, "allow_tf32", False),
        *(_of(owner, "fp32_precision", "ieee") for owner in owners),
    ]


def _of(owner: Any, name: str, value: Any) -> _Switch:
    return partial(getattr, owner, name), partial(setattr, owner, name), value


def name_of_dtype(dtype: torch.dtype) -> str:
    """What results and messages call it: "float32", say."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def full_float32() -> Iterator[None]:
    """TF32 and bfloat16 inside float32 products, and autocast, are off meanwhile, and as they were afterwards."""
    before = []
    for read, put, value in _switches():
        try:
            before.append((put, read(), value))
        except (AttributeError, AssertionError, RuntimeError):
            # This torch has no such switch, or somebody has set it and its likes to contradict one another.
            continue
    try:
        for put, _, value in before:
            put(value)
        with ExitStack() as stack:
            # Older torch does not know autocast on every device, and does not let one ask.
            for device in filter(torch.is_autocast_enabled, filter(torch.amp.is_autocast_available, _DEVICES)):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        for put, found, _ in before:
            put(found)
