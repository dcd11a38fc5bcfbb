"""What passes cache in plain attributes: never used at other weights, put back afterwards; it hides no parameters.

Oracles are the same modules written without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import tiny
from hf_geosharp import inspect, score
from hf_geosharp.carried import Carried, emptied
from hf_geosharp.errors import GeosharpWarning
from hf_geosharp.evaluating import evaluating
from hf_geosharp.sharpness.result import SharpnessResult
from hf_geosharp.symmetry.find import find_symmetries
from hf_geosharp.symmetry.verify import verify
from tests.sharpness.tiny import bert, bert_batches

WIDTH, TOKENS = 12, 5


class Plain(nn.Module):
    """Attention of one head over inputs to which projected positions are added; no cache."""

    def __init__(self, *, detached: bool = False) -> None:
        super().__init__()
        self.detached = detached
        self.positions = nn.Parameter(torch.zeros(9, WIDTH))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def projected(self, tokens: int) -> Tensor:
        found: Tensor = self.project(self.positions[:tokens])
        return found.detach() if self.detached else found

    def kept(self, tokens: int) -> Tensor:
        return self.projected(tokens)

    def keys(self, x: Tensor) -> Tensor:
        found: Tensor = self.k(x)
        return found

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x + self.kept(x.shape[1])
        weights = (self.q(x) @ self.keys(x).mT / WIDTH**0.5).softmax(-1)
        logits = self.head(x + self.o(weights @ self.v(x))).mean(1)
        return {"logits": logits, "loss": logits.square().mean()}


class InDict(Plain):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.cache: dict[int, Tensor] = {}

    def kept(self, tokens: int) -> Tensor:
        if tokens not in self.cache:
            self.cache[tokens] = self.projected(tokens)
        return self.cache[tokens]


class Nested(Plain):
    """Pairs in a dictionary in a dictionary."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.caches: dict[str, dict[int, tuple[int, Tensor]]] = {"positions": {}}

    def kept(self, tokens: int) -> Tensor:
        cache = self.caches.setdefault("positions", {})
        if tokens not in cache:
            cache[tokens] = tokens, self.projected(tokens)
        return cache[tokens][1]


class WhenAbsent(Plain):
    def kept(self, tokens: int) -> Tensor:
        if not hasattr(self, "table"):
            self.table = self.projected(tokens)
        return self.table


class WhenNone(Plain):
    """With the length that it is of, as rotary tables have it."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.table: Tensor | None = None
        self.length = 0

    def kept(self, tokens: int) -> Tensor:
        if self.table is None or tokens > self.length:
            self.table, self.length = self.projected(tokens), tokens
        return self.table[:tokens]


class InList(Plain):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.tables: list[Tensor] = []

    def kept(self, tokens: int) -> Tensor:
        if not self.tables:
            self.tables.append(self.projected(tokens))
        return self.tables[0]


class InPlace(Plain):
    """A table that is there from the start, with a flag that says whether something is in it."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.table, self.full = torch.zeros(9, WIDTH, dtype=torch.float64), False

    def kept(self, tokens: int) -> Tensor:
        if not self.full:
            self.table[:tokens] = self.projected(tokens).detach()
            self.full = True
        return self.table[:tokens]


class AsBuffer(Plain):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.register_buffer("table", None, persistent=False)

    def kept(self, tokens: int) -> Tensor:
        if self.table is None:
            self.table = self.projected(tokens)
        return self.table


class Keys(Plain):
    """Keys are written into a table of fixed size and read from there, as code for inference does."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.table = torch.zeros(6, 9, WIDTH, dtype=torch.float64)

    def keys(self, x: Tensor) -> Tensor:
        self.table[: x.shape[0], : x.shape[1]] = self.k(x)
        return self.table[: x.shape[0], : x.shape[1]]


class KeysInBuffer(Keys):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        table = self.__dict__.pop("table")
        self.register_buffer("table", table, persistent=False)


CACHES = [InDict, Nested, WhenAbsent, WhenNone, InList, AsBuffer]


def made(kind: Callable[..., Plain], **how: Any) -> Plain:
    """With random weights in float64, the same for all kinds."""
    model = kind(**how).double()
    tiny.randomise(model, 0)
    return model.eval()


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, TOKENS, WIDTH, dtype=torch.float64, generator=draw)} for _ in range(2)]


def scored(model: nn.Module, **changes: Any) -> SharpnessResult:
    return score(model, batches(), **{"steps": 4, "rho": 0.05, **changes})


def attributes(model: nn.Module) -> dict[str, Any]:
    """What the modules have in plain attributes; tensors by identity, contents of containers as copies."""
    torch_s = set(nn.Module().__dict__)
    own = {f"{n}.{k}": v for n, m in model.named_modules() for k, v in m.__dict__.items() if k not in torch_s}
    return {k: (id(v), contents(v)) for k, v in own.items()} | {"buffers": [n for n, _ in model.named_buffers()]}


def contents(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: (id(v), contents(v)) for k, v in value.items()}
    return [id(v) for v in value] if isinstance(value, list) else None


def used(model: nn.Module) -> None:
    """As somebody's own evaluation leaves it."""
    with torch.no_grad():
        model(**batches()[0])


# ----------------------------------------------------------------------------------------------------------- the score


@pytest.mark.parametrize("options", [{}, {"micro_batch": 3}, {"metric": "adaptive", "ascent": "apgd"}], ids=str)
@pytest.mark.parametrize("kind", [*CACHES, Keys, KeysInBuffer])
def test_a_cache_changes_no_score(kind: type[Plain], options: dict[str, Any]) -> None:
    expected, found = scored(made(Plain), **options), scored(made(kind), **options)
    assert found.geodesic_sharpness == expected.geodesic_sharpness
    assert found.base_loss == expected.base_loss
    assert found.share == expected.share
    assert found.pairs == expected.pairs


@pytest.mark.parametrize("kind", [k for k in CACHES if k is not AsBuffer])
def test_a_cache_that_the_user_has_filled_hides_no_parameters(kind: type[Plain]) -> None:
    model = made(kind)
    used(model)
    before = attributes(model)
    found = scored(model)
    assert found.geodesic_sharpness == scored(made(Plain)).geodesic_sharpness
    assert found.share["project.weight"] > 0
    assert attributes(model) == before


@pytest.mark.parametrize("kind", [*CACHES, InPlace])
def test_a_cache_without_gradients_is_of_the_weights_of_its_pass(kind: type[Plain]) -> None:
    """Values of what is detached count, though no perturbation is made of them, and that is told."""
    with pytest.warns(GeosharpWarning, match=r"the loss depends on parameters in which it has no gradient"):
        expected = scored(made(Plain, detached=True))
    with pytest.warns(GeosharpWarning, match=r"the loss depends on parameters in which it has no gradient"):
        found = scored(made(kind, detached=True))
    assert found.geodesic_sharpness == expected.geodesic_sharpness
    assert found.base_loss == expected.base_loss


# ---------------------------------------------------------------------------------------------------- what is left over


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("kind", [*CACHES, InPlace, Keys, KeysInBuffer])
def test_nothing_is_left_behind(kind: type[Plain], filled: bool) -> None:
    stages: dict[str, Callable[[nn.Module], Any]] = {
        "find": lambda m: find_symmetries(m, batches()[0], cached=False),
        "verify": lambda m: verify(m, find_symmetries(made(Plain), batches()[0], cached=False), batches(), each=True),
        "inspect": lambda m: inspect(m, batches(), cached=False),
        "score": lambda m: scored(m),
    }
    for stage, run in stages.items():
        model = made(kind)
        if filled:
            used(model)
        before = attributes(model)
        table = getattr(model, "table", None)
        values = None if table is None else table.clone()
        run(model)
        assert attributes(model) == before, stage
        assert values is None or torch.equal(model.table, values), stage
        with torch.no_grad():
            assert torch.equal(model(**batches()[1])["loss"], made(Plain)(**batches()[1])["loss"]), stage


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", [InDict, WhenAbsent, WhenNone])
def test_nothing_is_left_behind_when_a_pass_fails(kind: type[Plain], error: type[BaseException]) -> None:
    for at in (1, 2, 5, 30):
        model, calls = made(kind), [0]

        def stop(*_: Any, calls: list[int] = calls, at: int = at) -> None:
            calls[0] += 1
            if calls[0] == at:
                raise error("stop")

        model.head.register_forward_hook(stop)
        before = attributes(model)
        # What twins raise counts as a claim that could not be tried.
        with pytest.raises(error, match="stop") if error is KeyboardInterrupt else suppress(error):
            scored(model)
        assert calls[0] >= at
        assert attributes(model) == before


@pytest.mark.parametrize("kind", [Keys, KeysInBuffer])
def test_the_graph_of_a_pass_of_the_users_is_left_out_and_stays(kind: type[Plain]) -> None:
    """A part of the table is written anew; the rest would be differentiated through weights that are others by now."""
    model = made(kind)
    model(**{k: v[:, :3] for k, v in batches()[0].items()})
    table, graph, values = model.table, model.table.grad_fn, model.table.detach().clone()
    assert graph is not None
    assert inspect(model, batches(), cached=False).sites == inspect(made(Plain), batches(), cached=False).sites
    assert scored(model).geodesic_sharpness == scored(made(Plain)).geodesic_sharpness
    assert model.table is table
    assert table.grad_fn is graph
    assert torch.equal(table, values)


def test_maps_are_those_of_the_model_without_a_cache() -> None:
    expected = find_symmetries(made(Plain), batches()[0], cached=False)
    assert {p.kind for p in expected.pairs} == {"qk", "vo"}
    for kind in (*CACHES, Keys, KeysInBuffer):
        assert find_symmetries(made(kind), batches()[0], cached=False) == expected


# --------------------------------------------------------------------------------------------------- what is no cache


class WithConstants(Plain):
    """Tensors in plain attributes that its passes do not make, and one that its first data set."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.shift = torch.full((WIDTH,), 0.5, dtype=torch.float64)
        self.shifts = {"twice": 2 * self.shift}
        self.spread: Tensor | None = None
        self.passes = 0

    def kept(self, tokens: int) -> Tensor:
        self.passes += 1
        return self.projected(tokens) + self.shift + self.shifts["twice"]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.spread is None:
            self.spread = x.detach().std()
        return super().forward(x / self.spread)


def test_constants_and_what_the_first_data_set_are_no_caches() -> None:
    model = made(WithConstants)
    used(model)
    before = attributes(model)

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [model(batches()[1]["x"])["logits"]]

    with emptied(model, run) as odd:
        assert {k: v for k, v in attributes(model).items() if k != ".passes"} == {
            k: v for k, v in before.items() if k != ".passes"
        }
    assert odd == ["WithConstants.spread"]
    with torch.no_grad():
        base = float(torch.stack([model(**b)["loss"] for b in batches()]).mean())
    with pytest.warns(
        GeosharpWarning, match=r"WithConstants\.spread holds tensors that a forward pass would compute anew"
    ):
        assert scored(model, metric="adaptive").base_loss == pytest.approx(base, rel=1e-14)


def test_a_model_without_such_attributes_is_not_run() -> None:
    def run() -> list[Tensor]:
        raise AssertionError("it was run")

    with emptied(made(Plain), run) as odd:
        assert odd == []


def test_counters_go_on_counting() -> None:
    model = made(Plain)
    model.passes = 0
    carried = Carried(model)
    model.passes = 3
    carried.put_back(whole=True)
    assert model.passes == 3
    model.table = torch.zeros(1)
    carried.put_back()
    assert model.passes == 0
    assert not hasattr(model, "table")


def test_the_memory_of_parameters_is_left_alone() -> None:
    model = made(Plain)
    model.alias = model.head.weight.detach()
    carried = Carried(model)
    with torch.no_grad():
        model.head.weight.zero_()
    carried.put_back(whole=True)
    assert not model.head.weight.any()


# -------------------------------------------------------------------------------------------------------------- levit


def levit(dtype: torch.dtype) -> nn.Module:
    """It keeps the biases of its attention in evaluation mode, by device."""
    from transformers import LevitConfig, LevitForImageClassification

    config = LevitConfig(
        image_size=32, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8],
        kernel_size=3, num_labels=3,
    )  # fmt: skip
    config.down_ops = [["Subsample", 8, 2, 4, 2, 2]] * 2
    model = LevitForImageClassification(config).double()
    tiny.randomise(model, 0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_var.fill_(1.0)
    return model.to(dtype).eval()


def images(dtype: torch.dtype) -> dict[str, Tensor]:
    pixels = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pixels.to(dtype), "labels": torch.tensor([0, 1, 2, 0])}


@pytest.mark.filterwarnings("ignore::hf_geosharp.errors.GeosharpWarning")
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_levit_is_scored_as_if_it_had_no_cache(
    dtype: torch.dtype, filled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.levit import modeling_levit

    batch, model = images(dtype), levit(dtype)
    if filled:
        with torch.no_grad():
            model(**batch)
    before = attributes(model)
    found = score(model, [batch], steps=3, rho=0.05)
    assert attributes(model) == before
    find_symmetries(model, batch, cached=False)
    assert attributes(model) == before
    for kind in (modeling_levit.LevitAttention, modeling_levit.LevitAttentionSubsample):
        monkeypatch.setattr(
            kind, "get_attention_biases", lambda self, _: self.attention_biases[:, self.attention_bias_idxs]
        )
    expected = score(levit(dtype), [batch], steps=3, rho=0.05)
    assert found.geodesic_sharpness == expected.geodesic_sharpness
    assert found.share == expected.share
    assert sum(v for k, v in found.share.items() if "attention_biases" in k) > 0


class SetsUp(nn.Module):
    """Registers a hook in its first pass, and notes that, as transformers does to record hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "installed", False):
            self.map.register_forward_hook(self._see)
            self.installed = True
        return self.map(x)

    def _see(self, *_: object) -> None:
        self.seen += 1


def test_what_a_first_pass_sets_up_is_not_set_up_again() -> None:
    model, x = SetsUp(), torch.ones(2, 3)
    with evaluating(model):
        carried = Carried(model)
        for _ in range(3):
            model(x)
            carried.put_back()
    model(x)
    assert model.seen == 4
    assert len(model.map._forward_hooks) == 1


def test_hidden_states_are_recorded_once_after_a_score() -> None:
    model, batches = bert(), bert_batches(1)
    model.config.output_hidden_states = True
    score(model, batches, steps=2, reproducibility=False)
    assert len(model(**batches[0]).hidden_states) == model.config.num_hidden_layers + 1
