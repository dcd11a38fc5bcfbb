"""Symmetries that fold away: instead of a quotient, a representative in which the direction is simply absent.

The key bias that softmax ignores, the value bias that adds to the output bias, the mean that a norm takes out of a
head or of a stream, the mean of what reads a norm that has none, the gain and bias of a norm that only linear maps
read, numbers that what a linear map writes is multiplied by. Each is moved to its representative before a score is
taken (the function stays); what the representative sets to a constant is then neither a coordinate nor perturbed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_geosharp.symmetry.base import Move, Symmetry, Weights
from hf_geosharp.symmetry.views import View


def whole(parameter: str, *shape: int) -> View:
    """A view of a whole parameter, by its shape."""
    names = ("i",) if len(shape) == 1 else tuple(f"i{k}" for k in range(len(shape)))
    return View.pattern(parameter, [(n,) for n in names], dict(zip(names, shape, strict=True)), (), (), names)


class Fold(Symmetry):
    """A symmetry with a representative in which its own parameters are fixed."""

    @property
    @abstractmethod
    def fixed(self) -> tuple[View, ...]:
        """What is set to a constant and left out."""

    @property
    def moved(self) -> tuple[View, ...]:
        """What the direction moves of its own: what is fixed, unless the representative fixes nothing."""
        return self.fixed

    @abstractmethod
    def canonicalise(self, weights: Weights) -> None:
        """Moves ``weights`` to the representative, in place."""

    def usable(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether that can be done at these weights: some would have to be divided by numbers that are zero here."""
        return True


@dataclass(frozen=True)
class _Bias(Fold):
    """A bias that can be shifted by any numbers, its ``weight`` being what tells or takes up the shift.

    With ``others``, biases of other streams that the same attention reads, it is a shift of all of them at once.
    """

    name: str
    module: str
    bias: View
    weight: View
    others: tuple[View, ...] = field(default=(), kw_only=True)

    @property
    def biases(self) -> tuple[View, ...]:
        """All that are shifted."""
        return (self.bias, *self.others)

    @property
    def dimension(self) -> int:
        """One for each entry of the bias."""
        return self.bias.count * self.bias.width

    @property
    def fixed(self) -> tuple[View, ...]:
        """The whole bias."""
        return (self.bias,)

    def random(self, weights: Weights, generator: torch.Generator, condition: float) -> Move:
        """A standard normal shift."""
        return {"c": torch.randn(self.bias.shape(), generator=generator, dtype=torch.float64)}

    def inverse(self, move: Move) -> Move:
        """The opposite shift."""
        return {"c": -move["c"]}

    def _shift(self, weights: Weights, move: Move) -> None:
        """b += c."""
        for view in self.biases:
            bias = view.of(weights[view.parameter])
            bias += move["c"].to(bias)


@dataclass(frozen=True)
class KeyBias(_Bias):
    """b_K -> b_K + c: the logits of a query move together, and softmax does not see it."""

    kind: str = "key_bias"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The biases; the weight is read by the control only."""
        return tuple(dict.fromkeys(v.parameter for v in (self.bias, self.weight, *self.others)))

    def apply(self, weights: Weights, move: Move) -> None:
        """b_K += c."""
        self._shift(weights, move)

    def break_(self, weights: Weights, move: Move) -> None:
        """The outputs of W_K scale by 1 + c, so that what is added to a logit depends on the token.

        A shift of all rows alike would not do: a layer norm in front removes it.
        """
        weight = self.weight.of(weights[self.weight.parameter])
        c = move["c"].to(weight)
        weight *= 1 + c.reshape(*c.shape, *(1,) * (weight.ndim - c.ndim))

    def canonicalise(self, weights: Weights) -> None:
        """b_K = 0."""
        bias = self.bias.of(weights[self.bias.parameter])
        self._shift(weights, {"c": -bias})
        bias.zero_()


@dataclass(frozen=True)
class ValueBias(_Bias):
    """b_V -> b_V + c, b_O -> b_O - W_O c: attention weights sum to one.

    ``weight`` is W_O as (copies, d, [g,] o), ``out`` is b_O as (o,); ``weights`` and ``outs`` are those of further
    output projections. What the bias did is in b_O once it is folded.
    """

    out: View
    weights: tuple[View, ...] = field(default=(), kw_only=True)
    outs: tuple[View, ...] = field(default=(), kw_only=True)
    kind: str = "value_bias"

    @property
    def parameters(self) -> tuple[str, ...]:
        """b_V, W_O, b_O."""
        views = (self.bias, self.weight, self.out, *self.others, *self.weights, *self.outs)
        return tuple(dict.fromkeys(v.parameter for v in views))

    def _take_up(self, weights: Weights, c: Tensor) -> None:
        """b_O -= W_O c."""
        for view, out in zip((self.weight, *self.weights), (self.out, *self.outs), strict=True):
            weight = view.of(weights[view.parameter])
            # Heads that share a value head stand as rows; where each has a bias of its own, c has them too.
            weight = weight.reshape(c.numel(), -1, weight.shape[-1])
            own = out.of(weights[out.parameter])
            own -= (weight * c.to(weight).reshape(-1, 1, 1)).flatten(0, 1).sum(0)

    def apply(self, weights: Weights, move: Move) -> None:
        """b_V += c, b_O -= W_O c."""
        self._shift(weights, move)
        self._take_up(weights, move["c"])

    def break_(self, weights: Weights, move: Move) -> None:
        """b_V += c alone."""
        self._shift(weights, move)

    def canonicalise(self, weights: Weights) -> None:
        """b_O += W_O b_V, b_V = 0."""
        bias = self.bias.of(weights[self.bias.parameter])
        self.apply(weights, {"c": -bias})
        bias.zero_()


class _Means(Fold):
    """Means that reach nothing, of ``views``. Of the representative, in which they are zero, nothing is fixed.

    What moves along them reaches nothing either, so that no worst case goes there.
    """

    views: tuple[View, ...]

    @property
    def fixed(self) -> tuple[View, ...]:
        """Nothing."""
        return ()

    @property
    def moved(self) -> tuple[View, ...]:
        """The weights that have the means."""
        return self.views

    def inverse(self, move: Move) -> Move:
        """The opposite shift."""
        return {name: -shift for name, shift in move.items()}


@dataclass(frozen=True)
class Mean(_Means):
    """W -> W + 1 vᵀ for each head, b too: what reads the outputs of a head takes out their mean, or does not see it.

    With ``scale``, numbers λ that the outputs are multiplied by on the way there, it is W -> W + (1 / λ) vᵀ.
    """

    name: str
    module: str
    views: tuple[View, ...]
    """The weight (copies, d, rows), and the bias (copies, d) if there is one."""
    kind: str = "qk_mean"
    """Of what a stream or a router is written to it is "written_mean", with one copy."""
    scale: View | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Each name once, in order."""
        return tuple(dict.fromkeys(v.parameter for v in (*self.views, *([self.scale] if self.scale else []))))

    @property
    def dimension(self) -> int:
        """One for each input of each head, and for its bias."""
        return sum(v.count * v.height for v in self.views)

    def random(self, weights: Weights, generator: torch.Generator, condition: float) -> Move:
        """A normal number for each row, a third as large as what it is added to, both in units of 1 / λ.

        Not more, for what cancels is rounded.
        """
        return {
            f"v{k}": torch.randn(self._means(view), generator=generator, dtype=torch.float64)
            * _size(view.of(weights[view.parameter]) * self._scale(view, weights))
            / 3
            for k, view in enumerate(self.views)
        }

    @staticmethod
    def _means(view: View) -> list[int]:
        """The shape of the means of a view, that of the window with one coordinate."""
        return [1 if name in view.dim else size for name, size in zip(view.names, view.shape(), strict=True)]

    def _scale(self, view: View, weights: Weights) -> Tensor:
        """λ, to be multiplied with the window of a view."""
        if self.scale is None:
            return weights[view.parameter].new_ones(())
        window = view.of(weights[view.parameter])
        scale = weights[self.scale.parameter].to(window)
        return scale.reshape([n if name in view.dim else 1 for name, n in zip(view.names, view.shape(), strict=True)])

    def apply(self, weights: Weights, move: Move) -> None:
        """The same is added to every coordinate, in units of 1 / λ."""
        for k, view in enumerate(self.views):
            window = view.of(weights[view.parameter])
            window += move[f"v{k}"].to(window) / self._scale(view, weights)

    def break_(self, weights: Weights, move: Move) -> None:
        """It is added to the first coordinate alone."""
        for k, view in enumerate(self.views):
            window = view.of(weights[view.parameter]).narrow(len(view.copies), 0, 1)
            window += move[f"v{k}"].to(window)

    def canonicalise(self, weights: Weights) -> None:
        """Every mean, of what is multiplied by λ, is zero."""
        for view in self.views:
            window, scale = view.of(weights[view.parameter]), self._scale(view, weights)
            axes = tuple(range(len(view.copies), len(view.copies) + len(view.dim)))
            window -= (window * scale).mean(axes, keepdim=True) / scale

    def usable(self, weights: Mapping[str, Tensor]) -> bool:
        """λ has to be other than zero."""
        return self.scale is None or bool((weights[self.scale.parameter].detach() != 0).all())


def _size(weight: Tensor) -> float:
    """The root mean square of weights; 1 where all are zero."""
    return float(weight.detach().double().square().mean().sqrt()) or 1.0


@dataclass(frozen=True)
class Reader:
    """A linear map that reads a norm's output: its weight, which axis is the input, and its bias if it has one.

    ``part`` is (axis, start, size) of the outputs, where it is a part of the parameters. A convolution has as many
    ``points`` dimensions last, those of its kernel. ``shiftable`` is one to whose output any vector can be added, as to
    the keys under a softmax: it needs no bias.
    """

    weight: str
    in_axis: int
    bias: str | None
    part: tuple[int, int, int] | None = None
    points: int = 0
    shiftable: bool = False

    def weight_of(self, weights: Weights) -> Tensor:
        """What reads the norm's output; a view."""
        weight = weights[self.weight]
        return weight if self.part is None else weight.narrow(*self.part)

    def bias_of(self, weights: Weights) -> Tensor:
        """The bias of that; a view."""
        assert self.bias is not None
        bias = weights[self.bias]
        return bias if self.part is None else bias.narrow(0, *self.part[1:])


@dataclass(frozen=True)
class Gain(Fold):
    """A norm's gain γ (and bias β) that only linear maps read: W γ = W', b + W β = b'.

    ``offset`` is 1 where the norm multiplies by 1 + weight. β folds only where every reader has a bias, or needs
    none; otherwise it stays a parameter, in units of the gain.
    """

    name: str
    module: str
    gain: str
    bias: str | None
    readers: tuple[Reader, ...]
    size: int
    offset: float = 0.0
    kind: str = "norm_gain"

    @property
    def parameters(self) -> tuple[str, ...]:
        """γ, β, and what reads them."""
        own = (self.gain, *([self.bias] if self.bias else []))
        return (*own, *(p for r in self.readers for p in (r.weight, r.bias) if p))

    @property
    def folds_bias(self) -> bool:
        """Whether β folds too."""
        return self.bias is not None and all(r.bias or r.shiftable for r in self.readers)

    @property
    def dimension(self) -> int:
        """Its size, twice that with β."""
        return self.size * (2 if self.folds_bias else 1)

    @property
    def fixed(self) -> tuple[View, ...]:
        """γ, and β if it folds."""
        names = [self.gain, *([self.bias] if self.folds_bias and self.bias else [])]
        return tuple(whole(n, self.size) for n in names)

    def random(self, weights: Weights, generator: torch.Generator, condition: float) -> Move:
        """Positive factors from condition^-½ to condition^½, and a normal shift of β."""
        spread = torch.rand(self.size, generator=generator, dtype=torch.float64) - 0.5
        shift = torch.randn(self.size, generator=generator, dtype=torch.float64)
        return {"t": condition**spread, "e": shift if self.folds_bias else torch.zeros_like(shift)}

    def inverse(self, move: Move) -> Move:
        """γ / t; β goes back to (β - e) / t."""
        return {"t": 1 / move["t"], "e": -move["e"] / move["t"]}

    def apply(self, weights: Weights, move: Move) -> None:
        """γ -> γ t, β -> β t + e, W -> W / t, b -> b - W e / t."""
        t, e = move["t"].to(weights[self.gain]), move["e"].to(weights[self.gain])
        self._rescale_own(weights, t)
        if self.folds_bias and self.bias:
            weights[self.bias].add_(e)
        for reader in self.readers:
            weight = reader.weight_of(weights)
            weight.div_(self._along(t, weight, reader))
            if self.folds_bias and reader.bias:
                bias = reader.bias_of(weights)
                bias.sub_(self._map(weight, e, reader).view_as(bias))

    def break_(self, weights: Weights, move: Move) -> None:
        """The norm's own parameters alone."""
        self._rescale_own(weights, move["t"].to(weights[self.gain]))

    def canonicalise(self, weights: Weights) -> None:
        """γ = 1 (and β = 0), with everything in the readers."""
        gamma = weights[self.gain] + self.offset
        for reader in self.readers:
            weight = reader.weight_of(weights)
            if self.folds_bias and self.bias and reader.bias:
                bias = reader.bias_of(weights)
                bias.add_(self._map(weight, weights[self.bias], reader).view_as(bias))
            weight.mul_(self._along(gamma, weight, reader))
        if self.bias:
            weights[self.bias].copy_(torch.zeros_like(gamma) if self.folds_bias else weights[self.bias] / gamma)
        weights[self.gain].fill_(1.0 - self.offset)

    def usable(self, weights: Mapping[str, Tensor]) -> bool:
        """β in units of γ needs γ everywhere."""
        if self.bias is None or self.folds_bias:
            return True
        return bool((weights[self.gain].detach() + self.offset != 0).all())

    def _rescale_own(self, weights: Weights, t: Tensor) -> None:
        gain = weights[self.gain]
        gain.copy_((gain + self.offset) * t - self.offset)
        if self.bias:
            weights[self.bias].mul_(t)

    @staticmethod
    def _along(t: Tensor, weight: Tensor, reader: Reader) -> Tensor:
        return t.reshape([-1 if axis == reader.in_axis else 1 for axis in range(weight.ndim)])

    @staticmethod
    def _map(weight: Tensor, x: Tensor, reader: Reader) -> Tensor:
        made = torch.tensordot(weight, x, dims=([reader.in_axis], [0]))
        return made.flatten(-reader.points).sum(-1) if reader.points else made


@dataclass(frozen=True)
class ReadMean(_Means):
    """W -> W + u vᵀ, b -> b - u (v · β) for what reads a norm that takes out the mean, v being 1 / γ."""

    name: str
    module: str
    gain: str | None
    bias: str | None
    """β, where the norm has one; each reader has a bias then, or needs none."""
    readers: tuple[Reader, ...]
    views: tuple[View, ...]
    """The weight of each reader (d, outputs)."""
    offset: float = 0.0
    overlap: int = 0
    """How many of these directions are of the means of what the same maps write, too."""
    kind: str = "read_mean"

    @property
    def parameters(self) -> tuple[str, ...]:
        """γ and β, which are read only, and the readers' own."""
        own = (*([self.gain] if self.gain else []), *([self.bias] if self.bias else []))
        return tuple(dict.fromkeys((*own, *(p for r in self.readers for p in (r.weight, r.bias) if p))))

    @property
    def dimension(self) -> int:
        """One for each output of each reader, of convolutions for each of their points."""
        return sum(v.height for v in self.views) - self.overlap

    def random(self, weights: Weights, generator: torch.Generator, condition: float) -> Move:
        """A normal number for each output, a third as large as what it is added to, both in units of v."""
        move = {}
        for k, reader in enumerate(self.readers):
            weight = self._weight(reader, weights)
            noise = torch.randn(weight.shape[1:], generator=generator, dtype=torch.float64)
            move[f"u{k}"] = noise * _size(weight / self._direction(weights, weight)) / 3
        return move

    def apply(self, weights: Weights, move: Move) -> None:
        """W += u vᵀ, b -= u (v · β)."""
        for k, reader in enumerate(self.readers):
            self._shift(weights, reader, move[f"u{k}"])

    def break_(self, weights: Weights, move: Move) -> None:
        """The first column of W alone."""
        for k, reader in enumerate(self.readers):
            first = self._weight(reader, weights)[0]
            first += move[f"u{k}"].to(first)

    def canonicalise(self, weights: Weights) -> None:
        """W v = 0."""
        for reader in self.readers:
            weight = self._weight(reader, weights)
            v = self._direction(weights, weight)
            self._shift(weights, reader, -(weight * v).sum(0) / v.square().sum())

    def usable(self, weights: Mapping[str, Tensor]) -> bool:
        """γ has to be other than zero."""
        return self.gain is None or bool((weights[self.gain].detach() + self.offset != 0).all())

    def _shift(self, weights: Weights, reader: Reader, u: Tensor) -> None:
        weight = self._weight(reader, weights)
        v, u = self._direction(weights, weight), u.to(weight)
        if self.bias and reader.bias:
            bias = reader.bias_of(weights)
            made = u * (v.flatten() * weights[self.bias]).sum()
            bias -= (made.flatten(-reader.points).sum(-1) if reader.points else made).view_as(bias)
        weight += v * u

    @staticmethod
    def _weight(reader: Reader, weights: Weights) -> Tensor:
        """(d, ...), a view."""
        return reader.weight_of(weights).movedim(reader.in_axis, 0)

    def _direction(self, weights: Weights, weight: Tensor) -> Tensor:
        """v as (d, 1, ...), to be multiplied with a weight of that order."""
        v = weight.new_ones(len(weight)) if self.gain is None else 1 / (weights[self.gain].to(weight) + self.offset)
        return v.view(-1, *(1,) * (weight.ndim - 1))


@dataclass(frozen=True)
class StreamBias(Fold):
    """b -> b + c, b' -> b' - r c: two constants that are added to one stream, r times the first one as the second is.

    Of the bias of a norm whose output is the stream what ``readers`` make of it changes too: their biases take that up,
    W c. A constant is a vector, or what all rows of a table have in common.
    """

    name: str
    module: str
    bias: View
    """(d, rows): a table has rows, a vector none."""
    into: View
    """Likewise."""
    ratio: float = 1.0
    readers: tuple[Reader, ...] = ()
    overlap: int = 0
    """How many of these directions are of the means of what is written, too."""
    kind: str = "stream_bias"

    @property
    def parameters(self) -> tuple[str, ...]:
        """b, b', and those of the readers."""
        own = (self.bias.parameter, self.into.parameter)
        return tuple(dict.fromkeys((*own, *(p for r in self.readers for p in (r.weight, r.bias) if p))))

    @property
    def dimension(self) -> int:
        """One for each coordinate."""
        return self.bias.width - self.overlap

    @property
    def fixed(self) -> tuple[View, ...]:
        """b, if it is a vector; of the rows of a table the mean is zero, and nothing is fixed."""
        return () if self.bias.rows else (self.bias,)

    @property
    def moved(self) -> tuple[View, ...]:
        """b."""
        return (self.bias,)

    def random(self, weights: Weights, generator: torch.Generator, condition: float) -> Move:
        """A normal number for each coordinate, as large as entries of the constant that takes it up."""
        size = _size(self.into.of(weights[self.into.parameter]))
        return {"c": torch.randn(self.bias.width, generator=generator, dtype=torch.float64) * size}

    def inverse(self, move: Move) -> Move:
        """The opposite shift."""
        return {"c": -move["c"]}

    def apply(self, weights: Weights, move: Move) -> None:
        """b += c, b' -= r c, and readers' biases -= W c."""
        self.break_(weights, move)
        _add(self.into, weights, -self.ratio * move["c"])
        for reader in (r for r in self.readers if r.bias):
            bias, weight = reader.bias_of(weights), reader.weight_of(weights)
            made = torch.tensordot(weight, move["c"].to(weight), dims=([reader.in_axis], [0]))
            bias -= made.view_as(bias)

    def break_(self, weights: Weights, move: Move) -> None:
        """b += c alone."""
        _add(self.bias, weights, move["c"])

    def canonicalise(self, weights: Weights) -> None:
        """b = 0, or its mean over rows."""
        window = self.bias.of(weights[self.bias.parameter])
        self.apply(weights, {"c": -(window.mean(-1) if self.bias.rows else window.clone())})
        if not self.bias.rows:
            window.zero_()


def _add(view: View, weights: Weights, c: Tensor) -> None:
    window = view.of(weights[view.parameter])
    c = c.to(window)
    window += c[:, None] if view.rows else c


@dataclass(frozen=True)
class Writer:
    """A linear map whose output is multiplied: its weight, the axis that counts the outputs, and its bias, if any."""

    weight: str
    out_axis: int
    bias: str | None


@dataclass(frozen=True)
class LayerScale(Fold):
    """Numbers λ that what linear maps write is multiplied by, one for each feature or for all: λ (W x + b).

    λ W = W', λ b = b' (Touvron et al., *Going deeper with image transformers*, arXiv 2103.17239, equation 4).
    """

    name: str
    module: str
    scale: View
    writers: tuple[Writer, ...]
    kind: str = "layer_scale"

    @property
    def parameters(self) -> tuple[str, ...]:
        """λ, and what writes."""
        return (self.scale.parameter, *(p for w in self.writers for p in (w.weight, w.bias) if p))

    @property
    def dimension(self) -> int:
        """How many numbers λ has."""
        return self.scale.count * self.scale.width * self.scale.height

    @property
    def fixed(self) -> tuple[View, ...]:
        """λ."""
        return (self.scale,)

    def random(self, weights: Weights, generator: torch.Generator, condition: float) -> Move:
        """Factors from condition^-½ to condition^½."""
        return {"t": condition ** (torch.rand(self.dimension, generator=generator, dtype=torch.float64) - 0.5)}

    def inverse(self, move: Move) -> Move:
        """1 / t."""
        return {"t": 1 / move["t"]}

    def apply(self, weights: Weights, move: Move) -> None:
        """λ -> λ t, W -> W / t, b -> b / t."""
        self.break_(weights, move)
        self._write(weights, 1 / move["t"].to(weights[self.scale.parameter]))

    def break_(self, weights: Weights, move: Move) -> None:
        """λ alone."""
        scale = weights[self.scale.parameter]
        scale.mul_(move["t"].to(scale).view_as(scale))

    def canonicalise(self, weights: Weights) -> None:
        """λ = 1, with everything in what writes."""
        scale = weights[self.scale.parameter]
        self._write(weights, scale.flatten())
        scale.fill_(1.0)

    def _write(self, weights: Weights, t: Tensor) -> None:
        for writer in self.writers:
            weight = weights[writer.weight]
            weight.mul_(t.reshape([-1 if axis == writer.out_axis else 1 for axis in range(weight.ndim)]))
            if writer.bias:
                weights[writer.bias].mul_(t)
