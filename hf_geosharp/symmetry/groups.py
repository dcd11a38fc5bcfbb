"""The groups as data: how many dimensions they have, and random elements of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """A group that acts on a pair's d columns: GL(dim) over the real or the complex numbers, or a part of it.

    Attributes:
        dim: d.
        complex: over the complex numbers.
        positive: of GL(1) only the positive numbers.
        isometric: only what keeps lengths: rotations and reflections O(dim), phases U(1).
        centred: of O(dim) only what keeps the vector of ones where it is, as a norm wants it that takes out the mean.
    """

    dim: int
    complex: bool = False
    positive: bool = False
    isometric: bool = False
    centred: bool = False

    def __str__(self) -> str:
        """Its name."""
        return self.name

    @property
    def name(self) -> str:
        """``GL(64)``, ``GL(1,C)``, ``GL(1)+``, ``O(64)``, ``O(64) fixing 1`` or ``U(1)``."""
        if self.centred:
            return f"O({self.dim}) fixing 1"
        if self.isometric:
            return f"{'U' if self.complex else 'O'}({self.dim})"
        if self.positive:
            return f"GL({self.dim})+"
        return f"GL({self.dim},C)" if self.complex else f"GL({self.dim})"

    @property
    def dimension(self) -> int:
        """Real dimension of the group."""
        if self.centred:
            return (self.dim - 1) * (self.dim - 2) // 2
        if self.isometric:
            return self.dim**2 if self.complex else self.dim * (self.dim - 1) // 2
        return self.dim**2 * (2 if self.complex else 1)

    def random(self, copies: int, generator: torch.Generator, condition: float = 10.0) -> Tensor:
        """(copies, dim, dim) elements far from the identity, singular values from condition^-½ to condition^½.

        For dim = 1 a number of modulus in that range (and any phase or sign). Double precision, on the CPU.
        """
        dtype = torch.complex128 if self.complex else torch.float64
        x = torch.randn(copies, self.dim, self.dim, generator=generator, dtype=dtype)
        if self.dim == 1:
            spread = torch.rand(copies, 1, 1, generator=generator, dtype=torch.float64) - 0.5
            if not self.complex:
                # One at least is negative, so that what only positive numbers may do is told apart.
                x[0] = -x[0].abs()
            turn = (x.abs() if self.positive else x).sgn()
            return turn if self.isometric else turn * condition**spread
        u, _, vh = torch.linalg.svd(x)
        if self.centred:
            # An orthonormal basis that begins with the vector of ones, and a rotation of the rest.
            basis = torch.linalg.qr(torch.cat([torch.ones(self.dim, 1, dtype=dtype), x[0, :, 1:]], dim=1)).Q[:, 1:]
            u, _, vh = torch.linalg.svd(x[:, 1:, 1:])
            return 1 / self.dim + basis @ (u @ vh) @ basis.mT
        if self.isometric:
            return u @ vh
        exponents = torch.linspace(-0.5, 0.5, self.dim, dtype=torch.float64)
        return (u * condition**exponents) @ vh
