"""Borrowing a model: whatever a score changes comes back bit for bit, also after an exception or Ctrl-C."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_geosharp.errors import ModelError, UnsupportedModelError, UsageError, warn
from hf_geosharp.evaluating import evaluating
from hf_geosharp.randomness import random_states, set_random_states
from hf_geosharp.sharpness.precision import name_of_dtype
from hf_geosharp.sharpness.shards import Shards, rows_of
from hf_geosharp.symmetry.parameters import Leaf, leaves

_HALF = (torch.float16, torch.bfloat16)

_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
"""Where parameters and modules keep what others have hung on gradients: to clip them, record them, step with them."""


@dataclass(frozen=True)
class Borrowed:
    """A model that may be perturbed.

    ``leaves`` are its parameters as pieces of storage, ``originals`` copies of them (to be read only), ``dtype`` the
    common dtype while it is borrowed, ``stored_dtypes`` what the parameters are stored in. ``shards`` is there for a
    model that is spread over processes; leaves and originals then are the rows that lie here.
    """

    model: nn.Module
    leaves: Mapping[str, Leaf]
    originals: Mapping[str, Tensor]
    dtype: torch.dtype
    stored_dtypes: tuple[str, ...]
    shards: Shards | None = None


def _not_finite(x: Tensor) -> int:
    """How many entries are NaN or infinite. The extremes tell whether any is, at a fraction of the cost of a count."""
    if not x.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(x.detach()))).all()):
        return 0
    return int((~torch.isfinite(x)).sum())


def check(model: nn.Module, only: Collection[str] | None = None, shards: Shards | None = None) -> None:
    """Refuses what cannot be scored; ``only`` names the parameters that may move, if not all do.

    Of a model with ``shards`` all ranks have to call, and all refuse what one of them sees.

    Raises:
        UnsupportedModelError: quantised weights that would have to move, parameters on meta or offloaded.
        ModelError: no parameters, or NaN or infinity in one, which is named.
        UsageError: the call is made inside ``torch.inference_mode()``, where nothing has gradients.
    """
    if torch.is_inference_mode_enabled():
        raise UsageError("a score needs gradients: call it outside torch.inference_mode() (torch.no_grad() is fine)")
    quantised = getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None
    if quantised and only is None:
        raise UnsupportedModelError("the model is quantised: its weights cannot be perturbed; load it unquantised")
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if any(getattr(h, "offload", False) for h in (hook, *getattr(hook, "hooks", ()))):
            raise UnsupportedModelError(
                f"{name or 'the model'} is offloaded to CPU or disk and would get no gradients; load it without offload"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedModelError(
                f"{name or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1), which flattens its weights; "
                "shard it with fully_shard (FSDP2) instead"
            )
    named = list(model.named_parameters())
    for name, p in named:
        if hasattr(p, "ds_id") and not p.numel():
            raise UnsupportedModelError(
                f"{name} is partitioned by DeepSpeed ZeRO-3, which keeps its weights to itself; shard the model with "
                "fully_shard (FSDP2), or score the saved checkpoint"
            )
        if p.dtype not in (torch.float32, torch.float64, *_HALF) and (only is None or name in only):
            raise UnsupportedModelError(f"{name} has dtype {p.dtype}: quantised weights cannot be perturbed")
    if not named:
        raise ModelError("the model has no parameters")
    for name, p in named:
        if p.is_meta:
            raise UnsupportedModelError(
                f"{name} is on the meta device (offloaded or not loaded); load the whole model into memory first"
            )
    floating = [(name, p) for name, p in named if p.dtype in (torch.float32, torch.float64, *_HALF)]
    bad = [_not_finite(rows_of(p)) for _, p in floating]
    for (name, p), count in zip(floating, bad if shards is None else shards.total(bad), strict=True):
        if count:
            raise ModelError(
                f"{name} has {count} NaN or infinite entries out of {p.numel()}: such a model has no score"
            )


@contextmanager
def borrow(
    model: nn.Module, dtype: torch.dtype | None = None, only: Collection[str] | None = None
) -> Iterator[Borrowed]:
    """The model in eval mode with every parameter taking gradients, in one dtype that a perturbation survives.

    Half-precision parameters become float32 meanwhile (a perturbation is smaller than their spacing); ``dtype``
    float64 widens everything. Where ``only`` names the parameters that may move, all others stay as they are stored,
    and take no gradients. Hooks on gradients are taken off: they would change them, or act on them; embeddings give the
    gradient of the loss itself, neither ``sparse`` nor with ``scale_grad_by_freq``. On leaving, weights, buffers, plain
    attributes, gradients, ``requires_grad``, hooks, train/eval modes and random states are as they were.

    Raises:
        UnsupportedModelError, ModelError, UsageError: as :func:`check`.
    """
    # What a sharded model has gathered is no parameter of it.
    shards = Shards.of(model)
    check(model, only, shards)
    stored = tuple(sorted({name_of_dtype(p.dtype) for p in model.parameters()}))
    target = dtype or _common_dtype(model, only)
    with ExitStack() as stack:
        if shards is not None:
            if any(p.dtype in _HALF for n, p in shards.parameters.items() if only is None or n in only):
                _warn_of_half(target)
            stack.enter_context(shards.widened(target, only))
        stack.enter_context(evaluating(model))
        yield stack.enter_context(_borrowed(model, target, only, shards, stored))


@contextmanager
def _borrowed(
    model: nn.Module, target: torch.dtype, only: Collection[str] | None, shards: Shards | None, stored: tuple[str, ...]
) -> Iterator[Borrowed]:
    """The same where what is sharded is in the dtype that is wanted."""
    flags = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    owners = (*(p for p, _, _ in flags), *model.modules())
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    gradients = [(m, m.sparse, m.scale_grad_by_freq) for m in embeddings]
    hooks = [(own, dict(own)) for owner in owners for name in _HOOKS if (own := getattr(owner, name, None))]
    drawn = random_states()
    swapped: list[tuple[Tensor, Tensor]] = []
    bridges: list[RemovableHandle] = []
    originals: dict[str, Tensor] = {}
    held: Mapping[str, Leaf] = {}
    try:
        with ExitStack() as stack:
            if shards is not None:
                stack.enter_context(shards.in_full_precision())
                stack.enter_context(shards.taking_gradients(only))
            _warn_of_hooks(model, target, only)
            _swap(model, target, swapped, only)
            if only is not None:
                _bridge(model, {id(p): data.dtype for p, data in swapped}, bridges)
            held = _held(model, only)
            moving = {id(p) for leaf in held.values() for p, _ in leaf.members}
            for name, leaf in held.items():
                originals[name] = leaf.tensor.clone()
            for own, _ in hooks:
                own.clear()
            for p, _, _ in flags:
                p.grad = None
                p.requires_grad_(id(p) in moving)
            for m in embeddings:
                # The gradient of the loss itself, in the form that everything else has: no other scale by batch.
                m.sparse = m.scale_grad_by_freq = False
            yield Borrowed(model, held, originals, target, stored, shards)
    finally:
        if shards is not None:
            shards.reset()
        for bridge in bridges:
            bridge.remove()
        with torch.no_grad():
            for name, value in originals.items():
                held[name].tensor.copy_(value)
        for tensor, data in swapped:
            tensor.data = data
        for p, flag, grad in flags:
            p.requires_grad_(flag)
            p.grad = grad
        for own, hung in hooks:
            own.update(hung)
        for m, sparse, scaled in gradients:
            m.sparse, m.scale_grad_by_freq = sparse, scaled
        set_random_states(drawn)


def _held(model: nn.Module, only: Collection[str] | None) -> dict[str, Leaf]:
    """The leaves that may move: those that one of the parameters named lies on, or all."""
    shards = Shards.of(model)
    held = leaves(model) if shards is None else shards.leaves()
    if only is None:
        return held
    moving = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in only}
    return {name: leaf for name, leaf in held.items() if any(id(p) in moving for p, _ in leaf.members)}


def _warn_of_hooks(model: nn.Module, target: torch.dtype, only: Collection[str] | None) -> None:
    """Other data under a parameter ends what DistributedDataParallel hung on its gradient; ranks would drift apart."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if together and any(leaf.tensor.dtype != target for leaf in _held(model, only).values()):
        warn(
            f"the weights are held in {target} for the score, which detaches them from a DistributedDataParallel "
            "around the model: if it is being trained, score a copy (copy.deepcopy(model)) instead"
        )


def _common_dtype(model: nn.Module, only: Collection[str] | None) -> torch.dtype:
    wide = all(leaf.tensor.dtype == torch.float64 for leaf in _held(model, only).values())
    return torch.float64 if wide else torch.float32


def _swap(
    model: nn.Module, target: torch.dtype, swapped: list[tuple[Tensor, Tensor]], only: Collection[str] | None
) -> None:
    """Gives every parameter and floating buffer of another dtype data in ``target``; shared storage stays shared.

    What may not move stays as it is, and so do all buffers then.
    """
    half = False
    for leaf in _held(model, only).values():
        if leaf.tensor.dtype == target:
            continue
        half = half or leaf.tensor.dtype in _HALF
        wide = leaf.tensor.to(target)
        for p, offset in leaf.members:
            swapped.append((p, p.data))
            p.data = wide if leaf.alike else wide.as_strided(p.shape, p.stride(), offset)
    for buffer in model.buffers() if only is None else ():
        # A model in half precision may keep float32 buffers (rotary tables) on purpose: those only widen to float64.
        if buffer.is_floating_point() and buffer.dtype != target:
            half = half or buffer.dtype in _HALF
            swapped.append((buffer, buffer.data))
            buffer.data = buffer.data.to(target)
    if half:
        _warn_of_half(target)


def _warn_of_half(target: torch.dtype) -> None:
    warn(f"half-precision weights are scored in {target}")


def _bridge(model: nn.Module, narrow: Mapping[int, torch.dtype], handles: list[RemovableHandle]) -> None:
    """Lets modules whose weights were widened meet others that were not: they compute wide and answer as asked.

    ``narrow`` has the dtypes that parameters are stored in, by identity. The layers of an adapter do that by
    themselves; modules that are trained beside them do not.

    Raises:
        UsageError: one of them is an embedding, which nobody asks in any precision, or was widened only in part.
    """
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        dtypes = [narrow[id(p)] for p in own.values() if id(p) in narrow]
        if not dtypes:
            continue
        wide = {p.dtype for p in own.values() if id(p) in narrow}
        still = [n for n, p in own.items() if p.dtype not in wide]
        if still:
            moving = ", ".join(n for n, p in own.items() if id(p) in narrow)
            raise UsageError(
                f"{name}: its {moving} is trained beside the adapter, its {', '.join(still)} stays in {dtypes[0]}, and "
                "no layer computes in both: load the base in float32"
            )
        if isinstance(module, nn.Embedding):
            raise UsageError(
                f"{name} is an embedding that is trained beside the adapter, on a base in {dtypes[0]}: load the base "
                "in float32"
            )
        asked: list[torch.dtype] = []
        handles.append(module.register_forward_pre_hook(partial(_widen_input, asked), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(_narrow_output, asked)))


def _widen_input(asked: list[torch.dtype], module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    wide = next(module.parameters(recurse=False)).dtype
    given = [x.dtype for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
    asked.append(given[0] if given else wide)
    return tuple(_as(x, wide) for x in args), {name: _as(x, wide) for name, x in kwargs.items()}


def _narrow_output(asked: list[torch.dtype], module: nn.Module, args: Any, output: Any) -> Any:
    return _as(output, asked.pop())


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
