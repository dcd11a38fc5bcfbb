"""What is put around a model to run it: taken off, and what was put into it left out for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from hf_geosharp.errors import UsageError

_OUTER = frozenset(
    {
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "torch.nn.parallel.data_parallel.DataParallel",
        "deepspeed.runtime.engine.DeepSpeedEngine",
    }
)
_COMPILED = frozenset({"torch._dynamo.eval_frame.OptimizedModule"})
"""Classes by name: not all of them are installed, and to import some takes seconds."""


def check_module(model: object, instead: str) -> None:
    """Makes sure that a model is one in memory; ``instead`` is what to do with the name of one.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(model, nn.Module):
        return
    inside = isinstance(getattr(model, "model", None), nn.Module)
    advice = "pass what it has as its model" if inside else instead
    raise UsageError(f"the model is {model!r:.60}, not a module; {advice}")


def unwrap(model: nn.Module) -> nn.Module:
    """The module that the user wrote, out of DDP, DataParallel, DeepSpeed's engine and torch.compile, in any order.

    FSDP1, which keeps the weights to itself, is left where it is.
    """
    while True:
        kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
        inner = getattr(model, "module" if kinds & _OUTER else "_orig_mod", None)
        if not isinstance(inner, nn.Module) or not kinds & (_OUTER | _COMPILED):
            return model
        model = inner


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """The class's own forward, without accelerate's autocast and without compiled code."""
    written = model.__dict__.get("_original_forward")
    patched = model.__dict__.get("forward")
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if getattr(m, "_compiled_call_impl", None)]
    regions = [
        (m._modules, name, child)
        for m in model.modules()
        for name, child in m._modules.items()
        if isinstance(getattr(child, "_orig_mod", None), nn.Module)
    ]
    try:
        if written is not None and patched is not None:
            model.forward = written
        for module, _ in compiled:
            module._compiled_call_impl = None
        for modules, name, child in regions:
            modules[name] = child._orig_mod  # type: ignore[union-attr, assignment]
        yield
    finally:
        if written is not None and patched is not None:
            model.forward = patched
        for module, implementation in compiled:
            module._compiled_call_impl = implementation
        for modules, name, child in regions:
            modules[name] = child


@contextmanager
def uncompiled() -> Iterator[None]:
    """Code that was compiled runs as it was written, under its own names, where torch can be told so (2.6 or newer).

    What looks into calls is no code to be compiled along with the model's.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to import it takes seconds
        yield
        return
    import torch

    stance = getattr(torch.compiler, "set_stance", None)
    with nullcontext() if stance is None else stance("force_eager"):
        yield
