"""Borrowing a model: whatever a score changes comes back bit for bit, also after an exception or Ctrl-C."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_geosharp.errors import GeosharpWarning, ModelError, UnsupportedModelError, UsageError
from hf_geosharp.symmetry.parameters import Leaf, leaves

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Borrowed:
    """A model that may be perturbed.

    ``leaves`` are its parameters as pieces of storage, ``originals`` copies of them (to be read only), ``dtype`` the
    common dtype while it is borrowed, ``stored_dtypes`` what the parameters are stored in.
    """

    model: nn.Module
    leaves: Mapping[str, Leaf]
    originals: Mapping[str, Tensor]
    dtype: torch.dtype
    stored_dtypes: tuple[str, ...]


def check(model: nn.Module) -> None:
    """Refuses what cannot be scored.

    Raises:
        UnsupportedModelError: quantised weights, parameters on meta or offloaded.
        ModelError: no parameters, or NaN or infinity in one, which is named.
        UsageError: the call is made inside ``torch.inference_mode()``, where nothing has gradients.
    """
    if torch.is_inference_mode_enabled():
        raise UsageError("a score needs gradients: call it outside torch.inference_mode() (torch.no_grad() is fine)")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModelError("the model is quantised: its weights cannot be perturbed; load it unquantised")
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if any(getattr(h, "offload", False) for h in (hook, *getattr(hook, "hooks", ()))):
            raise UnsupportedModelError(
                f"{name or 'the model'} is offloaded to CPU or disk and would get no gradients; load it without offload"
            )
    named = list(model.named_parameters())
    for name, p in named:
        if p.dtype not in (torch.float32, torch.float64, *_HALF):
            raise UnsupportedModelError(f"{name} has dtype {p.dtype}: quantised weights cannot be perturbed")
    if not named:
        raise ModelError("the model has no parameters")
    for name, p in named:
        if p.is_meta:
            raise UnsupportedModelError(
                f"{name} is on the meta device (offloaded or not loaded); load the whole model into memory first"
            )
        if not bool(torch.isfinite(p.detach()).all()):
            bad = int((~torch.isfinite(p.detach())).sum())
            raise ModelError(f"{name} has {bad} NaN or infinite entries out of {p.numel()}: such a model has no score")


@contextmanager
def borrow(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[Borrowed]:
    """The model in eval mode with every parameter taking gradients, in one dtype that a perturbation survives.

    Half-precision parameters become float32 meanwhile (a perturbation is smaller than their spacing); ``dtype``
    float64 widens everything. On leaving, weights, buffers, gradients, ``requires_grad``, train/eval modes and random
    states are as they were.

    Raises:
        UnsupportedModelError, ModelError, UsageError: as :func:`check`.
    """
    check(model)
    modes = [(m, m.training) for m in model.modules()]
    flags = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    buffers = [(m, {n: (b, _copy(b)) for n, b in m._buffers.items()}) for m in model.modules()]
    random_states = _random_states()
    swapped: list[tuple[Tensor, Tensor]] = []
    originals: dict[str, Tensor] = {}
    held: Mapping[str, Leaf] = {}
    stored = tuple(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
    try:
        target = dtype or _common_dtype(model)
        _warn_of_hooks(model, target)
        _swap(model, target, swapped)
        held = leaves(model)
        for name, leaf in held.items():
            originals[name] = leaf.tensor.clone()
        model.eval()
        for p, _, _ in flags:
            p.grad = None
            p.requires_grad_(True)
        yield Borrowed(model, held, originals, target, stored)
    finally:
        with torch.no_grad():
            for name, value in originals.items():
                held[name].tensor.copy_(value)
        for tensor, data in swapped:
            tensor.data = data
        for module, stored_buffers in buffers:
            _restore_buffers(module, stored_buffers)
        for p, flag, grad in flags:
            p.requires_grad_(flag)
            p.grad = grad
        for module, mode in modes:
            module.training = mode
        _set_random_states(random_states)


def _warn_of_hooks(model: nn.Module, target: torch.dtype) -> None:
    """Other data under a parameter ends what DistributedDataParallel hung on its gradient; ranks would drift apart."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if together and any(p.is_floating_point() and p.dtype != target for p in model.parameters()):
        warnings.warn(
            f"the weights are held in {target} for the score, which detaches them from a DistributedDataParallel "
            "around the model: if it is being trained, score a copy (copy.deepcopy(model)) instead",
            GeosharpWarning,
            stacklevel=4,
        )


def _common_dtype(model: nn.Module) -> torch.dtype:
    return torch.float64 if all(p.dtype == torch.float64 for p in model.parameters()) else torch.float32


def _swap(model: nn.Module, target: torch.dtype, swapped: list[tuple[Tensor, Tensor]]) -> None:
    """Gives every parameter and floating buffer of another dtype data in ``target``; shared storage stays shared."""
    half = False
    for leaf in leaves(model).values():
        if leaf.tensor.dtype == target:
            continue
        half = half or leaf.tensor.dtype in _HALF
        wide = leaf.tensor.to(target)
        for p, offset in leaf.members:
            swapped.append((p, p.data))
            p.data = wide if leaf.alike else wide.as_strided(p.shape, p.stride(), offset)
    for buffer in model.buffers():
        # A model in half precision may keep float32 buffers (rotary tables) on purpose: those only widen to float64.
        if buffer.is_floating_point() and buffer.dtype != target:
            half = half or buffer.dtype in _HALF
            swapped.append((buffer, buffer.data))
            buffer.data = buffer.data.to(target)
    if half:
        warnings.warn(f"half-precision weights are scored in {target}", GeosharpWarning, stacklevel=2)


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _restore_buffers(module: nn.Module, stored: Mapping[str, tuple[Tensor | None, Tensor | None]]) -> None:
    """The buffers that a module had, with what was in them: forward passes may write or replace them."""
    for name in [n for n in module._buffers if n not in stored]:
        del module._buffers[name]
    for name, (buffer, value) in stored.items():
        module._buffers[name] = buffer
        if buffer is None or value is None or buffer.is_meta or torch.equal(buffer, value):
            continue
        for axis, stride in enumerate(buffer.stride()):
            if stride == 0:  # an expanded buffer is stored once
                buffer, value = buffer.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
        buffer.detach().copy_(value)


def _random_states() -> tuple[Tensor, list[Tensor]]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


def _set_random_states(states: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])
