"""The cuts of a trace: what takes the place of linear maps and softmaxes while a model runs."""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_geosharp.symmetry.grouped import GROUPED, written_out
from hf_geosharp.symmetry.tracing.events import Convolution, Linear, Open, Product, Softmax, Trace
from hf_geosharp.symmetry.tracing.graph import nodes_behind
from hf_geosharp.symmetry.tracing.graphless import switches_off
from hf_geosharp.symmetry.tracing.logits import Logits
from hf_geosharp.symmetry.tracing.opened import open_attention, plain_attention
from hf_geosharp.symmetry.tracing.rows import COPIES, FINITE, LIKE, keeps_apart
from hf_geosharp.symmetry.tracing.weights import Part, Weights

_MATMULS = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
_EINSUMS = {torch.einsum, torch.functional.einsum}
_ADDMMS = {torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm}
_TENSORDOTS = {torch.tensordot, torch.functional.tensordot}
_INNERS = {torch.inner, Tensor.inner}
_SOFTMAXES = {functional.softmax, torch.softmax, Tensor.softmax}
_CONVOLUTIONS = {functional.conv1d, torch.conv1d, functional.conv2d, torch.conv2d, functional.conv3d, torch.conv3d}
_TRANSPOSED = {
    functional.conv_transpose1d, torch.conv_transpose1d, functional.conv_transpose2d, torch.conv_transpose2d,
    functional.conv_transpose3d, torch.conv_transpose3d,
}  # fmt: skip

_TIMES = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_}
_PICKS = {torch.topk, Tensor.topk, torch.sort, Tensor.sort, torch.argmax, Tensor.argmax, torch.multinomial}

_COMPARISONS = {
    torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne, Tensor.gt, Tensor.ge, Tensor.lt, Tensor.le, Tensor.eq,
    Tensor.ne, Tensor.__gt__, Tensor.__ge__, Tensor.__lt__, Tensor.__le__, Tensor.__eq__, Tensor.__ne__,
}  # fmt: skip

_MINUS = {torch.sub, Tensor.sub, Tensor.__sub__}

_COMMON = ("MaxBackward", "AmaxBackward", "LogsumexpBackward")
"""What is subtracted from the logits of a query for the sake of their exponentials: it is the same for all of them."""

_LOG_SOFTMAXES = {functional.log_softmax, torch.log_softmax, Tensor.log_softmax}

_LETTERS = string.ascii_letters

MAX_EACH = 256
"""Matrices of one product, each of which multiplies a part of its own."""

_SETTINGS = (bool, int, float, str, torch.dtype)

_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}

_LOOKUPS = {functional.embedding, functional.embedding_bag}

_HANDED_ON = {Tensor.detach, Tensor.view, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute}
"""With copies, what one does with keys and values to hand them on."""


def _is_common(x: Any) -> bool:
    return isinstance(x, Tensor) and x.grad_fn is not None and x.grad_fn.name().startswith(_COMMON)


class Cutter(TorchFunctionMode):
    """Replaces linear maps and softmaxes by leaves, and notes them."""

    def __init__(self, trace: Trace, weights: Weights, maps: Container[int] = (), graph: bool = False) -> None:
        """``maps`` are the numbers of those products with parameters that are linear maps, of which it was open.

        With ``graph`` nothing switches the graph off.
        """
        super().__init__()
        self.trace, self._weights, self._maps, self._graph = trace, weights, maps, graph
        self.scope: list[str] = []
        self.functions: list[type[torch.autograd.Function]] = []
        """Functions with a backward pass of their own that are running, the innermost last."""
        self.alive: list[Tensor] = []  # storage that is alive cannot be used again under the same address
        self._generator = torch.Generator().manual_seed(0)
        self._logits = Logits(trace)
        self._without_graph: set[str] = set()
        """Modules in which, or in a module of which, a linear map runs without a graph."""
        self._mixes: Tensor | None = None
        """What a linear map reads that is not cut, for it mixes heads."""
        self._open: tuple[int, Open] | None = None
        """The number of a product that may be a linear map, to be noted with its result."""
        self._cutting = False
        """Whether such a one is being cut."""

    def __torch_function__(
        self, func: Callable[..., Any], types_: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Cuts what is to be cut; everything else runs as it is."""
        kwargs = kwargs or {}
        if self._graph and switches_off(func, args):
            return None
        handed_on = func in COPIES or func in _HANDED_ON
        if not handed_on and getattr(func, "__name__", "") != "__get__":  # a shape or a type is no number
            self.trace.read((*args, *kwargs.values()))
        result = self._called(func, args, kwargs)
        if handed_on and args:
            self.trace.copied(args[0], result)
        self._tell(func, args, kwargs, result)
        return result

    def _tell(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Notes the call in every module that is running."""
        called: tuple[object, ...] = (getattr(func, "__name__", type(func).__name__),)
        # What keeps the shape may act entry by entry: there numbers are bounds and powers, elsewhere places and sizes.
        if isinstance(result, Tensor) and any(isinstance(a, Tensor) and a.shape == result.shape for a in args):
            called += tuple(repr(a) for a in args if isinstance(a, _SETTINGS))
            called += tuple((k, repr(a)) for k, a in kwargs.items() if isinstance(a, _SETTINGS))
        for name in self.scope:
            self.trace.operations.setdefault(name, set()).add(called)

    def _called(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """What a call returns: that of a linear map or a softmax a leaf."""
        if func is functional.multi_head_attention_forward:
            with self:
                return open_attention(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            with self:
                return plain_attention(*args, **kwargs)
        if func in GROUPED:
            with self:
                product = written_out(func, args, kwargs)
            if product is not None:
                return product
        if func in _MATMULS and len(args) == 2 and not kwargs and self._batched(*args):
            with self:
                return torch.stack([x @ w for x, w in zip(*args, strict=True)])
        compared = False
        if func in _MATMULS or func in _EINSUMS:
            args = self._attending(func, args)
            compared = self._mixing(args)
            if not torch.is_grad_enabled():
                self._unseen(args)
        elif func in _TIMES:
            self._weighing(args)
            self._crossing(args)
        elif func in _LOOKUPS:
            names = (self.trace.parameters.get(id(x)) for x in (*args, *kwargs.values()))
            tables = [name for name in names if name is not None]
            self.trace.looked_up.update(tables)
            if func is functional.embedding and len(tables) == 1:
                return self._rows(tables[0], func(*args, **kwargs), args[0] if args else kwargs["input"])
        elif func in _PICKS:
            self.trace.selecting |= self._softmaxes_behind(args[0] if args else kwargs.get("input"))
        elif func in _COMPARISONS and len(args) == 2 and not kwargs:
            self._comparing(*args)
        elif func in _MINUS and len(args) == 2 and _is_common(args[1]):
            # What a softmax is kept from overflowing by, or what makes it one: no softmax feels it.
            args = args[0], args[1].detach()
        made = None
        if func is functional.linear:
            made = self._linear(*args, **kwargs)
        elif func in _MATMULS and len(args) == 2 and not kwargs:
            made = self._matmul(*args)
        elif func in _ADDMMS and len(args) == 3 and not kwargs:
            made = self._matmul(args[1], args[2], args[0])
        elif func in _CONVOLUTIONS:
            made = self._convolution(func, *args, **kwargs)
        elif func in _EINSUMS:
            made = self._einsum(*args)
        elif func in _TENSORDOTS:
            made = self._tensordot(*args, **kwargs)
        elif func in _INNERS and len(args) == 2 and not kwargs:
            made = self._tensordot(args[0], args[1], ([-1], [-1]))
        elif func in _SOFTMAXES:
            made = self._softmax(func, *args, **kwargs)
        elif func in _LOG_SOFTMAXES and args and self._logits.compares(args[0]):
            made = args[0] + (func(*args, **kwargs) - args[0]).detach()
        if made is not None:
            return made
        result = func(*args, **kwargs)
        if self._mixes is not None:
            self._logits.mixed(result, self._mixes)
            self._mixes = None
        if self._open is not None:
            number, opened = self._open
            self.trace.open[number] = replace(opened, result=result)
            self._open = None
        if compared and result.grad_fn is not None:
            self._logits.multiplied(result)
            self.trace.compared.append(Product(result, tuple(self.scope)))
        else:
            self._logits.changed(func, args, result)
        self._weights.note(func, args, kwargs, result)
        convolved = self._convolved(func, args, kwargs)
        if self.trace.norms:
            self._follow(func, args, kwargs, result, convolved)
        return result

    def _rows(self, table: str, rows: Tensor, indices: Tensor) -> Tensor:
        """Notes rows of a table; returns a copy, for code may write to them."""
        if rows.grad_fn is None:
            return rows
        self.trace.lookups.setdefault(table, []).append((rows, indices.detach().clone()))
        return rows.clone()

    def _comparing(self, x: Any, y: Any) -> None:
        """Notes by how much two things differ that are compared, where one of them is computed from weights."""
        if any(isinstance(z, Tensor) and z.grad_fn is not None for z in (x, y)):
            self.trace.decided.append(x - y)

    def _follow(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, convolved: Tensor | None) -> None:
        """Notes who but linear maps, which have ``convolved`` among what they read, reads what a norm wrote."""
        name = getattr(func, "__name__", "")
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace"):
            changed = args[0] if args else None
            norm = self.trace.norm_of(changed) if isinstance(changed, Tensor) else None
            if norm is not None:
                self.trace.bypassed.add(norm)
        if name == "__setitem__":
            result = args[0]  # what has been written to
        if not isinstance(result, (Tensor, tuple, list)) or func in LIKE:
            return
        # Of a tensor that a copy is like, nothing but the type is read.
        given = args[:1] if func in COPIES else (*args, *kwargs.values())
        for x in (*given, *(x for several in given if isinstance(several, (list, tuple)) for x in several)):
            norm = self.trace.norm_of(x) if isinstance(x, Tensor) else None
            if norm is None or x is convolved:
                continue
            for y in (result,) if isinstance(result, Tensor) else result:
                if not isinstance(y, Tensor) or y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                    continue
                if not self._carry(func, args, kwargs, x, y) and (y.is_floating_point() or func not in FINITE):
                    self.trace.bypassed.add(norm)

    def _carry(self, func: Callable[..., Any], args: Any, kwargs: Any, x: Tensor, y: Tensor) -> bool:
        """Notes a result whose features are those of what a norm wrote; returns whether they are."""
        norm, place = self.trace.norm_of(x), self.trace.features.get(x.untyped_storage().data_ptr())
        axis = self.trace.feature_axis(x)
        found = None if axis is None else keeps_apart(func, args, kwargs, x, axis)
        if norm is None or (found is None and func not in COPIES):
            return False
        self.alive.append(y)
        memory = y.untyped_storage().data_ptr()
        self.trace.norms[memory] = norm
        self.trace.features.pop(memory, None)
        if found is not None and place is not None:
            self.trace.features[memory] = place[0], y.stride(found[0])
            if not found[1]:
                self.trace.scaled.add(norm)
        return True

    def _convolved(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
        """Notes a convolution with parameters that reads all channels, or of each output one; it is not cut.

        Returns what it read, if its channels are the features of a norm.
        """
        if func not in _CONVOLUTIONS and func not in _TRANSPOSED:
            return None
        names = "input", "weight", "bias", "stride", "padding", "dilation, or output padding", "groups"
        given = {"padding": 0, "groups": 1, **dict(zip(names, args, strict=False)), **kwargs}
        source, weight, groups = (given[name] for name in ("input", "weight", "groups"))
        name, points = self.trace.parameters.get(id(weight)), weight.ndim - 2
        if name is None or not isinstance(source, Tensor):
            return None
        channels = source.shape[-1 - points]
        each = groups == channels == weight.shape[0] and weight.shape[1] == 1
        if groups != 1 and not each:
            return None
        padding, bias = given["padding"], None
        bare = padding in (0, "valid") or (isinstance(padding, (list, tuple)) and not any(padding))
        if func in _CONVOLUTIONS and groups == 1 and bare:
            bias = self.trace.parameters.get(id(given.get("bias")))
        in_axis = 0 if each or func in _TRANSPOSED else 1
        norm = self.trace.norm_of(source) if self.trace.feature_axis(source) == source.ndim - 1 - points else None
        self.trace.convolutions.append(Convolution(name, bias, in_axis, points, norm, each))
        return None if norm is None else source

    # ------------------------------------------------------------------------------------------------------- cuts

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        made = self._through(input, weight, bias)
        if made is not None:
            return made
        return self._cut((*input.shape[:-1], weight.shape[0]), -1, input, -1, weight, (0,), (1,), bias)

    def _through(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """A linear map by a sum or a product of matrices, such as an update of low rank, by each of them."""
        found = self._weights.expression(weight)
        if found is None:
            return None
        made, turned = found
        args = [x.mT if turned and isinstance(x, Tensor) and x.ndim == 2 else x for x in made.args]
        with self:
            if made.kind == "kept":
                args = [functional.linear(input, x) if isinstance(x, Tensor) and x.ndim == 2 else x for x in args]
                product = made.func(*args, **made.kwargs)
                return product if bias is None else product + bias
            first, second = args
            if made.kind == "product":
                inner, outer = (first, second) if turned else (second, first)
                return functional.linear(functional.linear(input, inner), outer, bias)
            # The same sum of what the two give.
            return made.func(functional.linear(input, first, bias), functional.linear(input, second))

    def _matmul(self, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """x @ W with W (a view of) a parameter, one matrix or one for each head."""
        if not (isinstance(right, Tensor) and isinstance(left, Tensor)) or min(right.ndim, left.ndim) < 2:
            return None
        if self._weights.known(left):
            if bias is not None or self._weights.known(right):
                return None
            return self._may_be(right, right.ndim - 2, lambda: _turned(self._matmul(right.mT, left.mT)))
        if right.ndim > 2:
            made = self._matmul_of_heads(left, right)
            return made if made is None or bias is None else bias + made
        if bias is None and (made := self._through(left, right.mT, None)) is not None:
            return made
        return self._cut((*left.shape[:-1], right.shape[1]), -1, left, -1, right, (1,), (0,), bias)

    def _matmul_of_heads(self, left: Tensor, right: Tensor) -> Tensor | None:
        """x @ W where each of several matrices multiplies all of x: they are one linear map."""
        if not self._weights.known(right) or left.shape[-1] != right.shape[-2]:
            return None
        for axis in range(right.ndim - 2):
            if right.stride(axis) == 0:
                right = right.narrow(axis, 0, 1)  # one matrix, written down several times
        lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        x_letters, w_letters = _LETTERS[: left.ndim - 2], list(_LETTERS[left.ndim - 2 :][: right.ndim - 2])
        for a in range(3, min(left.ndim, right.ndim) + 1):
            if left.shape[-a] > 1 and right.shape[-a] > 1:
                w_letters[2 - a] = x_letters[2 - a]  # each multiplies an x of its own
        # Axes of size one are left out, which changes no order.
        of_x = "".join(c for c, n in zip(x_letters, left.shape, strict=False) if n > 1)
        of_w = "".join(c for c, n in zip(w_letters, right.shape, strict=False) if n > 1)
        places = {a - left.ndim: c for a, c in enumerate(x_letters) if c in of_x}
        places |= {a - right.ndim: c for a, c in enumerate(w_letters) if c in of_w}
        x = left.reshape(*(n for n in left.shape[:-2] if n > 1), *left.shape[-2:])
        w = right.squeeze([a for a in range(right.ndim - 2) if right.shape[a] == 1])
        result = "".join(places[a] for a in sorted(places))
        made = self._contracted((f"{of_x}YX", f"{of_w}XZ"), (x, w), f"{result}YZ")
        return None if made is None else made.reshape(*lead, left.shape[-2], right.shape[-1])

    def _tensordot(self, a: Any, b: Any, dims: Any = 2, out: Any = None) -> Tensor | None:
        """The same, with the axes that are contracted given by their numbers."""
        if out is not None or not (isinstance(a, Tensor) and isinstance(b, Tensor)) or isinstance(dims, Tensor):
            return None
        if isinstance(dims, int):
            dims = range(a.ndim - dims, a.ndim), range(dims)
        first, second = ([x] if isinstance(x, int) else list(x) for x in dims)
        if a.ndim + b.ndim > len(_LETTERS):
            return None
        names = list(_LETTERS[: a.ndim]), list(_LETTERS[a.ndim :][: b.ndim])
        for i, j in zip(first, second, strict=True):
            names[1][j] = names[0][i]
        once = "".join(c for name, other in (names, reversed(names)) for c in name if c not in other)
        return self._contracted(("".join(names[0]), "".join(names[1])), (a, b), once)

    def _batched(self, left: Any, right: Any) -> bool:
        """Whether each of several matrices of a parameter, experts', multiplies rows of its own."""
        if not all(isinstance(x, Tensor) and x.ndim == 3 for x in (left, right)) or len(left) != len(right):
            return False
        return [self._weights.known(x) for x in (left, right)] == [False, True]

    def _convolution(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """A convolution with a kernel of one point is a linear map of channels."""
        if not isinstance(input, Tensor) or any(n != 1 for n in weight.shape[2:]):
            return None
        with torch.no_grad():
            shape = func(input, weight, bias, *args, **kwargs).shape
        axis = 1 - weight.ndim
        grouped = weight.shape[1] != input.shape[axis]
        return self._cut(tuple(shape), axis, input, axis, weight, (0,), (1,), bias, grouped)

    def _einsum(self, *args: Any) -> Tensor | None:
        """x and W contracted over some letters, with W (a view of) a parameter: a linear map written out."""
        if len(args) == 2 and isinstance(args[1], (list, tuple)):
            args = (args[0], *args[1])
        if len(args) != 3 or not isinstance(args[0], str) or not all(isinstance(t, Tensor) for t in args[1:]):
            return None
        sides, arrow, result = args[0].replace(" ", "").partition("->")
        names = sides.split(",")
        if len(names) != 2:
            return None
        if not arrow:
            letters = sorted(c for c in set(sides) if c.isalpha() and sides.count(c) == 1)
            result = "".join(["..." if "..." in sides else "", *letters])
        # An ellipsis stands for the last of as many letters as the longest one has.
        more = [t.ndim - len(n) + 3 if "..." in n else 0 for n, t in zip(names, args[1:], strict=True)]
        free = [c for c in _LETTERS if c not in args[0]]
        if min(more) < 0 or max(more) > len(free):
            return None
        names = [n.replace("...", "".join(free[max(more) - m : max(more)])) for n, m in zip(names, more, strict=True)]
        return self._contracted(names, args[1:], result.replace("...", "".join(free[: max(more)])))

    def _contracted(self, names: Sequence[str], tensors: Sequence[Tensor], result: str) -> Tensor | None:
        """The cut in place of an einsum of x and (a view of) a parameter; None where it is something else."""
        owned = [self._weights.known(t) for t in tensors]
        if [*map(bool, owned)].count(True) != 1 or any(
            len(n) != t.ndim or len(set(n)) < len(n) for n, t in zip(names, tensors, strict=True)
        ):
            return None
        w, x = owned.index(True), owned.index(False)
        new = [c for c in names[w] if c in result and c not in names[x]]
        summed = [c for c in names[w] if c not in result]
        if not new or not summed or any(c not in names[x] for c in summed):
            return None
        if len(new) + len(summed) != len(names[w]):
            source = tensors[x]
            return self._may_be(source, names[x].index(summed[0]), lambda: self._each(names, tensors, result))
        sizes = {c: n for name, t in zip(names, tensors, strict=True) for c, n in zip(name, t.shape, strict=True)}
        kept = [c for c in result if c not in new]
        if len(summed) > 1:
            # What it reads becomes one axis too.
            order = [c for c in names[x] if c not in summed] + summed
            source = tensors[x].permute([names[x].index(c) for c in order]).flatten(-len(summed))
            source_axis = -1
        else:
            source, source_axis = tensors[x], names[x].index(summed[0])
        flat = self._cut(
            (*(sizes[c] for c in kept), math.prod(sizes[c] for c in new)),
            -1,
            source,
            source_axis,
            tensors[w],
            [names[w].index(c) for c in new],
            [names[w].index(c) for c in summed],
            None,
        )
        if flat is None:
            return None
        order = [*kept, *new]
        return flat.unflatten(-1, [sizes[c] for c in new]).permute([order.index(c) for c in result])

    def _each(self, names: Sequence[str], tensors: Sequence[Tensor], result: str) -> Tensor | None:
        """The cuts in place of an einsum in which each of several matrices multiplies a part of x of its own."""
        letters = [c for c in names[0] if c in names[1] and c in result]
        sizes = [tensors[0].shape[names[0].index(c)] for c in letters]
        if math.prod(sizes) > MAX_EACH:
            return None
        rest = ["".join(c for c in n if c not in letters) for n in (*names, result)]
        parts = []
        for index in itertools.product(*map(range, sizes)):
            own = []
            for name, tensor in zip(names, tensors, strict=True):
                chosen = tuple(index[letters.index(c)] if c in letters else slice(None) for c in name)
                own.append(tensor[chosen])
            part = self._contracted(rest[:2], own, rest[2])
            if part is None:
                return None
            parts.append(part)
        order = [*letters, *rest[2]]
        return torch.stack(parts).unflatten(0, sizes).permute([order.index(c) for c in result])

    def _may_be(self, source: Tensor, axis: int, cut: Callable[[], Tensor | None]) -> Tensor | None:
        """The cut of a product with parameters that may be a linear map along an axis of what it reads, if it is one.

        It may as well compare with queries that are learned, or with a table of positions: logits are made of that as
        it is. The first pass notes it, and what became of it says what it is.
        """
        if self._cutting:
            return cut()
        number = len(self.trace.open)
        self.trace.open.append(None)
        if number in self._maps:
            self._cutting = True
            try:
                return cut()
            finally:
                self._cutting = False
        self._open = number, Open(source, axis, source)
        return None

    def _attending(self, func: Any, args: Any) -> Any:
        """The arguments of a product, with weights that were made of logits by other functions cut like a softmax.

        Where nothing bends them, a decay multiplies them say, weights are the first factor.
        """
        operands = [x for x in args if isinstance(x, Tensor)]
        if len(operands) != 2 or any(self._weights.owned(x) is not False for x in operands):
            return args
        for i, weights in enumerate(operands):
            (softmax, changed), axis = self._logits.softmax_behind(weights), _summed(args, i)
            if softmax is not None and changed and axis is not None:
                softmax.leaf = weights.detach().movedim(axis, -1).clone().requires_grad_()
                return [softmax.leaf.movedim(-1, axis) if x is weights else x for x in args]
        behind = self._logits.behind(operands)
        for i, (weights, logits) in enumerate(zip(operands, behind, strict=True)):
            axis = _summed(args, i)
            if logits is None or axis is None or behind[1 - i] is not None or logits.shape != weights.shape:
                continue
            leaf = weights.detach().movedim(axis, -1).clone().requires_grad_()
            self._note(Softmax(logits.movedim(axis, -1), leaf, tuple(self.scope)))
            return [leaf.movedim(-1, axis) if x is weights else x for x in args]
        return args

    def _mixing(self, args: Any) -> bool:
        """Notes the softmaxes whose weights are multiplied with something that is computed: they mix.

        Returns whether both factors are made of what linear maps wrote.
        """
        flat = [x for a in args for x in (a if isinstance(a, (list, tuple)) else (a,))]
        operands = [x for x in flat if isinstance(x, Tensor)]
        if len(operands) != 2 or any(self._weights.owned(x) is not False for x in operands):
            return False
        for operand in operands:
            if operand.ndim > 2:
                self.trace.mixing |= self._softmaxes_behind(operand)
        written = {id(x.leaf) for x in self.trace.linears}
        if not all(x.ndim > 2 and any(id(s) in written for s in self.trace.sources(x)) for x in operands):
            return False
        if self.scope:
            self.trace.products.setdefault(self.scope[-1])
        return True

    def _crossing(self, args: Any) -> None:
        """Notes the module of an outer product of what linear maps wrote, as a state is made of keys and values."""
        if len(args) != 2 or any(not isinstance(x, Tensor) or not x.requires_grad or x.ndim < 3 for x in args):
            return
        sizes = [(m, n) for m, n in zip(reversed(args[0].shape), reversed(args[1].shape), strict=False) if m != n]
        if not self.scope or not (any(m == 1 for m, _ in sizes) and any(n == 1 for _, n in sizes)):
            return
        written, weights = ({id(x.leaf) for x in own} for own in (self.trace.linears, self.trace.softmaxes))
        behind = [{id(s) for s in self.trace.sources(x)} for x in args]
        if all(own & written and not own & weights for own in behind):
            self.trace.products.setdefault(self.scope[-1])

    def _unseen(self, args: Any) -> None:
        """Names a module that multiplies something without a graph, next to linear maps that run without one too.

        Or that multiplies what has a graph, in a function of its own.
        """
        operands = [x for x in args if isinstance(x, Tensor)]
        near = self._without_graph.intersection(self.scope[-2:])
        meet = bool(self.functions) and len(operands) > 1 and all(x.requires_grad and x.ndim > 2 for x in operands)
        if (near or meet) and not any(self._weights.owned(x) for x in operands):
            self._hide()

    def _hide(self) -> None:
        """Names the module that runs, and the functions of their own in which it does."""
        if self.scope:
            self.trace.hidden.setdefault(self.scope[-1])
            self.trace.functions.update(self.functions)

    def _weighing(self, args: Any) -> None:
        """Notes the softmaxes whose weights, all at once, are multiplied with something that is computed."""
        if len(args) != 2 or any(not isinstance(x, Tensor) or not x.requires_grad or x.ndim < 3 for x in args):
            return
        first, second = (self._softmaxes_behind(x) for x in args)
        for own, other, (weights, x) in ((first, second, args), (second, first, reversed(args))):
            for softmax in self.trace.softmaxes:
                whole = id(softmax) in own - other and softmax.leaf.numel() <= weights.numel()
                if whole and not self._entropy(softmax, x):
                    self.trace.weighing.add(id(softmax))

    def _entropy(self, softmax: Softmax, factor: Tensor) -> bool:
        """Whether a factor is made of the logits alone, each of its own: their logarithms, say."""
        below = {id(s) for s in self.trace.sources(softmax.logits)}
        return factor.shape == softmax.leaf.shape and all(id(s) in below for s in self.trace.sources(factor))

    def _softmaxes_behind(self, tensor: Any) -> set[int]:
        """Identities of the softmaxes on which a tensor depends."""
        if not self.trace.softmaxes or not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return set()
        sources = {id(s) for s in self.trace.sources(tensor)}
        return {id(s) for s in self.trace.softmaxes if id(s.leaf) in sources}

    def _softmax(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        if isinstance(input, Tensor) and input.requires_grad:
            self.trace.logits.append((input, tuple(self.scope)))
        if not isinstance(input, Tensor) or input.ndim < 3:
            return None
        if not input.requires_grad or not torch.is_grad_enabled():
            self._hide()
            return None
        dim = kwargs.get("dim", args[0] if args else None)
        if not isinstance(dim, int):
            return None
        result = func(input.detach(), *args, **kwargs)
        leaf = result.detach().movedim(dim, -1).clone().requires_grad_()
        mixed = self._logits.before_mixing(input, dim)
        found = Softmax(input.movedim(dim, -1) if mixed is None else mixed, leaf, tuple(self.scope), mixed is None)
        self._note(found)
        if _picked(input):
            self.trace.selecting.add(id(found))
        return leaf.movedim(-1, dim)

    def _cut(
        self, shape: tuple[int, ...], axis: int, source: Tensor, source_axis: int, weight: Tensor,
        out: Sequence[int], inner: Sequence[int], bias: Tensor | None, grouped: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """The leaf in place of a linear map's output; None where its weight is not made of parameters.

        ``out`` and ``inner`` are the axes of the weight that count outputs and inputs. Where several parameters make
        the outputs there are several leaves, put together as the weight was.
        """
        if bias is not None and bias.shape != (shape[axis],):
            return None
        if not torch.is_grad_enabled():
            self._without_graph.update(self.scope[-2:])
        if not grouped and self._logits.mixes_heads(source, source_axis):
            self._mixes = source
            return None
        slab, rows = self._weights.slab(weight, out, inner), torch.arange(shape[axis])
        whole = None if slab is None else Part(slab, rows, rows)
        parts = self._weights.parts(weight, out, inner) if whole is None else [whole]
        if not parts or (grouped and whole is None):
            return None
        places = [None if bias is None else self._weights.vector(bias, part) for part in parts]
        inputs, written = math.prod(weight.shape[a] for a in inner), []
        for part, place in zip(parts, places, strict=True):
            count = shape[axis] if part is whole else int(part.features.max()) + 1
            if len(part.slab.out) > 1:
                count = math.prod(part.slab.shape[d] for d in part.slab.out)
            size = list(shape)
            size[axis] = count
            noise = torch.randn(size, generator=self._generator, dtype=torch.float32)
            leaf = noise.to(source.device, source.dtype).requires_grad_()
            own = None if None in places else place
            scope = tuple(self.scope)
            self._note(
                Linear(part.slab, own, source, source_axis, leaf, axis, scope, inputs, count, grouped, part.exact)
            )
            # What comes after may write in place, which a leaf does not allow.
            written.append(leaf.clone() if part is whole else leaf.index_select(axis, part.features.to(leaf.device)))
        result = written[0]
        if whole is None:
            order = torch.cat([part.rows for part in parts]).argsort()
            result = torch.cat(written, axis).index_select(axis, order.to(result.device))
        if bias is not None and None in places:
            # Made of parameters in another way: they enter by themselves.
            result = result + bias.view(-1, *[1] * (-1 - axis))
        return result

    def _note(self, event: Linear | Softmax) -> None:
        self.trace.order.append(event)
        if isinstance(event, Linear):
            self.trace.linears.append(event)
        else:
            self.trace.softmaxes.append(event)


def _turned(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.mT


def _summed(args: Sequence[Any], operand: int) -> int | None:
    """The axis of one of the two factors of a product that is summed over, from the last; None if it is not one."""
    if not isinstance(args[0], str):
        return -1 - operand if len(args) == 2 else None
    sides, arrow, result = args[0].replace(" ", "").partition("->")
    names = sides.split(",")
    summed = [c for c in names[operand] if c.isalpha() and c in names[1 - operand] and c not in result]
    if not arrow or len(summed) != 1:
        return None
    after = names[operand].partition(summed[0])[2]
    return None if "." in after else -1 - len(after)


def _picked(tensor: Tensor) -> bool:
    """Whether a tensor holds the largest of several, as the logits of chosen experts do."""
    return any(node.name().startswith(("TopkBackward", "SortBackward")) for node in nodes_behind(tensor))
