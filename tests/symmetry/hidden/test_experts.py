"""Experts that get no token: claimed where what holds for one that does is proved on them too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import tiny
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.fold import Gain
from hf_geosharp.symmetry.inputs import synthetic
from hf_geosharp.symmetry.verify import verify
from tests.families import randomise
from tests.symmetry.handmade import WIDTH, Act, Mlp, Norm, Residual, inputs

UNITS, COUNT = 20, 4


class Routed(nn.Module):
    """Experts in 3-D parameters; those whose numbers are in ``chosen`` get a token.

    ``limited`` cuts one off; ``bent`` bends what it reads; with ``own`` they choose by themselves.
    """

    def __init__(self, limited: int | None = None, bent: int | None = None, own: Sequence[int] = ()) -> None:
        super().__init__()
        self.limited, self.bent, self.own = limited, bent, own
        self.gate_up = nn.Parameter(torch.zeros(COUNT, 2 * UNITS, WIDTH))
        self.down = nn.Parameter(torch.zeros(COUNT, WIDTH, UNITS))
        self.act = nn.SiLU()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        if self.own:
            chosen = torch.tensor(self.own)[torch.arange(len(x)) % len(self.own)]
        for e in chosen.unique().tolist():
            rows = chosen == e
            y = torch.tanh(x[rows]) if e == self.bent else x[rows]
            gate, up = functional.linear(y, self.gate_up[e]).chunk(2, dim=-1)
            up = up.clamp(-1e-3, 1e-3) if e == self.limited else up
            out[rows] = functional.linear(self.act(gate) * up, self.down[e])
        return out


class Fused(nn.Module):
    """Sends every token to one of the experts numbered ``visited``."""

    def __init__(
        self, visited: Sequence[int], limited: int | None = None, *, bent: int | None = None, own: bool = False
    ) -> None:
        super().__init__()
        self.visited = visited
        self.experts = Routed(limited, bent, visited if own else ())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen = torch.tensor(self.visited)[torch.arange(len(flat)) % len(self.visited)]
        return self.experts(flat, chosen).unflatten(0, x.shape[:2])  # type: ignore[no-any-return]


class Apart(nn.Module):
    """Experts that are modules; only those numbered ``visited`` are called."""

    def __init__(self, visited: Sequence[int], acts: Sequence[Act]) -> None:
        super().__init__()
        self.visited = visited
        self.experts = nn.ModuleList(Mlp(act) for act in acts)

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.experts[e](x) for e in self.visited)  # type: ignore[return-value]


def counted(found: SymmetryMap) -> int:
    return sum(p.copies for p in found.pairs if p.kind == "mlp")


def test_experts_in_one_parameter_are_claimed_whether_or_not_they_are_visited() -> None:
    model = Residual(Fused((1, 3)))
    found = find_symmetries(model, inputs())
    assert counted(found) == COUNT * UNITS
    starts = {(v.parameter.rsplit(".", 1)[-1], v.start[0]) for p in found.pairs for v in (*p.g, *p.h)}
    assert starts == {(name, e) for name in ("gate_up", "down") for e in range(COUNT)}


def test_what_is_claimed_of_them_holds_where_they_are_visited() -> None:
    model = Residual(Fused((1, 3)))
    found = find_symmetries(model, inputs())
    model.parts[0].visited = range(COUNT)
    proof = verify(model, found, [inputs(1)], each=True)
    assert proof.map == found
    assert {c.status for c in proof.claims} == {"holds"}


def test_moving_those_that_are_not_visited_moves_nothing() -> None:
    model = Residual(Fused((1, 3)))
    found = find_symmetries(model, inputs())
    assert verify(model, found, [inputs(1)], each=True).map == found
    idle = found.without({p.name: "" for p in found.pairs if p.g[0].start[0] in (1, 3)})
    assert counted(idle) == 2 * UNITS
    assert {c.status for c in verify(model, idle, [inputs(1)], each=True).claims} == {"dead"}


def test_an_expert_that_computes_something_else_is_not_claimed() -> None:
    found = find_symmetries(Residual(Fused((1, 3), limited=2)), inputs())
    assert {v.start[0] for p in found.pairs for v in p.g} == {0, 1, 3}


def test_a_later_layer_is_tried_by_itself() -> None:
    model = Residual(Fused((1, 3)), Fused((1, 3), limited=2))
    found = find_symmetries(model, inputs())
    claimed = {(p.module, v.start[0]) for p in found.pairs for v in p.g}
    assert claimed == {("parts.0.experts", e) for e in range(COUNT)} | {("parts.1.experts", e) for e in (0, 1, 3)}


@pytest.mark.parametrize(
    ("acts", "claimed"),
    [
        ([functional.relu] * 3, 3),
        ([functional.relu, functional.gelu, functional.relu], 2),  # one of the two that are not called is another
        ([functional.gelu, functional.relu, functional.relu], 0),  # and here the one that is
    ],
)
def test_modules_beside_a_visited_one_are_claimed_if_they_are_made_alike(acts: Sequence[Act], claimed: int) -> None:
    found = find_symmetries(Residual(Apart((0,), acts)), inputs())
    assert counted(found) == claimed * UNITS


def test_another_buffer_is_another_expert() -> None:
    model = Residual(Apart((0,), [functional.relu] * 2))
    for k, expert in enumerate(model.parts[0].experts):
        expert.register_buffer("scale", torch.full((1,), float(k)))
    assert counted(find_symmetries(model, inputs())) == UNITS


class Before(nn.Module):
    """A norm that the experts read."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = Norm(bias=True), experts

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x))  # type: ignore[no-any-return]


def gain_readers(model: nn.Module) -> list[tuple[str, ...]]:
    """Of each gain that is claimed, before the proof on the model, who reads it."""
    found = find_symmetries(model, inputs(), prove=False)
    return [
        tuple(r.weight.removeprefix("parts.0.inner.") for r in f.readers) for f in found.folds if isinstance(f, Gain)
    ]


@pytest.mark.parametrize("visited", [(1, 3), (2,), range(COUNT)])
def test_a_norm_folds_into_all_experts_of_a_parameter(visited: Sequence[int]) -> None:
    model = Residual(Before(Fused(visited)))
    assert gain_readers(model) == [("experts.gate_up",)]
    found = find_symmetries(model, inputs())
    model.parts[0].inner.visited = range(COUNT)
    proof = verify(model, found, [inputs(1)], each=True)
    assert proof.map == found
    assert {c.status for c in proof.claims} == {"holds"}


@pytest.mark.parametrize("visited", [(1, 3), (1, 2)])
def test_a_norm_that_one_expert_bends_does_not_fold(visited: Sequence[int]) -> None:
    """Whether or not that expert is visited."""
    model = Residual(Before(Fused(visited, bent=2)))
    assert gain_readers(model) == []


def test_experts_that_the_arguments_do_not_choose_say_nothing_of_those_that_are_not_visited() -> None:
    """Whole numbers are among the arguments, but they choose nothing."""
    model = Residual(Before(Fused((1, 3), own=True)))
    assert gain_readers(model) == []
    model.parts[0].inner.experts.own = range(COUNT)
    assert gain_readers(model) == [("experts.gate_up",)]


def test_a_norm_folds_into_modules_beside_those_that_are_visited() -> None:
    model = Residual(Before(Apart((0, 2), [functional.relu] * 4)))
    (readers,) = gain_readers(model)
    assert set(readers) == {f"experts.{e}.up.weight" for e in range(4)}
    found = find_symmetries(model, inputs())
    model.parts[0].inner.visited = range(4)
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_where_one_module_alone_was_visited_nothing_says_what_the_others_read() -> None:
    assert gain_readers(Residual(Before(Apart((0,), [functional.relu] * 2)))) == []
    assert gain_readers(Residual(Before(Apart((0,), [functional.relu])))) == [("experts.0.up.weight",)]


def test_a_module_that_reads_more_than_its_first_map_ends_the_fold() -> None:
    model = Residual(Before(Apart((0, 2), [functional.relu] * 4)))
    model.parts[0].inner.experts[3].register_forward_hook(lambda module, args, output: output + torch.tanh(args[0]))
    assert gain_readers(model) == []


class Stacked(nn.Module):
    """Experts whose matrices are blocks of rows of one; those numbered ``visited`` get a token."""

    def __init__(self, visited: Sequence[int]) -> None:
        super().__init__()
        self.visited = visited
        self.up, self.down = (nn.Parameter(torch.zeros(COUNT * UNITS, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for place, e in enumerate(self.visited):
            rows = slice(e * UNITS, (e + 1) * UNITS)
            out[:, place] = torch.tanh(functional.linear(x[:, place], self.up[rows])) @ self.down[rows]
        return out


@pytest.mark.parametrize(("visited", "folds"), [((0, 1), False), ((2,), False), (range(COUNT), True)])
def test_blocks_of_a_matrix_that_were_not_used_may_read_the_norm_too(visited: Sequence[int], folds: bool) -> None:
    assert gain_readers(Residual(Before(Stacked(visited)))) == ([("up",)] if folds else [])


class Batched(nn.Module):
    """Every expert computes every token, all of them at one go."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, COUNT)
        self.up = nn.Parameter(torch.zeros(COUNT, WIDTH, 2 * UNITS))
        self.down = nn.Parameter(torch.zeros(COUNT, UNITS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        gate, up = torch.bmm(flat.expand(COUNT, -1, -1), self.up).chunk(2, dim=-1)
        out = torch.bmm(functional.silu(gate) * up, self.down)
        return (out * torch.sigmoid(self.router(flat)).T[..., None]).sum(0).unflatten(0, x.shape[:2])


def test_experts_that_are_computed_at_one_go_are_seen_one_by_one() -> None:
    model = Residual(Batched())
    found = find_symmetries(model, inputs())
    assert counted(found) == COUNT * UNITS
    assert verify(model, found, [inputs(1)], each=True).map == found


# Where all experts compute all tokens, those of others are zeros: nothing shows on few.
@pytest.mark.parametrize(
    ("type_", "tokens"),
    [("qwen2_moe", 2), ("qwen2_moe", 19), ("switch_transformers", 2), ("switch_transformers", 19), ("llama4_text", 19)],
)
def test_how_many_experts_are_claimed_does_not_depend_on_the_example(type_: str, tokens: int) -> None:
    model = tiny.build(type_, dtype=torch.float32)
    found = find_symmetries(model, synthetic(model, rows=1, tokens=tokens))
    experts = [p for p in found.pairs if p.kind == "mlp" and ".experts" in p.module]
    inside = [n.rsplit(".experts.", 1)[1] for n, _ in model.named_modules() if ".experts." in n]
    modules = sum(n.removeprefix("expert_").isdigit() for n in inside)
    stacked = sum(len(p) for n, p in model.named_parameters() if n.endswith(".experts.down_proj"))
    assert len(experts) == modules + stacked > 0


@pytest.mark.parametrize(
    "type_", ["mixtral", "deepseek_v3", "gpt_oss", "granitemoe", "switch_transformers", "jetmoe", "olmoe"]
)
def test_norms_before_experts_fold_whatever_experts_the_example_reaches(type_: str) -> None:
    """Found on three tokens, which reach some of them, and proved on many, with all weights drawn anew."""
    model = tiny.build(type_, dtype=torch.float64)
    randomise(model, 0)
    found = find_symmetries(model, synthetic(model, rows=1, tokens=3), prove=False)
    own = dict(model.named_parameters())
    read = {r.weight for f in found.folds if isinstance(f, Gain) for r in f.readers}
    ends = (".experts.gate_up_proj", ".wi.weight", ".mlp.input_linear.weight")
    before = {n for n in own if n.endswith(ends) and ("experts" in n or "input_linear" in n)}
    assert before
    assert read >= before
    proof = verify(model, found, [synthetic(model, rows=4, tokens=40)], each=True)
    assert [c.name for c in proof.claims if c.status == "failed"] == []
