"""Activations that fit: micro-batches that shrink where memory runs out, and gradient checkpointing."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from hf_geosharp.errors import ModelError, UsageError

_TEXTS = ("out of memory", "can't allocate memory", "not enough memory")
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had no memory left; what CPU and MPS raise is told by its text only."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(t in text for t in _TEXTS))


def give_back() -> None:
    """Lets the C library return what lies free between other things to the system, where it can (glibc).

    It keeps pieces below 32 MiB, and what comes next may be of other sizes: a process then holds what nobody uses.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class MicroBatch:
    """How many samples go through the model at once: a number, all, or ("auto") all until memory runs out.

    One instance serves a whole run, so that what was learnt on one batch holds for the next; ``readings`` are what the
    loss was found to be a mean over: several where those differ in no sample so far.
    """

    def __init__(self, wanted: int | Literal["auto"] | None, say: Callable[[str], None] | None = None) -> None:
        self.adapts = wanted == "auto"
        self._limit = None if wanted == "auto" else wanted
        self._say = say
        self.readings: tuple[int, ...] = ()

    def size(self, samples: int) -> int:
        """For a batch, or a rank's part of it."""
        return samples if self._limit is None else min(self._limit, samples)

    def halve(self, samples: int) -> None:
        """Half as many from now on; what is cached is given back to the device.

        Raises:
            ModelError: it was a single sample already.
        """
        size = self.size(samples)
        if size <= 1:
            raise ModelError(
                "out of memory with a single sample at a time. Use gradient checkpointing, a device with more memory, "
                "or shorter texts or smaller images"
            )
        self._limit = size // 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._say is not None:
            self._say(f"out of memory with {size} samples at a time: going on with {self._limit}")


@contextmanager
def checkpointed(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Layers forget their activations meanwhile and compute them again in the backward pass.

    transformers itself does so in training mode only, where dropout would be active too; so the layers that it marks
    are wrapped here, and left as they were.

    Raises:
        UsageError: no layer of the model is marked.
    """
    if not wanted:
        yield
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            f"gradient checkpointing: {type(model).__name__} has no layers that transformers marks for it; leave it out"
        )
    own = [(layer, layer.__dict__.get("forward")) for layer in layers]
    try:
        for layer in layers:
            layer.forward = partial(_again, layer.forward)
        yield
    finally:
        for layer, forward in own:
            if forward is None:
                del layer.__dict__["forward"]
            else:
                layer.forward = forward


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    # A cache would be written twice. Without gradients there is nothing to keep.
    if not torch.is_grad_enabled() or any(kwargs.get(name) is not None for name in _CACHES):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
