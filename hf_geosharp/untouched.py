"""What the user's own code must not notice: sources of random numbers, and loaders, are left as they were found."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from hf_geosharp.randomness import same_random_numbers

_ACCELERATORS = ("cuda", "xpu", "npu", "mps")
_DEPTH = 3


@contextmanager
def untouched(*owners: Any, seed: int | None = None) -> Iterator[None]:
    """Random states of python, numpy and torch, and those that the owners keep for themselves, come back on leaving.

    So does what accelerate knows of loaders that are being read: one that is left before its end stays the one that its
    steps of gradient accumulation go by.

    Args:
        owners: data sets, loaders and collators: generators among their attributes (a collator that masks with a seed
            of its own has one, or makes one on its first call) are restored too, and all attributes of a loader.
        seed: seeds everything global meanwhile.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), _accelerator_states()
    kept = [entry for owner in owners for entry in _kept(owner)]
    noted = [(vars(owner), dict(vars(owner))) for owner in owners if isinstance(owner, DataLoader)]
    noted += _gradient_state()
    try:
        if seed is not None:
            same_random_numbers(seed)
        yield
    finally:
        for now, before in noted:
            now.clear()
            now.update(before)
        for attributes, unset, generators in kept:
            attributes.update({name: None for name in unset if _state(attributes.get(name)) is not None})
            for generator, state in generators:
                _restore(generator, state)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        for backend, state in states[3]:
            _set_accelerator_state(backend, state)


def _gradient_state() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What all of accelerate shares about loaders and accumulation, and what it is now; nothing if it is not in use."""
    module = sys.modules.get("accelerate.state")
    if module is None:
        return []
    shared = module.GradientState._shared_state
    return [(shared, {name: list(value) if isinstance(value, list) else value for name, value in shared.items()})]


def _accelerator_states() -> list[tuple[Any, Any]]:
    out = []
    for name in _ACCELERATORS:
        backend = getattr(torch, name, None)
        if backend is None or not getattr(backend, "is_available", lambda: torch.backends.mps.is_available())():
            continue
        # Asking would initialise a device that nobody uses.
        if getattr(backend, "is_initialized", lambda: True)():
            many = hasattr(backend, "get_rng_state_all")
            out.append((backend, backend.get_rng_state_all() if many else backend.get_rng_state()))
    return out


def _set_accelerator_state(backend: Any, state: Any) -> None:
    if isinstance(state, list):
        backend.set_rng_state_all(state)
    else:
        backend.set_rng_state(state)


def _kept(owner: Any, depth: int = _DEPTH) -> Iterator[tuple[dict[str, Any], list[str], list[tuple[Any, Any]]]]:
    """An object's attributes, which of them are None, and the states of generators among them; so for what it holds."""
    attributes = getattr(owner, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(owner, (nn.Module, type)):
        return
    generators = [(value, state) for value in attributes.values() if (state := _state(value)) is not None]
    yield attributes, [name for name, value in attributes.items() if value is None], generators
    for value in list(attributes.values()) if depth > 1 else ():
        yield from _kept(value, depth - 1)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return None


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
