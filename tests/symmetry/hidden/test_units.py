"""Hidden units that scale, and linear maps in a row: what is found on hand-made modules, against what holds by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.hidden.units import MANY
from hf_geosharp.symmetry.verify import verify
from tests.symmetry.handmade import (
    HEAD,
    WIDTH,
    Absorbed,
    Act,
    Adapted,
    Chain,
    Experts,
    Latent,
    Mlp,
    Residual,
    finder,
    inputs,
)

UNITS = 20
ANY, POSITIVE = {"mlp GL(1)": UNITS}, {"mlp GL(1)+": UNITS}


@dataclass(frozen=True)
class Case:
    """A module, and its symmetries outside attention: "kind group" -> copies."""

    module: Callable[[], nn.Module]
    found: Mapping[str, int]


def _squared(x: Tensor) -> Tensor:
    return functional.relu(x) ** 2


def _quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


GATES: dict[str, Act] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "tanh gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "quick gelu": _quick,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "squared relu": _squared,
    "softplus": functional.softplus,
}

CURVED: dict[str, Act] = {
    **{n: a for n, a in GATES.items() if n != "squared relu"}, "relu6": functional.relu6, "cosine": torch.cos
}  # fmt: skip
"""Activations of an MLP without a gate that leave nothing."""


def _norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def _length(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def _clamp(x: Tensor) -> Tensor:
    return x.clamp(-0.2, 0.2)


class Shifted(Mlp):
    """The linear half is taken plus one, as some gated MLPs do."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.gate is not None
        return self.down(self.act(self.gate(x)) * (self.up(x) + 1))  # type: ignore[no-any-return]


class ReadTwice(Mlp):
    """What the second map reads is read by something else too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(x))
        return self.down(y) + torch.tanh(y).sum(-1, keepdim=True)  # type: ignore[no-any-return]


class TwoReaders(Mlp):
    """Two maps read the units."""

    def __init__(self, act: Act) -> None:
        super().__init__(act)
        self.other = nn.Linear(UNITS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(x))
        return self.down(y) + torch.tanh(self.other(y))  # type: ignore[no-any-return]


class Beside(nn.Module):
    """A gated MLP whose first map computes something else, too, which comes before or after."""

    def __init__(self, act: Act, *, first: bool) -> None:
        super().__init__()
        self.act, self.first = act, first
        self.all, self.down = nn.Linear(WIDTH, 2 * UNITS + 7), nn.Linear(UNITS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.all(x)
        other, gate, up = y.split([7, UNITS, UNITS], -1) if self.first else reversed(y.split([UNITS, UNITS, 7], -1))
        return self.down(self.act(gate) * up) + torch.cos(other).sum(-1, keepdim=True)  # type: ignore[no-any-return]


class Parted(nn.Module):
    """A map of low rank and something else in one map: the second factor reads a part of what it wrote."""

    def __init__(self, *, first: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.first, self.scale = first, scale
        self.all, self.down = nn.Linear(WIDTH, 5 + 9), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.all(x).split([5, 9] if self.first else [9, 5], -1)
        low, other = parts if self.first else reversed(parts)
        return functional.softplus(self.down(self.scale * low)) + torch.cos(other).sum(-1, keepdim=True)


class Blocks(nn.Module):
    """Three maps in a row, the one in the middle a matrix for each of three parts; ``bend`` acts before it."""

    def __init__(self, act: Act = lambda x: x, size: int = 4, *, matrices: bool = False) -> None:
        super().__init__()
        self.act, self.matrices = act, matrices
        self.up, self.down = nn.Linear(WIDTH, 3 * 4), nn.Linear(3 * size, WIDTH)
        self.blocks = nn.Parameter(torch.zeros(3, 4, size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(x).unflatten(-1, (3, 4)))
        if self.matrices:
            y = (y.transpose(1, 2) @ self.blocks).transpose(1, 2)
        else:
            y = torch.einsum("btgi,gij->btgj", y, self.blocks)
        return self.down(y.flatten(2))  # type: ignore[no-any-return]


class Skipping(Mlp):
    """The units are added to before they are read."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)) + x[..., :UNITS])  # type: ignore[no-any-return]


class Bent(nn.Module):
    """Two linear maps with a mixing of units between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).roll(1, -1))  # type: ignore[no-any-return]


CASES: dict[str, Case] = {
    **{f"gated by {n}": Case(lambda a=a: Mlp(a, gated=True), ANY) for n, a in GATES.items() if a is not _squared},
    "gated by squared relu": Case(lambda: Mlp(_squared, gated=True), {**ANY, "mlp s^-2": UNITS}),
    **{f"{n} without a gate": Case(lambda a=a: Mlp(a), {}) for n, a in CURVED.items()},
    "gated, no biases": Case(lambda: Mlp(functional.silu, gated=True, bias=False), ANY),
    "relu": Case(lambda: Mlp(functional.relu), POSITIVE),
    "squared relu": Case(lambda: Mlp(_squared), {"mlp s^-2": UNITS}),
    "squared relu, then clamped": Case(lambda: Mlp(_squared, middle=_clamp), {}),
    "relu, no biases": Case(lambda: Mlp(functional.relu, bias=False), POSITIVE),
    "relu with a slope": Case(lambda: Mlp(functional.leaky_relu), POSITIVE),
    "relu, dropout before the second map": Case(lambda: Mlp(functional.relu, middle=nn.Dropout(0.5)), POSITIVE),
    "few units, relu": Case(lambda: Mlp(functional.relu, units=4), {"mlp GL(1)+": 4}),
    "one unit, relu": Case(lambda: Mlp(functional.relu, units=1), {"mlp GL(1)+": 1}),
    "one unit, gated": Case(lambda: Mlp(functional.silu, gated=True, units=1), {"mlp GL(1)": 1}),
    "gated by relu": Case(lambda: Mlp(functional.relu, gated=True), {**ANY, **POSITIVE}),
    "gated by nothing": Case(lambda: Mlp(lambda x: x, gated=True), {"mlp GL(1)": 2 * UNITS}),
    "fused, gate first": Case(lambda: Mlp(functional.silu, fused="gate first"), ANY),
    "fused, gate second": Case(lambda: Mlp(functional.silu, fused="gate second"), ANY),
    "fused, gate even": Case(lambda: Mlp(functional.silu, fused="gate even"), ANY),
    "fused, gate odd": Case(lambda: Mlp(functional.silu, fused="gate odd"), ANY),
    **{
        f"fused, gated by relu, gate {place}": Case(
            lambda place=place: Mlp(functional.relu, fused=f"gate {place}"), {**ANY, **POSITIVE}
        )
        for place in ("first", "second", "even", "odd")
    },
    "fused, gated by squared relu": Case(lambda: Mlp(_squared, fused="gate first"), {**ANY, "mlp s^-2": UNITS}),
    "fused with something before": Case(lambda: Beside(functional.silu, first=True), ANY),
    "fused with something after": Case(lambda: Beside(functional.silu, first=False), ANY),
    "fused with something before, gated by relu": Case(
        lambda: Beside(functional.relu, first=True), {**ANY, **POSITIVE}
    ),
    "gated, then clamped": Case(lambda: Mlp(functional.silu, gated=True, middle=_clamp), {}),
    "gated, then a layer norm": Case(lambda: Mlp(functional.silu, gated=True, middle=_norm), {}),
    "gated, then a length": Case(lambda: Mlp(functional.silu, gated=True, middle=_length), {}),
    "relu, then a length": Case(lambda: Mlp(functional.relu, middle=_length), {}),
    "linear half plus one": Case(lambda: Shifted(functional.silu, gated=True), {}),
    "units read by something else too": Case(lambda: ReadTwice(functional.relu), {}),
    "units read by two maps": Case(lambda: TwoReaders(functional.relu), POSITIVE),
    "units added to": Case(lambda: Skipping(functional.relu), {}),
    "units that change places": Case(Bent, {}),
    "experts": Case(Experts, {"mlp GL(1)": 3 * UNITS}),
    "experts of which one is not visited": Case(lambda: Experts((0, 2)), {"mlp GL(1)": 2 * UNITS}),
    "two maps in a row": Case(lambda: Chain(lambda x: x, 6), {"lora GL(6)": 1}),
    "two maps in a row, scaled": Case(lambda: Chain(lambda x: -0.5 * x, 6), {"lora GL(6)": 1}),
    "a part of one map, and another in a row": Case(lambda: Parted(first=True), {"lora GL(5)": 1}),
    "the last part of one map, scaled": Case(lambda: Parted(first=False, scale=0.5), {"lora GL(5)": 1}),
    "a matrix for each part between two maps": Case(Blocks, {"lora GL(4)": 6}),
    "a matrix for each part between two maps, multiplied": Case(lambda: Blocks(matrices=True), {"lora GL(4)": 6}),
    "a matrix for each part that writes less than it reads": Case(
        lambda: Blocks(size=3), {"lora GL(3)": 3, "mlp GL(1)": 12}
    ),
    "a matrix for each part that is bent": Case(lambda: Blocks(torch.tanh), {"lora GL(4)": 3}),
    "a matrix for each part that is normalised": Case(lambda: Blocks(_norm), {"lora GL(4)": 3}),
    "matrices of keys and values on the other side of a latent": Case(Absorbed, {"lora GL(6)": 8}),
    "matrices of keys and values on the other side of a latent, multiplied": Case(
        lambda: Absorbed(matrices=True), {"lora GL(6)": 8}
    ),
    "an adapter": Case(Adapted, {"lora GL(4)": 1}),
    "an adapter with a norm inside": Case(lambda: Adapted(act=_norm), {}),
    "an adapter with a clamp inside": Case(lambda: Adapted(act=_clamp), {}),
    "an adapter with a relu inside": Case(lambda: Adapted(act=torch.relu), {"mlp GL(1)+": 4}),
    "an adapter of rank one": Case(lambda: Adapted(1), {"lora GL(1)": 1}),
    "a latent that keys and values read": Case(Latent, {"lora GL(8)": 1}),
    "a latent with a norm": Case(lambda: Latent(norm=True), {}),
    "three maps with relus": Case(lambda: Chain(torch.relu, 20, 18), {"mlp GL(1)+": 38}),
    "one map": Case(lambda: nn.Linear(WIDTH, WIDTH), {}),
}
each_case = pytest.mark.parametrize("name", CASES)
find = finder(CASES)


def outside(found: SymmetryMap) -> dict[str, int]:
    """ "kind group" -> copies, attention left out."""
    out: dict[str, int] = {}
    for p in found.pairs:
        if p.kind not in ("qk", "vo"):
            key = f"{p.kind} {p.group.name}"
            out[key] = out.get(key, 0) + p.copies
    for s in found.scales:
        key = f"{s.kind} s^-{s.power}"
        out[key] = out.get(key, 0) + s.copies
    return out


@each_case
def test_units_and_chains_are_those_worked_out_by_hand(name: str) -> None:
    assert outside(find(name)[1]) == CASES[name].found


@each_case
def test_every_claim_holds_on_the_model_and_its_control_does_not(name: str) -> None:
    model, found = find(name)
    proof = verify(model, found, [inputs(1), inputs(2)], condition=100.0, each=True, seed=4)
    assert proof.map == found
    assert all((c.deviation or 0.0) < 1e-12 and (c.control or 0.0) > 1e-4 for c in proof.claims)


@pytest.mark.parametrize("name", ["squared relu", "gated by squared relu"])
def test_what_scales_unevenly_comes_back_where_it_was(name: str) -> None:
    model, found = find(name)
    moved = copy.deepcopy(model)
    element = found.random_element(moved, 3, 100.0)
    found.apply(moved, element)
    first = found.scales[0].parameters[0]
    assert not torch.allclose(moved.get_parameter(first), model.get_parameter(first))
    found.apply(moved, found.inverse(element), back=True)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(moved.state_dict()[key], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("units", [1, 2, 3])
def test_however_few_the_units_of_a_relu_are_their_sign_is_not_claimed(units: int, seed: int) -> None:
    """A random element of few numbers may be positive throughout, under which a ReLU looks as if any sign would do."""
    found = find_symmetries(Residual(Mlp(functional.relu, units=units), seed=seed), inputs(seed))
    assert outside(found) == {"mlp GL(1)+": units}


def test_units_of_a_stream_that_many_maps_read_are_found_in_every_layer() -> None:
    layers = MANY // 2 + 8
    found = find_symmetries(Residual(*(Mlp(torch.relu) for _ in range(layers))), inputs())
    assert [p.module for p in found.pairs if p.kind == "mlp"] == [f"parts.{n}" for n in range(layers)]


def test_the_factors_of_gated_units_are_their_rows_and_columns() -> None:
    model, found = find("gated by silu")
    weights = {n: p.detach() for n, p in model.named_parameters()}
    (pair,) = found.pairs
    g, h = pair.factors(weights)
    rows = torch.cat([weights["parts.0.up.weight"], weights["parts.0.up.bias"][:, None]], dim=1)
    assert torch.equal(g.squeeze(-1), rows)
    assert torch.equal(h.squeeze(-1), weights["parts.0.down.weight"].T)


@pytest.mark.parametrize(
    ("fused", "rows"),
    [
        ("gate first", slice(UNITS, None)),
        ("gate second", slice(None, UNITS)),
        ("gate even", slice(1, None, 2)),
        ("gate odd", slice(None, None, 2)),
    ],
)
def test_the_linear_half_of_a_fused_projection_is_told_from_its_gate(fused: str, rows: slice) -> None:
    model, found = find(f"fused, {fused}")
    weights = {n: p.detach() for n, p in model.named_parameters()}
    (pair,) = found.pairs
    assert torch.equal(pair.factors(weights)[0].squeeze(-1)[:, :-1], weights["parts.0.up.weight"][rows])


def test_the_factors_of_an_adapter_are_its_two_maps() -> None:
    model, found = find("an adapter")
    weights = {n: p.detach() for n, p in model.named_parameters()}
    (pair,) = found.pairs
    g, h = pair.factors(weights)
    assert torch.equal(g[0].mT, weights["parts.0.a.weight"])
    assert torch.equal(h[0], weights["parts.0.b.weight"])


@pytest.mark.parametrize("matrices", [False, True])
def test_what_is_absorbed_has_the_symmetries_of_what_is_not(matrices: bool) -> None:
    """Keys and values that are computed, and those that are not, give one function of the same weights."""
    naive, absorbed = Residual(Latent(norm=True)), Residual(Absorbed(matrices=matrices))
    absorbed.load_state_dict(naive.state_dict())
    batch = inputs(1)
    torch.testing.assert_close(absorbed(**batch), naive(**batch), rtol=0, atol=1e-12)
    found, other = find_symmetries(naive, inputs()), find_symmetries(absorbed, inputs())
    heads = {(p.group.name, p.copies) for p in found.pairs}
    assert heads == {(p.group.name, p.copies) for p in other.pairs} == {(f"GL({HEAD})", 4)}
    assert len(found.pairs) == len(other.pairs) == 2
    # Moving one along the orbit of the other leaves both as they are.
    element = other.random_element(absorbed, seed=3, condition=100.0)
    with torch.no_grad():
        base = naive(**batch)
        other.apply(absorbed, element)
        naive.load_state_dict(absorbed.state_dict())
        assert float((naive(**batch) - base).norm() / base.norm()) < 1e-11


def test_units_of_a_token_mask_that_hides_everything_are_not_claimed_by_accident() -> None:
    """Nothing reaches the output: the control is silent, so that nothing may be concluded."""

    class Hidden(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return 0 * super().forward(x)

    assert outside(find_symmetries(Residual(Hidden(functional.gelu)), inputs())) == {}


@pytest.mark.parametrize("preset", ["attention", "paper"])
def test_presets_of_attention_leave_units_and_chains_out(preset: str) -> None:
    assert find_symmetries(find("an adapter")[0], inputs(), preset=preset) == SymmetryMap()
    assert find_symmetries(find("gated by silu")[0], inputs(), preset=preset) == SymmetryMap()


def test_fresh_weights_and_zero_biases_do_not_make_a_curved_unit_look_straight() -> None:
    for scale in (1.0, 1e-3):
        torch.manual_seed(0)
        model = Residual(Mlp(functional.gelu))
        with torch.no_grad():
            for p in model.parameters():
                p.zero_() if p.ndim == 1 else p.normal_(0, 0.02 * scale)
        assert outside(find_symmetries(model, inputs())) == {}


# ------------------------------------------------------------------------------------ pairs with entries in common


@pytest.mark.parametrize(
    "name",
    ["three maps with relus", "gated by relu", "gated by nothing", "a latent that keys and values read", "an adapter"],
)
def test_pairs_that_share_entries_are_parted_before_a_score_sees_them(name: str) -> None:
    model, found = find(name)
    parted, lost = found.separated()
    assert set(lost) <= {p.name for p in found.pairs} - {p.name for p in parted.pairs}
    counts = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for p in parted.pairs:
        for v in (*p.g, *p.h):
            v.of(counts[v.parameter]).add_(1)
    assert all(float(c.max()) <= 1 for c in counts.values())


class Clamped(nn.Module):
    """A gated MLP whose linear half is cut off where the inputs that it is found with do not reach."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(self.gate(x)) * self.up(x).clamp(-self.limit, self.limit)
        return x + self.down(hidden)


@pytest.mark.parametrize(("limit", "found"), [(math.inf, 1), (20.0, 0)])
def test_a_limit_that_these_inputs_do_not_reach_is_seen(limit: float, found: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Clamped(limit)).double()
    batch = {"input": torch.randn(3, 8, dtype=torch.float64)}
    assert len([p for p in find_symmetries(model, batch).pairs if p.kind == "mlp"]) == found


class Hard(nn.Module):
    """Behind a function whose derivative torch cannot differentiate again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.hardsigmoid(self.up(x)))


def test_a_function_that_is_differentiable_once_has_no_units() -> None:
    found = find_symmetries(nn.Sequential(Hard()).double(), {"input": torch.randn(3, 8, dtype=torch.float64)})
    assert not found.pairs
