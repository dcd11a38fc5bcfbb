"""Norms on queries and keys: how many numbers their weights can exchange, against what was worked out by hand."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.attention import exchange
from hf_geosharp.symmetry.attention.couplings import Couplings
from hf_geosharp.symmetry.verify import verify
from tests.symmetry.handmade import (
    HEAD,
    TOKENS,
    WIDTH,
    HeadNorm,
    Normed,
    Projected,
    Residual,
    attend,
    finder,
    half,
    inputs,
    interleaved,
    split,
)

ALL = 4 * HEAD


@dataclass(frozen=True)
class Case:
    """A module with normed queries and keys; how many copies each of its exchanges has, largest first."""

    module: Callable[[], nn.Module]
    copies: tuple[int, ...]


def _part(rotary: Callable[[Tensor], Tensor], share: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([rotary(x[..., :share]), x[..., share:]], dim=-1)


def _zero_frequency(x: Tensor) -> Tensor:
    """Halves are paired over the whole head, but the last pair does not turn."""
    pairs = x.unflatten(-1, (2, -1)).mT
    angles = torch.arange(TOKENS, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3, 0.0], dtype=x.dtype)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).mT.flatten(-2)


CASES = {
    # One weight for all heads: what one head exchanges, all do.
    "shared by heads": Case(lambda: Normed("head"), (HEAD,)),
    "shared by heads, rotary": Case(lambda: Normed("head", half), (HEAD // 2,)),
    "shared by heads, rotary in neighbours": Case(lambda: Normed("head", interleaved), (HEAD // 2,)),
    "shared by heads, grouped queries": Case(lambda: Normed("head", half, key_heads=2), (HEAD // 2,)),
    "shared by heads, biases": Case(lambda: Normed("head", half, bias=True), (HEAD // 2,)),
    "shared by heads, one plus weight": Case(lambda: Normed("head", half, offset=1.0), (HEAD // 2,)),
    "shared by heads, one plus weight, biases": Case(lambda: Normed("head", bias=True, offset=1.0), (HEAD,)),
    "shared by heads, layer norm": Case(lambda: Normed("head", half, centred=True, bias=True), (HEAD // 2,)),
    # A rotary embedding ties two entries only if it comes after the norm.
    "rotary before the norm": Case(lambda: Normed("head", half, first="rotary"), (HEAD,)),
    "rotary on a part": Case(lambda: Normed("head", _part(half, 4)), (2, 2)),
    "rotary on a part, neighbours": Case(lambda: Normed("head", _part(interleaved, 4)), (2, 2)),
    "rotary on two coordinates": Case(lambda: Normed("head", _part(half, 2)), (4, 1)),
    "rotary with a frequency of zero": Case(lambda: Normed("head", _zero_frequency), (2, 2)),
    # A third vector beside the two norms: two exchanges of each entry, or one where it is no factor as it stands.
    "shared by heads, scaled": Case(lambda: Normed("head", scaled=lambda s: 2 * s), (HEAD, HEAD)),
    "shared by heads, scaled through a function": Case(lambda: Normed("head", scaled=nn.functional.softplus), (HEAD,)),
    "shared by heads, rotary, scaled through a function": Case(
        lambda: Normed("head", half, first="rotary", scaled=nn.functional.softplus), (HEAD,)
    ),
    "one weight for each head": Case(lambda: Normed("heads"), (ALL,)),
    "one weight for each head, rotary": Case(lambda: Normed("heads", half), (ALL // 2,)),
    "one weight for each head, grouped queries": Case(lambda: Normed("heads", half, key_heads=2), (HEAD,)),
    "full width": Case(lambda: Normed("width"), (ALL,)),
    "full width, rotary": Case(lambda: Normed("width", half), (ALL // 2,)),
    "full width, grouped queries, rotary in neighbours": Case(
        lambda: Normed("width", interleaved, key_heads=2), (HEAD,)
    ),
}
each_case = pytest.mark.parametrize("name", CASES)
find = finder(CASES)


def exchanged(found: SymmetryMap) -> tuple[int, ...]:
    return tuple(sorted((p.copies for p in found.pairs if p.kind == "qk_norm"), reverse=True))


@each_case
def test_as_many_numbers_are_exchanged_as_the_norm_and_the_embedding_leave(name: str) -> None:
    assert exchanged(find(name)[1]) == CASES[name].copies


@each_case
def test_an_exchange_is_one_real_number_a_copy_on_the_weights_of_the_norms_alone(name: str) -> None:
    for p in find(name)[1].pairs:
        if p.kind == "qk_norm":
            assert p.group.name == "GL(1)"
            places = {n.removesuffix(".weight").removesuffix(".bias") for n in p.parameters}
            assert len(places) == 2
            assert places <= {"parts.0.q_norm", "parts.0.k_norm", "parts.0.scale"}
            assert "through" not in name or "parts.0.scale" not in places


@each_case
def test_no_entry_is_in_two_exchanges_of_the_same_weights(name: str) -> None:
    taken: set[tuple[str, str, int]] = set()
    for p in find(name)[1].pairs:
        for view in (*p.g, *p.h) if p.kind == "qk_norm" else ():
            index = torch.arange(find(name)[0].get_parameter(view.parameter).numel())
            for i in view.of(index.view_as(find(name)[0].get_parameter(view.parameter))).flatten().tolist():
                entry = "".join(p.parameters), view.parameter, i
                assert entry not in taken
                taken.add(entry)


@each_case
def test_the_projections_themselves_have_no_pair_and_the_values_have_theirs(name: str) -> None:
    found = find(name)[1]
    heads = 2 if "grouped" in name else 4
    assert [(p.kind, p.group.name, p.copies) for p in found.pairs if p.kind != "qk_norm"] == [
        ("vo", f"GL({HEAD})", heads)
    ]
    # What is added to all keys alike is a constant for softmax, unless a rotary embedding turns it.
    biases = [(f.parameters[0].rpartition(".")[2], f.dimension) for f in found.folds if f.kind == "key_bias"]
    assert biases == ([("bias", HEAD)] if name == "shared by heads, one plus weight, biases" else [])


@each_case
def test_every_exchange_holds_and_breaks_when_only_queries_gain(name: str) -> None:
    model, found = find(name)
    proof = verify(model, found, [inputs(1), inputs(2)], condition=30.0, each=True)
    assert proof.map == found
    assert all((c.deviation or 0.0) < 1e-11 and (c.control or 0.0) > 1e-4 for c in proof.claims)


@pytest.mark.parametrize("name", ["shared by heads, rotary", "full width, rotary", "rotary before the norm"])
def test_weights_of_one_do_not_make_rotations_look_like_a_symmetry(name: str) -> None:
    """With all weights one, a norm commutes with every rotation of a pair."""
    model = Residual(CASES[name].module())
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "_norm" in n:
                p.fill_(1.0)
    found = find_symmetries(model, inputs())
    assert exchanged(found) == CASES[name].copies
    assert Counter(p.kind for p in found.pairs) == {"qk_norm": len(CASES[name].copies), "vo": 1}


@pytest.mark.parametrize("name", ["shared by heads, rotary", "full width, rotary"])
def test_frozen_norms_exchange_the_same(name: str) -> None:
    model = Residual(CASES[name].module()).requires_grad_(False)
    assert find_symmetries(model, inputs()) == find(name)[1]


@pytest.mark.parametrize("preset", ["attention", "paper"])
def test_presets_of_attention_leave_exchanges_out(preset: str) -> None:
    found = find_symmetries(find("full width")[0], inputs(), preset=preset)
    assert {p.kind for p in found.pairs} == {"vo"}


def test_a_norm_on_queries_alone_exchanges_nothing_with_keys() -> None:
    part = Normed("head")
    part.k_norm = nn.Identity()
    model = Residual(part)
    found = find_symmetries(model, inputs())
    assert exchanged(found) == ()
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_one_norm_module_for_queries_and_keys_exchanges_nothing() -> None:
    part = Normed("head")
    part.k_norm = part.q_norm
    model = Residual(part)
    found = find_symmetries(model, inputs())
    assert exchanged(found) == ()
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_exchanges_of_two_layers_are_two_claims() -> None:
    counts: Mapping[str, int] = Counter(
        p.module for p in find_symmetries(Residual(Normed(), Normed()), inputs()).pairs if p.kind == "qk_norm"
    )
    assert counts == {"parts.0": 1, "parts.1": 1}


def test_long_chains_of_ties_are_one_group_and_quick() -> None:
    """What hangs together entry by entry, from the far end: walked over again for each entry it would take minutes."""
    size = 50_000
    started = time.process_time()
    (alike,) = exchange._ties([((0, i), (0, i + 1)) for i in reversed(range(size))])
    assert [len(group) for group in alike] == [size + 1]
    assert time.process_time() - started < 10


def test_weights_of_which_each_meets_most_others_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that mix everything would be gone through entry by entry, for nothing."""

    def mixed(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixing = torch.tanh(m.first @ m.second)
        return attend(torch.tanh(q @ mixing), k, v)

    taken: list[int] = []
    apart = exchange.couplings
    monkeypatch.setattr(exchange, "couplings", lambda *args: taken.append(1) or apart(*args))
    model = Residual(Projected(mixed, first=(HEAD, 40), second=(40, HEAD)))
    found = find_symmetries(model, inputs())
    assert not taken
    assert exchanged(found) == ()
    assert [u.split(":")[0] for u in found.unrecognised] == ["parts.0.qk"]


def test_norms_of_other_heads_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a norm for each head that meets its own key's alone, of all pairs of them those few are gone through."""

    class Apart(Projected):
        def __init__(self) -> None:
            super().__init__()
            self.q_norms, self.k_norms = (
                nn.ModuleList(HeadNorm((HEAD,), 0.0, bias=False, centred=False) for _ in range(4)) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (split(part(x), 4) for part in (self.q, self.k, self.v))
            q, k = (
                torch.stack([norm(t[:, i]) for i, norm in enumerate(norms)], dim=1)
                for t, norms in ((q, self.q_norms), (k, self.k_norms))
            )
            return self.o(attend(q, k, v))  # type: ignore[no-any-return]

    model, taken = Residual(Apart()), []
    before = exchange.couplings

    def count(*args: Any, **kwargs: Any) -> Couplings:
        taken.append(args)
        return before(*args, **kwargs)

    monkeypatch.setattr(exchange, "couplings", count)
    found = find_symmetries(model, inputs())
    assert exchanged(found) == (HEAD,) * 4
    assert len(taken) == 4
    assert verify(model, found, [inputs(1)], each=True).map == found


class Renamed(nn.Module):
    """A norm whose parameters have other names."""

    def __init__(self, norm: HeadNorm) -> None:
        super().__init__()
        self.gamma, self.beta = norm.weight, norm.bias
        self.offset, self.centred = norm.offset, norm.centred

    def forward(self, x: Tensor) -> Tensor:
        own = SimpleNamespace(offset=self.offset, centred=self.centred, weight=self.gamma, bias=self.beta)
        return HeadNorm.forward(own, x)  # type: ignore[arg-type]


@pytest.mark.parametrize("per", ["head", "heads"])
@pytest.mark.parametrize(("rotary", "offset"), [(half, 0.0), (None, 1.0)])
def test_norms_exchange_the_same_whatever_their_parameters_are_called(
    per: str, rotary: Callable[[Tensor], Tensor] | None, offset: float
) -> None:
    found = []
    for change in (lambda norm: norm, Renamed):
        module = Normed(per, rotary, bias=True, offset=offset)
        module.q_norm, module.k_norm = change(module.q_norm), change(module.k_norm)
        model = Residual(module)
        symmetries = find_symmetries(model, inputs())
        assert verify(model, symmetries, [inputs(1)], each=True).map == symmetries
        names = (
            n.replace("gamma", "weight").replace("beta", "bias") for s in symmetries.symmetries for n in s.parameters
        )
        found.append((exchanged(symmetries), [s.dimension for s in symmetries.symmetries], list(names)))
    assert found[0] == found[1]
    assert any(".bias" in name for name in found[0][2] if "_norm" in name)


def test_matrices_of_which_too_many_entries_meet_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys by normalised matrices: what meets in a head grows with the cube of the width."""

    class Normalised(Projected):
        def forward(self, x: Tensor) -> Tensor:
            q, k = (split(x @ nn.functional.normalize(part.weight).T, 4) for part in (self.q, self.k))
            return self.o(attend(q, k, split(self.v(x), 4)))  # type: ignore[no-any-return]

    taken = []

    def count(*args: Any) -> Couplings:
        taken.append(args)
        return Couplings((), frozenset())

    monkeypatch.setattr(exchange, "couplings", count)
    find_symmetries(Residual(Normalised(), seed=1), inputs(), cached=False)
    assert taken
    monkeypatch.setattr(exchange, "MAX_EDGES", WIDTH * WIDTH)
    taken.clear()
    find_symmetries(Residual(Normalised(), seed=1), inputs(), cached=False)
    assert not taken


def test_gains_that_attention_owns_itself_are_no_gain_and_bias() -> None:
    """Its first two parameters, of one shape, before its matrices."""

    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_gain, self.k_gain = (nn.Parameter(torch.ones(HEAD)) for _ in range(2))
            self.q, self.k, self.v, self.o = (nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (split(x @ w, 4) for w in (self.q, self.k, self.v))
            q, k = (nn.functional.normalize(y, dim=-1) * gain for y, gain in ((q, self.q_gain), (k, self.k_gain)))
            return attend(q, k, v) @ self.o

    found = find_symmetries(Residual(Raw()), inputs())
    assert exchanged(found) == (HEAD,)
