"""The states of the random numbers that a model may draw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

States = tuple[Tensor, list[Tensor], Any, Any]
"""Torch's on the CPU and on each CUDA device that is in use, Python's and NumPy's."""


def random_states() -> States:
    """What they are now."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def set_random_states(states: States) -> None:
    """What they were."""
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])
    random.setstate(states[2])
    np.random.set_state(states[3])


def same_random_numbers(seed: int = 0) -> None:
    """Begins the same sequence anew, whoever calls and whatever was drawn before."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def the_same_drawn() -> Iterator[None]:
    """What is drawn meanwhile is the same each time; afterwards all goes on as if nothing had been drawn."""
    states = random_states()
    try:
        same_random_numbers()
        yield
    finally:
        set_random_states(states)
