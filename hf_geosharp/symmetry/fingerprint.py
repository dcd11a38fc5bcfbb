"""What a model computes, as a digest: its code, its settings and every bit of its weights.

Two models of one fingerprint give the same outputs, so that what was proved on the one is proved for the other.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

LIBRARIES = ("torch", "transformers", "peft")
"""Whose code is known by its version."""


def fingerprint(model: nn.Module) -> str | None:
    """The digest; None where code takes part that is not one of the libraries', or weights that lie elsewhere."""
    config: Any = getattr(model, "config", None)
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    if not hasattr(config, "to_dict") or any(map(_is_foreign, model.modules())):
        return None
    if any(type(t) not in (Tensor, nn.Parameter) or t.is_meta for t in tensors.values()):
        return None
    return _of(
        {
            "config": {k: v for k, v in config.to_dict().items() if k != "_name_or_path"},
            "implementations": [getattr(config, f"_{n}_implementation", None) for n in ("attn", "experts")],
            "modules": [[n, type(m).__module__, type(m).__qualname__] for n, m in model.named_modules()],
            "tensors": _contents(tensors),
        }
    )


def of_batches(batches: Iterable[Mapping[str, Any]]) -> str:
    """The digest of inputs."""
    return _of([[_contents({k: v}) if isinstance(v, Tensor) else [k, v] for k, v in b.items()] for b in batches])


def of_code(model: nn.Module) -> str:
    """The digest of what decides how a model computes, but for its settings and weights.

    That is the class of each module; of classes that are not a library's the files that they stand in and their
    methods, and likewise functions that were put in place of a module's own ``forward`` or hooked to it.
    """
    foreign: dict[str, object] = {}
    for kind in {c for m in model.modules() for c in type(m).__mro__}:
        if not _is_librarys(kind):
            methods = {n: _of_function(f) for n, f in vars(kind).items() if callable(f)}
            foreign[f"{kind.__module__}.{kind.__qualname__}"] = [_of_file(kind.__module__), methods]
    modules = [[n, type(m).__module__, type(m).__qualname__, *map(_of_function, _put_in(m))] for n, m in _named(model)]
    return _of([modules, foreign])


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return model.named_modules(remove_duplicate=False)


def _put_in(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The functions that take part in a module's forward pass and are not its class's."""
    if "forward" in vars(module):
        yield vars(module)["forward"]
    yield from (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


def _of_function(function: Callable[..., Any]) -> list[object]:
    """Its name, and the code of it and of all that it wraps."""
    written: Any = function
    codes: list[object] = []
    while written is not None:
        code = getattr(getattr(written, "__func__", written), "__code__", None)
        codes.append(_of_bytecode(code) if code is not None else type(written).__qualname__)
        written = getattr(written, "__wrapped__", None) or getattr(written, "func", None)
    return [getattr(function, "__qualname__", ""), *codes]


def _of_bytecode(code: CodeType) -> list[object]:
    return [code.co_code.hex(), code.co_names, [_of_constant(c) for c in code.co_consts]]


def _of_constant(value: object) -> object:
    if isinstance(value, CodeType):
        return _of_bytecode(value)
    # The order of a set is another in each process.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _of_file(module: str) -> str | None:
    """The digest of the file that a module of Python stands in; None if there is none."""
    try:
        return hashlib.sha256(Path(inspect.getfile(sys.modules[module])).read_bytes()).hexdigest()
    except (KeyError, TypeError, OSError):
        return None


def _is_librarys(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in (*LIBRARIES, "builtins")


def _of(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def _is_foreign(module: nn.Module) -> bool:
    """Whether something else than a library's class decides what a module does."""
    changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return bool(changed) or not _is_librarys(type(module))


def _contents(tensors: Mapping[str, Tensor]) -> list[list[object]]:
    """Name, dtype, device, shape and digest of each; what shares memory is read once."""
    places = {n: (t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for n, t in tensors.items()}
    each = {places[n]: t for n, t in tensors.items()}
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        digests = dict(zip(each, pool.map(_digest, each.values()), strict=True))
    return [[n, str(t.dtype), t.device.type, list(t.shape), digests[places[n]]] for n, t in tensors.items()]


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data if flat.numel() else b"").hexdigest()
