"""Scores of whole transformers written out by hand: one vector of weights, indices of each pair in it, autograd.

Nothing of the package is used, nor does anything look at a model to find its symmetries: which entries of which
parameters make up a pair, and what folds, is written down for each architecture. Metric and vertical directions are
explicit matrices, the projection is that of least squares, and the maximum is searched by a general optimiser from
several starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from tests.oracles import pair_formulas as oracle

Loss = Callable[[Any], Tensor]
"""The model's outputs -> the loss of the batch."""


class Flat:
    """The parameters of a model as one vector in double precision, and where each of them lies in it."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.shapes = {name: p.shape for name, p in named.items()}
        sizes = np.cumsum([0, *(p.numel() for p in named.values())])
        self.starts = dict(zip(named, sizes.tolist(), strict=False))
        self.theta = torch.cat([p.detach().double().reshape(-1) for p in named.values()])

    def index(self, name: str) -> Tensor:
        """The places of a parameter's entries, in its shape."""
        shape = self.shapes[name]
        return self.starts[name] + torch.arange(shape.numel()).view(shape)

    def get(self, name: str, theta: Tensor | None = None) -> Tensor:
        """A parameter, as a view."""
        start, shape = self.starts[name], self.shapes[name]
        return (self.theta if theta is None else theta)[start : start + shape.numel()].view(shape)

    def weights(self, theta: Tensor) -> dict[str, Tensor]:
        return {name: self.get(name, theta) for name in self.shapes}


@dataclass(frozen=True)
class Pair:
    """Places of the entries of G (N, d) and H (M, d), and of their imaginary parts where they are complex."""

    g: Tensor
    h: Tensor
    imaginary: tuple[Tensor, Tensor] | None = None

    @property
    def places(self) -> Tensor:
        return torch.cat([x.reshape(-1) for x in (self.g, self.h, *(self.imaginary or ()))])

    def read(self, theta: Tensor) -> oracle.Pair:
        g, h = theta[self.g], theta[self.h]
        if self.imaginary is None:
            return g, h
        return torch.complex(g, theta[self.imaginary[0]]), torch.complex(h, theta[self.imaginary[1]])

    def write(self, theta: Tensor, point: oracle.Pair) -> Tensor:
        for place, turned, x in zip((self.g, self.h), self.imaginary or (None, None), point, strict=True):
            theta = theta.index_put((place,), x.real if turned is not None else x)
            if turned is not None:
                theta = theta.index_put((turned,), x.imag)
        return theta


@dataclass(frozen=True)
class Layout:
    """What a quotient is made of: the weights once folded, the pairs, and the places that folding has fixed."""

    theta: Tensor
    pairs: list[Pair]
    fixed: list[Tensor]
    means: int = 0
    """Directions that layer norms take out: still coordinates, but nothing feels them."""


# ----------------------------------------------------------------------------------------------- architectures by hand


class _Folding:
    """Weights that are moved to where biases and gains are gone."""

    def __init__(self, flat: Flat) -> None:
        self.flat, self.theta = flat, flat.theta.clone()
        self.fixed: list[Tensor] = []
        self.means = 0

    def get(self, name: str) -> Tensor:
        return self.flat.get(name, self.theta)

    def gain(self, norm: str, readers: Sequence[str], *, across: bool = False) -> None:
        """Gain and bias of a norm into linear maps, whose inputs are the rows of their weights if ``across``."""
        gain = self.get(f"{norm}.weight")
        bias = self.get(f"{norm}.bias") if f"{norm}.bias" in self.flat.shapes else None
        for reader in readers:
            weight = self.get(f"{reader}.weight")
            weight = weight.mT if across else weight
            if bias is not None:
                self.get(f"{reader}.bias").add_(weight @ bias)
            weight.mul_(gain)
        gain.fill_(1)
        self.fixed.append(self.flat.index(f"{norm}.weight"))
        if bias is not None:
            bias.zero_()
            self.fixed.append(self.flat.index(f"{norm}.bias"))

    def read_mean(self, norm: str, readers: Sequence[str], *, across: bool = False) -> None:
        """What of the weights lies along 1 / gain, in which the norm's output has no mean but that of its bias."""
        along, bias = 1 / self.get(f"{norm}.weight"), self.get(f"{norm}.bias")
        for reader in readers:
            weight = self.get(f"{reader}.weight")
            weight = weight.mT if across else weight
            tilt = weight @ along / (along @ along)
            self.get(f"{reader}.bias").add_(tilt * (along @ bias))
            weight.sub_(torch.outer(tilt, along))
            self.means += len(tilt)

    def written_mean(self, writer: str, *, across: bool = False) -> None:
        """The mean of what is written to a stream, of which layer norms take it out."""
        weight, bias = self.get(f"{writer}.weight"), self.get(f"{writer}.bias")
        weight.sub_(weight.mean(1 if across else 0, keepdim=True))
        bias.sub_(bias.mean())
        self.means += weight.shape[0 if across else 1] + 1

    def table_mean(self, table: str) -> None:
        """The mean of each row, which layer norms take out."""
        rows = self.get(table)
        rows.sub_(rows.mean(1, keepdim=True))
        self.means += len(rows)

    def into_table(self, table: str, other: str) -> None:
        """What all rows have in common, into those of another table; but for its mean, which is gone from both."""
        rows, others = self.get(table), self.get(other)
        shift = rows.mean(0)
        rows.sub_(shift)
        others.add_(shift)
        self.means += len(shift) - 1

    def norm_bias(self, norm: str, readers: Sequence[str], added: str) -> None:
        """The bias of a norm whose output is the residual, into those of what reads it and of what is added to it."""
        bias = self.get(f"{norm}.bias")
        for reader in readers:
            self.get(f"{reader}.bias").add_(self.get(f"{reader}.weight") @ bias)
        self.get(f"{added}.bias").add_(bias)
        bias.zero_()
        self.fixed.append(self.flat.index(f"{norm}.bias"))

    def value_bias(self, bias: Tensor, place: Tensor, weight: Tensor, out: Tensor) -> None:
        """A bias of values into that of the output; ``weight`` is (outputs, values)."""
        out.add_(weight @ bias)
        bias.zero_()
        self.fixed.append(place)


def _rows(flat: Flat, linear: str, rows: slice, *, bias: bool) -> Tensor:
    """A factor made of rows of a linear layer, (inputs [+ 1], d)."""
    weight = flat.index(f"{linear}.weight")[rows].mT
    return torch.cat([weight, flat.index(f"{linear}.bias")[rows][None]]) if bias else weight


def bert(flat: Flat, config: Any) -> Layout:
    """Queries with their bias and keys; values and output; the last norm, which the pooler alone reads, is folded."""
    folding, pairs = _Folding(flat), []
    folding.gain(f"bert.encoder.layer.{config.num_hidden_layers - 1}.output.LayerNorm", ["bert.pooler.dense"])
    head = config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        base = f"bert.encoder.layer.{layer}.attention"
        query, key, value, out = (f"{base}.{x}" for x in ("self.query", "self.key", "self.value", "output.dense"))
        before = f"bert.encoder.layer.{layer - 1}.output" if layer else "bert.embeddings"
        inner, outer = (f"bert.encoder.layer.{layer}.{x}.dense" for x in ("intermediate", "output"))
        folding.norm_bias(f"{before}.LayerNorm", [query, key, value], out)
        folding.norm_bias(f"{base}.output.LayerNorm", [inner], outer)
        folding.read_mean(f"{before}.LayerNorm", [query, key, value])
        folding.read_mean(f"{base}.output.LayerNorm", [inner])
        folding.get(f"{key}.bias").zero_()
        folding.fixed.append(flat.index(f"{key}.bias"))
        folding.value_bias(
            folding.get(f"{value}.bias"), flat.index(f"{value}.bias"), folding.get(f"{out}.weight"),
            folding.get(f"{out}.bias"),
        )  # fmt: skip
        for start in range(0, config.hidden_size, head):
            rows = slice(start, start + head)
            pairs.append(Pair(_rows(flat, query, rows, bias=True), _rows(flat, key, rows, bias=False)))
            pairs.append(Pair(_rows(flat, value, rows, bias=False), flat.index(f"{out}.weight")[:, rows]))
        folding.written_mean(out)
        folding.written_mean(outer)
    folding.read_mean(f"bert.encoder.layer.{config.num_hidden_layers - 1}.output.LayerNorm", ["bert.pooler.dense"])
    types, positions, words = (
        f"bert.embeddings.{x}_embeddings.weight" for x in ("token_type", "position", "word")
    )  # fmt: skip
    for table in (types, positions, words):
        folding.table_mean(table)
    folding.into_table(types, positions)
    folding.into_table(positions, words)
    return Layout(folding.theta, pairs, folding.fixed, folding.means)


def gpt2(flat: Flat, config: Any) -> Layout:
    """The same in one fused weight of which queries, keys and values are columns; norms in front are folded."""
    folding, pairs = _Folding(flat), []
    width, head = config.n_embd, config.n_embd // config.n_head
    for layer in range(config.n_layer):
        base = f"transformer.h.{layer}"
        fused, out = f"{base}.attn.c_attn", f"{base}.attn.c_proj"
        folding.gain(f"{base}.ln_1", [fused], across=True)
        folding.gain(f"{base}.ln_2", [f"{base}.mlp.c_fc"], across=True)
        folding.read_mean(f"{base}.ln_1", [fused], across=True)
        folding.read_mean(f"{base}.ln_2", [f"{base}.mlp.c_fc"], across=True)
        bias, places = folding.get(f"{fused}.bias"), flat.index(f"{fused}.bias")
        bias[width : 2 * width] = 0
        folding.fixed.append(places[width : 2 * width])
        folding.value_bias(
            bias[2 * width :], places[2 * width :], folding.get(f"{out}.weight").mT, folding.get(f"{out}.bias")
        )
        weight = flat.index(f"{fused}.weight")
        for start in range(0, width, head):
            q, k, v = (slice(part * width + start, part * width + start + head) for part in range(3))
            pairs.append(Pair(torch.cat([weight[:, q], places[None, q]]), weight[:, k]))
            pairs.append(Pair(weight[:, v], flat.index(f"{out}.weight")[q].mT))
        folding.written_mean(out, across=True)
        folding.written_mean(f"{base}.mlp.c_proj", across=True)
    folding.table_mean("transformer.wpe.weight")
    return Layout(folding.theta, pairs, folding.fixed, folding.means)


def llama(flat: Flat, config: Any) -> Layout:
    """One complex number for each frequency and key head, with all queries that share it; hidden units; no biases."""
    folding, pairs = _Folding(flat), []
    head, keys = config.head_dim, config.num_key_value_heads
    each, half = config.num_attention_heads // keys, config.head_dim // 2
    for layer in range(config.num_hidden_layers):
        base = f"model.layers.{layer}"
        names = {x: f"{base}.self_attn.{x}_proj" for x in "qkvo"}
        folding.gain(f"{base}.input_layernorm", [names[x] for x in "qkv"])
        folding.gain(f"{base}.post_attention_layernorm", [f"{base}.mlp.gate_proj", f"{base}.mlp.up_proj"])
        q, k, v, o = (flat.index(f"{names[x]}.weight") for x in "qkvo")
        for key in range(keys):
            own = range(key * each, (key + 1) * each)
            for f in range(half):
                real, turned = (
                    (torch.cat([q[n * head + at] for n in own])[:, None], k[key * head + at][:, None])
                    for at in (f, f + half)
                )
                pairs.append(Pair(*real, turned))
            values = v[key * head : (key + 1) * head].mT
            pairs.append(Pair(values, torch.cat([o[:, n * head : (n + 1) * head] for n in own])))
        up, down = flat.index(f"{base}.mlp.up_proj.weight"), flat.index(f"{base}.mlp.down_proj.weight")
        pairs += [Pair(up[i][:, None], down[:, i][:, None]) for i in range(len(up))]
    folding.gain("model.norm", ["lm_head"])
    return Layout(folding.theta, pairs, folding.fixed)


def lora(flat: Flat, config: Any) -> Layout:
    """B and A of each adapter, on weights that stay."""
    names = [name for name in flat.shapes if "lora_A" in name]
    pairs = [Pair(flat.index(n.replace("lora_A", "lora_B")), flat.index(n).mT) for n in names]
    trained = ("lora_", "modules_to_save")
    still = [flat.index(n) for n in flat.shapes if not any(part in n for part in trained)]
    return Layout(flat.theta.clone(), pairs, still)


# ------------------------------------------------------------------------------------------------------------ the score


class Reference:
    """The rise of a batch's loss as a function of orthonormal coordinates z of a tangent vector."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor], loss: Loss, layout: Layout, metric: str) -> None:
        self.model, self.batch, self.loss, self.metric = model, batch, loss, metric
        self.flat, self.layout = Flat(model), layout
        free = layout.theta != 0
        for places in (*(p.places for p in layout.pairs), *layout.fixed):
            free[places.reshape(-1)] = False
        self.loose = free.nonzero().squeeze(1)
        self.points = [pair.read(layout.theta) for pair in layout.pairs]
        self.frames = [self._frame(*point) for point in self.points]
        self.vertical = [self._vertical(*both) for both in zip(self.points, self.frames, strict=True)]
        self.size = sum(len(v) for v in self.vertical) + len(self.loose)
        self.coordinates = self.size - sum(v.shape[1] for v in self.vertical)
        self.dimension = self.coordinates - layout.means
        self.base = float(self.value(layout.theta))

    def value(self, theta: Tensor) -> Tensor:
        return self.loss(torch.func.functional_call(self.model, self.flat.weights(theta), (), self.batch))

    def _frame(self, g: Tensor, h: Tensor) -> oracle.Pair:
        """ξ = z F makes the inner product that of z."""
        s, t = (torch.linalg.cholesky(x.mH @ x) for x in (g, h))
        return (s.mH, t.mH) if self.metric == "inv" else (torch.linalg.inv(t), torch.linalg.inv(s))

    @staticmethod
    def _vertical(point: oracle.Pair, frame: oracle.Pair) -> Tensor:
        """(coordinates, dimension of the group): an orthonormal basis of the directions that move no product."""
        columns = []
        for place in np.ndindex(2 * (point[0].shape[1],)):
            for unit in (1.0, 1j) if point[0].is_complex() else (1.0,):
                step = torch.zeros(2 * (point[0].shape[1],), dtype=point[0].dtype)
                step[place] = unit
                xi = oracle.vertical(point, step)
                z = [x @ torch.linalg.inv(f) for x, f in zip(xi, frame, strict=True)]
                columns.append(torch.cat([_real(x).reshape(-1) for x in z]))
        return torch.linalg.qr(torch.stack(columns, 1)).Q

    def horizontal(self, z: Tensor) -> Tensor:
        pieces, at = [], 0
        for basis in self.vertical:
            piece = z[at : at + len(basis)]
            pieces.append(piece - basis @ (basis.mT @ piece))
            at += len(basis)
        return torch.cat([*pieces, z[at:]])

    def end(self, z: Tensor) -> Tensor:
        """The weights at the second-order end point of the horizontal part of z; straight lines of what is loose."""
        theta, z, at = self.layout.theta, self.horizontal(z), 0
        for pair, point, frame in zip(self.layout.pairs, self.points, self.frames, strict=True):
            xi = []
            for x, f in zip(point, frame, strict=True):
                size = _real(x).numel()
                piece = z[at : at + size]
                xi.append((torch.view_as_complex(piece.view(*x.shape, 2)) if x.is_complex() else piece.view_as(x)) @ f)
                at += size
            bent = oracle.acceleration(self.metric, point, (xi[0], xi[1]))
            ends = [x + v + a / 2 for x, v, a in zip(point, xi, bent, strict=True)]
            theta = pair.write(theta, (ends[0], ends[1]))
        return theta.index_put((self.loose,), theta[self.loose] * (1 + z[at:]))

    def rise(self, z: Tensor) -> Tensor:
        return self.value(self.end(z)) - self.base

    def slope(self) -> float:
        """The dual norm of the gradient at the base point."""
        z = torch.zeros(self.size, dtype=torch.float64, requires_grad=True)
        return float(torch.autograd.grad(self.rise(z), z)[0].norm())

    def curvature(self, steps: int = 200) -> float:
        """The largest eigenvalue of the Hessian at a stationary base point, by the power method."""
        v = self.horizontal(torch.randn(self.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
        found = 0.0
        for _ in range(steps):
            v = v / v.norm()
            z = torch.zeros(self.size, dtype=torch.float64, requires_grad=True)
            (gradient,) = torch.autograd.grad(self.rise(z), z, create_graph=True)
            (product,) = torch.autograd.grad(gradient @ v, z)
            v, before, found = product, found, float(product @ v)
            if abs(found - before) <= 1e-9 * found:
                break
        return found

    def maximum(self, rho: float, starts: int = 2) -> float:
        """The largest rise on the sphere, from the gradient, from opposite its peak, and from random points."""
        generator = torch.Generator().manual_seed(0)

        def negative(y: np.ndarray) -> tuple[float, np.ndarray]:
            x = torch.from_numpy(y).requires_grad_()
            value = -self.rise(rho * x / x.norm())
            return float(value.detach()), torch.autograd.grad(value, x)[0].numpy()

        zero = torch.zeros(self.size, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(self.rise(zero), zero)
        best, peak = 0.0, first
        for number in range(starts):
            random = self.horizontal(torch.randn(self.size, generator=generator, dtype=torch.float64))
            y = (peak, -peak, random)[min(number, 2)]
            found = minimize(
                negative, (y / y.norm()).numpy(), jac=True, method="L-BFGS-B", options={"maxiter": 200, "ftol": 1e-14}
            )
            if -found.fun > best:
                best, peak = -found.fun, torch.from_numpy(found.x)
        return best

    @torch.no_grad()
    def average(self, rho: float, draws: int) -> tuple[float, float]:
        """The mean rise over Gaussian horizontal perturbations with E‖ξ‖² = rho², and its standard error."""
        generator = torch.Generator().manual_seed(1)
        found = []
        for _ in range(draws):
            z = self.horizontal(torch.randn(self.size, generator=generator, dtype=torch.float64))
            z *= rho / math.sqrt(self.coordinates)  # means are drawn too
            found.append(float(self.rise(z) + self.rise(-z)) / 2)
        return float(np.mean(found)), float(np.std(found, ddof=1) / math.sqrt(draws))

    def held_against(self, start: Tensor, end: Tensor) -> tuple[float, float, float]:
        """What a perturbation from ``start`` to ``end`` is: weights of the base point in whatever gauge, and others.

        Returns its length, its largest inner product with a vertical unit vector, and how far the product of a pair, or
        an entry of no pair, is at the start from where it is at the base point (relative to the largest).
        """
        square, tilt, off = 0.0, 0.0, 0.0
        moved = ((end - start) / torch.where(start == 0, 1.0, start))[self.loose]
        square += float(moved @ moved)
        own = self.layout.theta
        rest = torch.cat([self.loose, *(places.reshape(-1) for places in self.layout.fixed)])
        off = float((start - own)[rest].abs().max())
        still = torch.ones_like(own, dtype=torch.bool)
        for places in (self.loose, *(p.places for p in self.layout.pairs)):
            still[places] = False
        assert torch.equal(start[still], end[still])
        for pair, point in zip(self.layout.pairs, self.points, strict=True):
            before, after = pair.read(start), pair.read(end)
            product = point[0] @ point[1].mH
            off = max(off, float((before[0] @ before[1].mH - product).abs().max() / product.abs().max()))
            xi = (after[0] - before[0], after[1] - before[1])
            for _ in range(200):  # end = start + ξ + ½ a(ξ)
                bent = oracle.acceleration(self.metric, before, xi)
                xi = (after[0] - before[0] - bent[0] / 2, after[1] - before[1] - bent[1] / 2)
            square += float(oracle.inner(self.metric, before, xi, xi))
            tilt = max(tilt, float(oracle.horizontality(self.metric, before, xi)))
        return math.sqrt(square), tilt, off


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
