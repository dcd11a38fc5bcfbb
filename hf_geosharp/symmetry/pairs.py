"""Pairs (G, H) on the parameters of a model: query/key and value/output of heads, hidden units, adapters, norms.

Everything here works on a mapping from parameter names to tensors (usually float64 copies), in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_geosharp.geometry.gauge import act
from hf_geosharp.symmetry.base import Move, Symmetry, Weights
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.views import View, read, scale, shape_of, write


@dataclass(frozen=True)
class Between:
    """A norm's gain between the factors: what meets the first one is the second times the gain.

    Attributes:
        gain: name of the norm's weight, (n,).
        parameter: name of what the second factor is a view of.
        axis: the dimension of it, of size n, along which the gain lies.
        offset: 1 where the norm multiplies by 1 + weight.
        bias, out: names of what the norm adds, (n,), and of the bias that takes up what becomes of it, or "".
    """

    gain: str
    parameter: str
    axis: int
    offset: float = 0.0
    bias: str = ""
    out: str = ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the norm's parameters, and of the bias that goes with them."""
        return tuple(name for name in (self.gain, self.bias, self.out) if name)

    def renamed(self, names: Mapping[str, str]) -> Between:
        """The same with other names of parameters."""
        gain, parameter = names[self.gain], names[self.parameter]
        bias, out = (names[n] if n else "" for n in (self.bias, self.out))
        return replace(self, gain=gain, parameter=parameter, bias=bias, out=out)

    @contextmanager
    def multiplied(self, weights: Weights) -> Iterator[None]:
        """The parameter is that times the gain meanwhile. From a gain of zero there is no way back: inf or NaN."""
        weight, gain = weights[self.parameter], weights[self.gain] + self.offset
        along = gain.reshape([-1 if d == self.axis else 1 for d in range(weight.ndim)])
        if self.out:
            weights[self.out].add_(self._through(weights))
        weight.mul_(along)
        yield
        weight.div_(along)
        if self.out:
            weights[self.out].sub_(self._through(weights))

    def _through(self, weights: Weights) -> Tensor:
        """What the parameter makes of the norm's bias."""
        return torch.tensordot(weights[self.parameter], weights[self.bias], dims=([self.axis], [0]))


@dataclass(frozen=True)
class Pair(Symmetry):
    """A batch of pairs (G, H) that enter only through G Hᴴ (arXiv 2505.05409, definition 3.1).

    ``g`` and ``h`` are the views whose rows, stacked, are the two factors; ``copies`` heads (or frequencies) at once.
    With a norm ``between`` them H is that times its gain, and the geometry, which sees views alone, needs the fold
    that makes the gain one (:meth:`hf_geosharp.symmetry.map.SymmetryMap.supported`).
    """

    name: str
    kind: str
    module: str
    group: Group
    g: tuple[View, ...]
    h: tuple[View, ...]
    between: Between | None = None

    @property
    def copies(self) -> int:
        """Number of pairs."""
        return self.g[0].count

    @property
    def dimension(self) -> int:
        """Dimension of the group times copies."""
        return self.copies * self.group.dimension

    @property
    def parameters(self) -> tuple[str, ...]:
        """Each name once, in order."""
        between = self.between.parameters if self.between else ()
        return tuple(dict.fromkeys((*(v.parameter for v in (*self.g, *self.h)), *between)))

    def factors(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """(copies, N, d) and (copies, M, d): copies of the two factors, in the dtype of the weights."""
        return self._factor(self.g, weights), self._factor(self.h, weights)

    def _factor(self, views: tuple[View, ...], weights: Weights) -> Tensor:
        like = weights[views[0].parameter]
        dtype = torch.complex(*2 * [torch.empty(0, dtype=like.dtype)]).dtype if self.group.complex else like.dtype
        return read(views, weights, torch.empty(shape_of(views), dtype=dtype, device=like.device)).mT

    def set_factors(self, weights: Weights, g: Tensor, h: Tensor) -> None:
        """Writes both factors back, in place."""
        write(self.g, weights, g.mT)
        write(self.h, weights, h.mT)

    def random(self, weights: Weights, generator: torch.Generator, condition: float) -> Move:
        """One group element for each copy."""
        return {"a": self.group.random(self.copies, generator, condition)}

    def inverse(self, move: Move) -> Move:
        """A⁻¹."""
        return {"a": torch.linalg.inv(move["a"])}

    def apply(self, weights: Weights, move: Move) -> None:
        """(G, H) -> (G A⁻¹, H Aᴴ)."""
        if self._numbers:
            scale(self.g, weights, move["a"].flatten().reciprocal())
            scale(self.h, weights, move["a"].flatten())
            return
        with self._in_units(weights):
            g, h = self.factors(weights)
            self.set_factors(weights, *act(g, h, move["a"].to(g)))

    def _in_units(self, weights: Weights) -> AbstractContextManager[None]:
        return self.between.multiplied(weights) if self.between else nullcontext()

    def break_(self, weights: Weights, move: Move) -> None:
        """(G, H) -> (G A⁻¹, H)."""
        if self._numbers:
            scale(self.g, weights, move["a"].flatten().reciprocal())
            return
        g = self._factor(self.g, weights)
        write(self.g, weights, act(g, g[:, :0], move["a"].to(g))[0].mT)

    @property
    def _numbers(self) -> bool:
        """Whether the group's elements are real numbers: the units of an MLP, which are many, are moved in place."""
        return self.group.dim == 1 and not self.group.complex

    @property
    def has_wrong_pairing(self) -> bool:
        """Whether there are frequencies that could be paired wrongly."""
        return self.group.complex and self.g[0].shape()[len(self.g[0].copies) - 1] > 1

    def wrong_pairing(self, weights: Weights, move: Move) -> None:
        """A negative control: as :meth:`apply`, but each frequency's first half turns with the next one's second."""
        g, h = self.factors(weights)
        frequencies = self.g[0].shape()[len(self.g[0].copies) - 1]
        g, h = (_shifted(x, frequencies, 1) for x in (g, h))
        g, h = act(g, h, move["a"].to(g))
        self.set_factors(weights, *(_shifted(x, frequencies, -1) for x in (g, h)))

    @property
    def has_untied(self) -> bool:
        """Whether several rows blocks of the first factor share one group element."""
        return any(n[0] == "m" and self.g[0].sizes[n] > 1 for n in self.g[0].rows)

    def untied(self, weights: Weights, move: Move) -> None:
        """A negative control: only the first of the blocks of queries that share a key moves with it."""
        with self._in_units(weights):
            g, h = self.factors(weights)
            moved_g, moved_h = act(g, h, move["a"].to(g))
            row = 0
            for view in self.g:
                blocks = next((view.sizes[n] for n in view.rows if n[0] == "m"), 1)
                part = view.height // blocks
                moved_g[:, row + part : row + view.height] = g[:, row + part : row + view.height]
                row += view.height
            self.set_factors(weights, moved_g, moved_h)


def _shifted(x: Tensor, frequencies: int, by: int) -> Tensor:
    """Imaginary parts exchanged between neighbouring frequencies."""
    apart = x.unflatten(0, (-1, frequencies))
    return torch.complex(apart.real, apart.imag.roll(by, 1)).flatten(0, 1)
