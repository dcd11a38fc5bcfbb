"""What a model computes, as a digest: its code, its settings and every bit of its weights.

Two models of one fingerprint give the same outputs, so that what was proved on the one is proved for the other.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
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
            "implementations": implementations(config),
            "code": of_code(model),
            "layout": of_layout(model),
            "tensors": _contents(tensors),
        }
    )


def of_batches(batches: Iterable[Mapping[str, Any]]) -> str:
    """The digest of inputs."""
    return _of([[_contents({k: v}) if isinstance(v, Tensor) else [k, v] for k, v in b.items()] for b in batches])


def of_code(model: nn.Module, *, attributes: bool = True) -> str:
    """The digest of what decides how a model computes, but for its configuration and its weights.

    That is the class of each module and what it holds beside weights (which adapter is active, say); and of what is not
    a library's the code: of classes, methods and functions that were put into a library's, functions in place of a
    module's own ``forward`` or hooked to it, and the function that a configuration names for attention. Without
    ``attributes`` what modules hold is left out: a pass may change it (how long the longest text was).
    """
    foreign: dict[str, object] = {}
    for kind in {c for m in model.modules() for c in type(m).__mro__}:
        methods = {n: _of_function(f) for n, f in vars(kind).items() if callable(f) and not _is_librarys(f)}
        if methods or not _is_librarys(kind):
            foreign[f"{kind.__module__}.{kind.__qualname__}"] = [_of_file(kind), methods]
    for place in {c.__module__ for m in model.modules() for c in type(m).__mro__ if _is_librarys(c)}:
        functions = vars(sys.modules[place]).items() if place in sys.modules else ()
        put = {n: _of_function(f) for n, f in functions if isinstance(f, FunctionType) and not _is_librarys(f)}
        if put:
            foreign[place] = put
    modules = [
        [
            n,
            type(m).__module__,
            type(m).__qualname__,
            _of_attributes(m) if attributes else {},
            *map(_of_function, _put_in(m)),
        ]
        for n, m in model.named_modules(remove_duplicate=False)
    ]
    return _of([modules, foreign, _of_attention(model)])


def of_callable(function: Any) -> str:
    """The digest of a function of the caller's: its source, and what it was made with.

    Of a :func:`functools.partial` the arguments too, of an object that can be called what it holds, of tensors and
    arrays their content. The same in another process and another version of Python: there are neither addresses in it
    nor code that was compiled.
    """
    return _of(_content(function))


_DEPTH = 5
"""How far what a function holds is followed."""

_FEW = 1 << 12
"""Entries of a module's tensors up to which their content counts: more is a model, whose weights are known anyway."""


def _content(value: Any, depth: int = _DEPTH) -> object:
    """What a value is, as JSON: of data their content, of functions their source and what they hold, else the type."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if depth == 0:
        return kind
    deeper = partial(_content, depth=depth - 1)
    if isinstance(value, Tensor):
        # Of what is sharded each process has another part.
        here = type(value) in (Tensor, nn.Parameter) and not value.is_meta
        return [kind, str(value.dtype), list(value.shape), _digest(value) if here else None]
    if isinstance(value, np.ndarray):
        return [kind, str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, Mapping):
        return [kind, *sorted(([deeper(k), deeper(v)] for k, v in value.items()), key=json.dumps)]
    if isinstance(value, (set, frozenset)):
        return [kind, *sorted(map(deeper, value), key=json.dumps)]
    if isinstance(value, (list, tuple)):
        return [kind, *map(deeper, value)]
    if isinstance(value, partial):
        return [kind, *map(deeper, (value.func, value.args, value.keywords))]
    if isinstance(value, MethodType):
        return [kind, deeper(value.__func__), deeper(value.__self__)]
    if isinstance(value, FunctionType):
        return [value.__qualname__, *_of_source(value, deeper)]
    if isinstance(value, nn.Module):
        tensors = dict(chain(value.named_parameters(), value.named_buffers()))
        few = sum(t.numel() for t in tensors.values()) <= _FEW
        return [kind, _of_attributes(value), deeper(tensors) if few else sorted(tensors)]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return [kind, _source(type(value)), deeper(getattr(value, "__dict__", {}))]


def _of_source(function: FunctionType, deeper: Callable[[Any], object]) -> Iterator[object]:
    """Source, defaults and captured values of a function, and of what it wraps."""
    code = function.__code__
    yield _source(function)
    # Two functions may stand on one line.
    yield [*code.co_names, *(repr(c) for c in code.co_consts if not isinstance(c, (CodeType, frozenset)))]
    yield from map(deeper, (function.__defaults__, function.__kwdefaults__))
    for cell in function.__closure__ or ():
        try:
            yield deeper(cell.cell_contents)
        except ValueError:  # nothing yet
            yield None
    yield deeper(getattr(function, "__wrapped__", None))


def _source(written: Any) -> str:
    try:
        return inspect.getsource(written)
    except (OSError, TypeError):
        return ""


def of_adapters(model: nn.Module) -> str:
    """The digest of which adapters take part, and how much; the same however the model is wrapped or sharded."""
    layers = [
        (n, m) for n, m in model.named_modules() if any(c.__module__.startswith("peft.") for c in type(m).__mro__)
    ]
    return _of([[n, _of_attributes(m)] for n, m in layers])


def implementations(config: Any) -> list[str | None]:
    """Which of transformers' own ways to compute attention and experts a configuration chooses."""
    return [getattr(config, f"_{n}_implementation", None) for n in ("attn", "experts")]


def of_config(model: nn.Module) -> str | None:
    """The digest of a configuration, but for names and what does not matter to a loss; None without one."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    return _of({k: v for k, v in config.to_dict().items() if k not in NOT_STRUCTURE})


NOT_STRUCTURE = frozenset(
    (
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "id2label",
        "label2id",
        "use_cache",
        "problem_type",
    )
)
"""Of a configuration: names, and what a first pass may write there (``problem_type``)."""


def of_layout(model: nn.Module) -> list[list[object]]:
    """Name, shape and strides of each parameter, and where it begins on which piece of memory: some may be one."""
    named = list(model.named_parameters(remove_duplicate=False))
    # Of unlike kinds of tensor, such as shards, the tensor itself stands for its memory.
    plain = [type(p) in (Tensor, nn.Parameter) and not p.is_meta for _, p in named]
    places = [p.untyped_storage().data_ptr() if known else id(p) for (_, p), known in zip(named, plain, strict=True)]
    count = Counter(places)
    number = {place: i for i, place in enumerate(count)}
    return [
        [n, *p.shape, p.stride(), number[place], p.storage_offset() if known and count[place] > 1 else 0]
        for (n, p), place, known in zip(named, places, plain, strict=True)
    ]


def _put_in(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The functions that take part in a module's forward pass and are not its class's."""
    if "forward" in vars(module):
        yield vars(module)["forward"]
    yield from (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NAMES = frozenset({"name_or_path", "hf_device_map", "warnings_issued", "_is_hf_initialized", "forward"})
"""Attributes that say where a model is from or lies, or are looked at anyway."""


def _of_attributes(module: nn.Module) -> dict[str, object]:
    """What a module holds beside weights and modules, as far as it is plain; not what torch's wrappers note there."""
    known = (n for n in vars(module) if n not in _OF_EVERY_MODULE and n not in _NAMES and not n.startswith("__"))
    return {n: _plain(vars(module)[n]) for n in known}


def _plain(value: Any) -> object:
    """Of data their content, of functions their code, of all else the type."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, Mapping):
        return sorted([repr(k), _plain(v)] for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        # Their order is another in each process.
        return sorted(repr(_plain(v)) for v in value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, CodeType):
        return [value.co_code.hex(), *value.co_names, [_plain(v) for v in value.co_consts]]
    return _of_function(value) if isinstance(value, (FunctionType, MethodType, partial)) else type(value).__qualname__


def _of_function(function: Any) -> list[object]:
    """Its name; and code, defaults and captured values of it and of all that it wraps."""
    parts: list[object] = [getattr(function, "__qualname__", "")]
    while function is not None:
        plain = getattr(function, "__func__", function)
        held = [getattr(plain, n, None) for n in ("__code__", "__defaults__", "__kwdefaults__", "args", "keywords")]
        parts += [
            type(plain).__qualname__,
            *map(_plain, held),
            *map(_captured, getattr(plain, "__closure__", None) or ()),
        ]
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
    return parts


def _captured(cell: Any) -> object:
    """What a function has captured; of functions the names alone, for they may hold one another."""
    try:
        value = cell.cell_contents
    except ValueError:  # nothing yet
        return None
    return getattr(value, "__qualname__", "") if callable(value) else _plain(value)


def _of_attention(model: nn.Module) -> dict[str, object]:
    """The functions that compute attention under the names in the configurations, where they are no library's."""
    functions = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    names = {getattr(getattr(m, "config", None), "_attn_implementation", None) for m in model.modules()}
    found = {n: functions.get(n) for n in names if isinstance(n, str)}
    return {n: _of_function(f) for n, f in found.items() if f is not None and not _is_librarys(f)}


def _of_file(kind: type) -> str | None:
    """The digest of the file that a class of the user's stands in; None if there is none."""
    try:
        return None if _is_librarys(kind) else hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (TypeError, OSError):
        return None


def _is_librarys(written: Any) -> bool:
    """Whether a class or a function is one of the libraries' (or nobody says where it was written)."""
    place = getattr(getattr(written, "__func__", written), "__module__", None) or "builtins"
    return str(place).partition(".")[0] in (*LIBRARIES, *sys.stdlib_module_names)


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
