"""The model that is measured: the one in training without its wrappers, or where need be a merged or plain copy.

What cannot be measured is refused here, with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_geosharp.errors import UnsupportedModelError
from hf_geosharp.sharpness.borrow import check
from hf_geosharp.sharpness.selection import movable
from hf_geosharp.sharpness.shards import Shards, is_sharded, rows_of
from hf_geosharp.symmetry.fingerprint import of_adapters
from hf_geosharp.wrappers import as_written, unwrap

_HALF = (torch.float16, torch.bfloat16)


def refuse(model: nn.Module, args: Any = None, params: str = "all") -> None:
    """Stops where a set-up keeps the weights so that they cannot be perturbed; all processes have to call.

    Args:
        model: as the Trainer has it.
        args: the TrainingArguments.
        params: which parameters are measured, "all" or "lora".

    Raises:
        UnsupportedModelError: ZeRO-3, FSDP1, tensor parallelism, quantised or offloaded weights; weights that FSDP2 has
            sharded, with adapters that would have to be merged.
        ModelError: NaN in a parameter.
        UsageError: "lora" without an active adapter.
    """
    inner = unwrap(model)
    try:
        for applies, reason in _REFUSED:
            if applies(model, args):
                raise UnsupportedModelError(reason)
        shards = Shards.of(inner)
        only = movable(inner, params)
        if shards is not None:
            _check_sharded(inner, params)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{str(error).rstrip('.')}. Or train without the callback and score the saved checkpoints: hf-geosharp "
            "score CHECKPOINT."
        ) from None
    check(inner, only, shards)


def _check_sharded(model: nn.Module, params: str) -> None:
    """A sharded model is measured as it is: no whole copy of it would fit.

    Raises:
        UnsupportedModelError: a copy would be needed.
    """
    if params == "all" and _has_adapters(model):
        raise UnsupportedModelError(
            "adapters are measured merged into the weights, and weights that are sharded over processes cannot be "
            "merged: params='lora' measures the adapter alone"
        )
    if _notices(model, False, movable(model, params)):
        raise UnsupportedModelError(
            "the weights have gradient hooks, which a measurement would trigger, and are sharded over processes, so "
            "no copy can be measured instead"
        )


def _zero_3(model: nn.Module, args: Any) -> bool:
    plugin = getattr(args, "deepspeed_plugin", None)
    return getattr(plugin, "zero_stage", 0) == 3 or any(hasattr(p, "ds_id") for p in model.parameters())


def _fsdp_1(model: nn.Module, args: Any) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    asked = bool(getattr(args, "fsdp", None)) and not any(map(is_sharded, model.parameters()))
    return asked or any(isinstance(m, FullyShardedDataParallel) for m in model.modules())


_REFUSED: tuple[tuple[Callable[[nn.Module, Any], bool], str], ...] = (
    (
        _zero_3,
        "DeepSpeed ZeRO-3 keeps only a part of each weight on a process, and to itself: there is nothing to perturb. "
        "Shard the model by FSDP2 instead",
    ),
    (
        _fsdp_1,
        "FSDP1 flattens the weights and keeps only a part of them on a process: there is nothing to perturb. Shard the "
        "model by FSDP2 instead (fsdp_version: 2)",
    ),
)


@contextmanager
def subject(model: nn.Module, *, hooked: bool = False, params: str = "all") -> Iterator[nn.Module]:
    """The model to be measured. It is the one in training, or a copy where that would notice:

    - a PEFT model is merged on a copy in float32, for merging and unmerging changes the base weights, but where only
      its adapter may move (``params`` "lora");
    - weights with gradient hooks (layer-wise optimizers step in them, reporters record in them) are copied;
    - half-precision weights are copied where the set-up has hooks of its own (``hooked``: DDP, DeepSpeed), which
      would be lost when the weights are widened.

    Autocast that accelerate put around ``forward`` and compiled code are left out meanwhile: in half precision a small
    perturbation disappears.

    Raises:
        UnsupportedModelError: adapters that cannot be merged, or a model that cannot be copied and would have to be.
    """
    inner = unwrap(model)
    with as_written(inner):
        if params == "all" and _has_adapters(inner):
            yield _merged(inner)
        elif _notices(inner, hooked, movable(inner, params)):
            yield _copied(inner, "its weights have gradient hooks")
        else:
            yield inner


def _notices(model: nn.Module, hooked: bool, only: Collection[str] | None) -> bool:
    """Whether a training would notice that the parameters that may move (``only``; all if None) do."""
    return any(
        p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) or (hooked and p.dtype in _HALF)
        for n, p in model.named_parameters()
        if only is None or n in only
    )


def _copied(model: nn.Module, why: str) -> nn.Module:
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} has to be copied to be measured, because {why}, but cannot be "
            f"copied ({type(error).__name__}: {error})."
        ) from error
    for p in twin.parameters():
        p.grad = None
    return twin


def _has_adapters(model: nn.Module) -> bool:
    """Whether PEFT wrapped the model, or put layers of its own into it."""
    return hasattr(model, "peft_config") or any(
        hasattr(m, "base_layer") and hasattr(m, "active_adapters") for m in model.modules()
    )


def _merged(model: nn.Module) -> nn.Module:
    kinds = sorted({str(getattr(c, "peft_type", c)).split(".")[-1] for c in _adapters(model).values()})
    # Looked up on the class: attributes of the instance are those of its tuner, and of its base model.
    tuner = getattr(model, "base_model", None)
    if not hasattr(model, "get_base_model") or not callable(getattr(type(tuner), "merge_and_unload", None)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has adapters ({', '.join(kinds)}) that cannot be merged into its weights, and "
            "only merged weights can be measured. Use LoRA or its kin through peft.get_peft_model, or leave the "
            "callback out."
        )
    twin: Any = _copied(model, "its adapters have to be merged")
    if any(p.dtype in _HALF for p in twin.parameters()):
        twin = twin.float()
    try:
        merged: nn.Module = twin.merge_and_unload()
    except Exception as error:
        raise UnsupportedModelError(
            f"the adapters ({', '.join(kinds)}) of {type(model).__name__} cannot be merged: {error}"
        ) from error
    return merged


def _adapters(model: nn.Module) -> Mapping[str, Any]:
    found = getattr(model, "peft_config", {})
    return found if isinstance(found, Mapping) else {"default": found}


def fingerprint(model: nn.Module) -> tuple[int | str, ...]:
    """A checksum of each weight and buffer over its bits, and which adapters take part: equal for equal functions.

    Of weights that are sharded, of what lies here. It costs reading them.
    """
    tensors = [*map(rows_of, model.parameters()), *model.buffers()]
    sums = (int(_bits(t.detach()).sum(dtype=torch.int64)) for t in tensors if t.numel() and not t.is_meta)
    return (of_adapters(model), *sums)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(whole[tensor.element_size()]) if tensor.is_floating_point() else tensor
