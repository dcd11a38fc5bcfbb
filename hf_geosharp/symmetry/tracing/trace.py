"""What a model computes, seen from its linear maps: one forward pass in which every linear map is cut.

The output of each linear map becomes a leaf of the autograd graph with random values (the map itself is not even
computed), and so does the output of each softmax. What lies between the cuts is small, and its derivatives say who
is query, key, value and output, in which order heads and coordinates lie, and what else has a say, without a look at
names, classes or configurations. Zeros of these derivatives are exact, so neither precision nor the weights matter.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hf_geosharp.carried import Carried
from hf_geosharp.evaluating import evaluating, no_fast_path
from hf_geosharp.symmetry.inputs import call, output_tensors
from hf_geosharp.symmetry.tracing.ambiguous import maps_among
from hf_geosharp.symmetry.tracing.cutter import Cutter
from hf_geosharp.symmetry.tracing.events import Linear, Trace
from hf_geosharp.symmetry.tracing.graphless import functions
from hf_geosharp.symmetry.tracing.recorded import Call, detached
from hf_geosharp.symmetry.tracing.weights import Weights


def norm_parameters(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None] | None:
    """The vector of weights of a module that may be a norm, and its bias if it has one: what it does is probed."""
    own = _gain_and_bias(module)
    return own if own is not None and own[0].ndim == 1 else None


def _gain_and_bias(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None] | None:
    """The first parameters of a module, whatever their names, if there are none in modules inside."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    named = sorted(module._parameters.items(), key=lambda item: item[0] != "weight")
    weight, bias, *_ = *(p for _, p in named if p is not None), None, None
    if weight is None or any(True for child in module.children() for _ in child.parameters()):
        return None
    return weight, bias if bias is not None and bias.shape == weight.shape else None


def _multiplies(module: nn.Module) -> bool:
    """Whether it holds several matrices itself: more than a linear map, to be tried like what is made of modules."""
    return sum(p is not None and p.ndim > 1 for p in module._parameters.values()) > 1


def trace(model: nn.Module, batch: Mapping[str, Any]) -> Trace:
    """Runs the model once with its linear maps cut; the model comes back as it was.

    To differentiate what comes out with respect to parameters that are frozen, do that within :func:`differentiable`.

    Raises:
        Exception: what the model raises on this batch.
    """
    with torch.inference_mode(False):
        first, how = _trace(model, batch), _Graph()
        if first.hidden:
            first, how = _with_graph(model, batch, first)
        with torch.enable_grad():
            maps = maps_among(first)
        return _trace(model, batch, maps, how) if maps else first


@dataclass(frozen=True)
class _Graph:
    """What runs with a graph although it is written to run without: all that is switched off, and some functions."""

    always: bool = False
    functions: frozenset[type[Function]] = frozenset()


def _with_graph(model: nn.Module, batch: Mapping[str, Any], first: Trace) -> tuple[Trace, _Graph]:
    """The trace of a model in which less is hidden, if there is one, and how it was made."""
    # One function may call another, which shows when the outer one has been opened.
    hidden, how, best = first.hidden, _Graph(), (first, _Graph())
    while first.hidden and (not how.always or not first.functions <= how.functions):
        how = _Graph(True, how.functions | first.functions)
        try:
            first = _trace(model, batch, graph=how)
        except Exception:
            break  # code that writes into parameters, say, as one may where there is no graph
        if len(first.hidden) < len(best[0].hidden) and _reaches_outputs(first, set(hidden)):
            best = first, how
    return best


def _reaches_outputs(traced: Trace, modules: set[str]) -> bool:
    """Whether what is cut in one of these modules has a say in what the model returns: some only choose tokens."""
    cuts = {id(x.leaf): x for x in traced.order}
    seen, todo = set[int](), list(traced.ends)
    while todo:
        for leaf in traced.sources(todo.pop()):
            cut = cuts.get(id(leaf))
            if cut is None or id(leaf) in seen:
                continue
            if modules.intersection(cut.scope):
                return True
            seen.add(id(leaf))
            todo.append(cut.source if isinstance(cut, Linear) else cut.logits)
    return False


def _trace(model: nn.Module, batch: Mapping[str, Any], maps: Container[int] = (), graph: _Graph = _Graph()) -> Trace:
    result = Trace()
    names: dict[int, list[tuple[str, Tensor]]] = {}
    for name, p in model.named_parameters():
        if p.is_floating_point() and p.numel():
            names.setdefault(p.untyped_storage().data_ptr(), []).append((name, p))
            result.parameters[id(p)] = name
    for module in model.modules():
        own = _gain_and_bias(module)
        # More of them are the gains of several things, say.
        if own is not None and own[1] is not None and sum(p is not None for p in module._parameters.values()) == 2:
            gain, bias = (result.parameters.get(id(p), "") for p in own)
            result.biases[gain] = bias
    cutter = Cutter(result, Weights(names), maps, graph.always)
    # Tensors of inference mode cannot take part in a graph.
    batch = {k: v.clone() if isinstance(v, Tensor) else v for k, v in batch.items()}
    with ExitStack() as stack:
        for context in (differentiable(model), Carried(model).aside(), _scoped(model, cutter, result), no_fast_path()):
            stack.enter_context(context)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(functions(cutter.functions, graph.functions))
        stack.enter_context(cutter)
        outputs = call(model, batch)
    result.ends = output_tensors(outputs)
    result.felt.update(id(leaf) for end in result.read_tensors for leaf in result.sources(end))
    # What the model returns is read by whoever called it.
    result.read(output_tensors(outputs))
    result.unread.clear()
    result.bypassed |= {norm for t in output_tensors(outputs) if (norm := result.norm_of(t)) is not None}
    return result


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Every parameter takes part in the graph, frozen ones too; evaluation mode."""
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    with evaluating(model):
        try:
            for p in frozen:
                p.requires_grad_(True)
            yield
        finally:
            for p in frozen:
                p.requires_grad_(False)


@contextmanager
def _scoped(model: nn.Module, cutter: Cutter, result: Trace) -> Iterator[None]:
    """Keeps the names of the modules that are running, and the arguments of their first calls."""
    handles = []

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            cutter.scope.append(name)
            if name not in result.calls and (module._modules or norm_parameters(module) or _multiplies(module)):
                with torch._C.DisableTorchFunction():
                    result.calls[name] = Call(detached(args), detached(kwargs))

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        name = cutter.scope.pop()
        if name in result.calls:
            with torch._C.DisableTorchFunction():
                result.returned(name, output_tensors(output))
        own = norm_parameters(module)
        if own is not None and isinstance(output, Tensor):
            with torch._C.DisableTorchFunction():
                cutter.alive.append(output)
                memory = output.untyped_storage().data_ptr()
                result.norms[memory] = name
                # Behind the others, as layer norms have them, or behind the samples, as batch norms have.
                axes = [a for a in (-1, 1) if output.ndim > max(a, 0) and output.shape[a] == len(own[0])]
                if axes:
                    result.features[memory] = len(own[0]), output.stride(axes[0])
                if result.norm_axes.setdefault(name, next(iter(axes), None)) not in axes:
                    result.bypassed.add(name)  # nothing says where its features are
                gain = result.parameters.get(id(own[0]))
                if gain is not None and args and isinstance(args[0], Tensor):
                    bias = result.parameters.get(id(own[1]), "")
                    result.before_norm[name] = args[0], gain, bias

    for name, module in model.named_modules():
        if not module._modules and not module._parameters:
            continue  # a function rather than a place
        if isinstance(module, torch.jit.ScriptModule):
            # What it runs is no Python: nothing of it is seen, and it has no hooks.
            if not any(f"{name}.".startswith(f"{outer}." if outer else "") for outer in result.scripted):
                result.scripted[name] = None
            continue
        handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
