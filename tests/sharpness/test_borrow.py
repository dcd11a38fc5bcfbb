"""A scored model is the model it was: bit for bit, whatever happens; and what shares memory is perturbed as one."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_geosharp import inspect, score
from hf_geosharp.errors import GeosharpWarning, UsageError
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.objective import Objective
from hf_geosharp.sharpness.result import SharpnessResult
from hf_geosharp.symmetry.find import find_symmetries
from hf_geosharp.symmetry.map import SymmetryMap
from tests.sharpness.tiny import bert, bert_batches, gpt2, gpt2_batches


def bits(tensor: Tensor) -> Tensor:
    """The whole storage behind a tensor, as bytes."""
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
    return flat.clone()


class Snapshot:
    """Everything of a model and of the random state that a score might change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.addresses = {n: p.data_ptr() for n, p in self.parameters.items()}
        self.tensors = {**self.parameters, **dict(model.named_buffers())}
        self.dtypes = {n: t.dtype for n, t in self.tensors.items()}
        self.bits = {n: bits(t) for n, t in self.tensors.items()}
        self.flags = {n: p.requires_grad for n, p in self.parameters.items()}
        self.grads = {n: p.grad for n, p in self.parameters.items()}
        self.grad_bits = {n: bits(g) for n, g in self.grads.items() if g is not None}
        self.modes = {n: m.training for n, m in model.named_modules()}
        self.random = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def check(self) -> None:
        model = self.model
        now = dict(model.named_parameters(remove_duplicate=False))
        assert list(now) == list(self.parameters)
        assert all(now[n] is p for n, p in self.parameters.items())
        assert {n: p.data_ptr() for n, p in now.items()} == self.addresses
        tensors = {**now, **dict(model.named_buffers())}
        assert {n: t.dtype for n, t in tensors.items()} == self.dtypes
        assert [n for n, t in tensors.items() if not torch.equal(bits(t), self.bits[n])] == []
        assert {n: p.requires_grad for n, p in now.items()} == self.flags
        assert all(now[n].grad is g for n, g in self.grads.items())
        assert all(torch.equal(bits(now[n].grad), g) for n, g in self.grad_bits.items())
        assert {n: m.training for n, m in model.named_modules()} == self.modes
        assert torch.equal(torch.get_rng_state(), self.random[0])
        assert random.getstate() == self.random[1]
        assert all(map(np.array_equal, np.random.get_state(), self.random[2]))


def in_use(model: Any) -> Any:
    """As in the middle of somebody's training: mixed modes, frozen parameters, gradients of their own."""
    model.train()
    modules = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    for module in modules[::2]:
        module.eval()
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 3 != 0)
        if i % 2:
            p.grad = torch.full_like(p, 0.5 + i)
    return model


def quick(model: Any, data: Any, **changes: Any) -> SharpnessResult:
    return score(model, data, **{"steps": 3, "reproducibility": False, **changes})


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mix, exact": {"metric": "mix", "geodesic": "exact"},
    "adaptive": {"metric": "adaptive"},
    "average": {"average": True, "steps": 4},
    "labels of the model": {"labels": "model"},
    "baseline": {"baselines": ["euclidean"]},
    "float64": {"dtype": "float64"},
    "reproducibility": {"reproducibility": True},
}
CASES = [(dtype, option) for dtype in ("float32", "bfloat16") for option in OPTIONS]
CASES += [(dtype, option) for dtype in ("float64", "float16") for option in ("plain", "labels of the model")]


def used(dtype: str) -> Any:
    return in_use(bert(num_hidden_layers=1).to(getattr(torch, dtype)))


@pytest.mark.filterwarnings("ignore::hf_geosharp.errors.GeosharpWarning")
@pytest.mark.parametrize(("dtype", "option"), CASES)
def test_score_leaves_the_model_as_it_was(dtype: str, option: str) -> None:
    model = used(dtype)
    before = Snapshot(model)
    quick(model, bert_batches(1), **OPTIONS[option])
    before.check()


@pytest.mark.filterwarnings("ignore::hf_geosharp.errors.GeosharpWarning")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_score_leaves_the_model_as_it_was_when_interrupted(call: int, dtype: str, error: type[BaseException]) -> None:
    model, calls = used(dtype), 0

    def loss(outputs: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            model.classifier.weight.data.add_(1)
            torch.randn(1)
            raise error("stop")
        return outputs.logits.square().mean()

    before = Snapshot(model)
    with pytest.raises(error, match="stop"):
        quick(model, bert_batches(2), loss=loss)
    before.check()


class Counting(nn.Module):
    """Writes into one buffer and replaces another whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("table", torch.ones(2))
        self.register_buffer("spread", torch.zeros(1, 1).expand(4, 3), persistent=False)
        self.register_buffer("sparse", torch.eye(3).to_sparse(), persistent=False)  # as that of Whisper's heads

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        self.table = self.table * 2
        return {"loss": self.linear(x).square().mean()}


def test_buffers_that_the_model_changes_itself_come_back() -> None:
    model = Counting()
    table = model.table
    quick(model, [{"x": torch.ones(4, 3)}], metric="adaptive")
    assert float(model.calls) == 0
    assert model.table is table
    assert table.tolist() == [1, 1]


class Drawing(nn.Module):
    """Draws from one of the generators that anybody can draw from, in evaluation mode too."""

    def __init__(self, source: Callable[[], float], drawing: bool = True) -> None:
        super().__init__()
        self.source, self.drawing = source, drawing
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x * (1 + (self.source() if self.drawing else 0.0))
        y = self.o((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x))
        return {"logits": y, "loss": y.square().mean()}


SOURCES: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
}


@pytest.mark.parametrize("source", SOURCES)
def test_random_numbers_of_every_kind_are_the_same_in_each_pass_and_put_back(source: str) -> None:
    model = Drawing(SOURCES[source]).double()
    batch = {"x": torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}
    results = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = Snapshot(model)
        results.append(score(model, [batch], steps=3))
        found = find_symmetries(model, batch, cached=False)
        report = inspect(model, [batch], cached=False)
        before.check()
        assert {p.kind for p in found.pairs} == {"qk", "vo"}
        assert report.dropped == []
    assert results[0].reproducible.ok
    assert results[0].geodesic_sharpness == results[1].geodesic_sharpness
    assert results[0].base_loss == results[1].base_loss


class Looking(nn.Module):
    """Looks rows of an embedding up, some of them several times."""

    def __init__(self, kind: type[nn.Module] | None, **how: Any) -> None:
        super().__init__()
        self.table = nn.Linear(4, 9, bias=False) if kind is None else kind(9, 4, **how)
        self.how = how if kind is None else None
        self.head = nn.Linear(4, 2)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=draw))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        looked = functional.embedding(ids, self.table.weight, **self.how) if self.how is not None else self.table(ids)
        return {"loss": self.head(looked).square().mean()}


@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag, None])
def test_the_gradient_of_an_embedding_is_that_of_the_loss(
    kind: type[nn.Module] | None, micro_batch: int | None
) -> None:
    batch = {"ids": torch.tensor([[1, 1, 2, 5], [1, 3, 3, 3], [0, 1, 2, 1]])}
    expected = quick(Looking(kind), [batch], micro_batch=micro_batch, metric="adaptive")
    options = [{"sparse": True}] if kind is None else [{"sparse": True}, {"scale_grad_by_freq": True}]
    for option in options:
        model = Looking(kind, **option)
        before = Snapshot(model)
        found = quick(model, [batch], micro_batch=micro_batch, metric="adaptive")
        before.check()
        assert found.geodesic_sharpness == expected.geodesic_sharpness
        assert kind is None or {name: getattr(model.table, name) for name in option} == option


# ----------------------------------------------------------------------------------------------------- narrow dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_scored_in_float32_and_say_so(dtype: torch.dtype) -> None:
    model = bert().to(dtype)
    wide = copy.deepcopy(model).float()
    with pytest.warns(GeosharpWarning, match="half-precision"):
        result = quick(model, bert_batches())
    assert result.model["stored_dtypes"] == [str(dtype).removeprefix("torch.")]
    assert result.geodesic_sharpness == quick(wide, bert_batches()).geodesic_sharpness


@pytest.mark.filterwarnings("ignore::hf_geosharp.errors.GeosharpWarning")
def test_labels_from_the_model_are_those_of_its_float32_version() -> None:
    model = bert().to(torch.bfloat16)
    result = quick(model, bert_batches(), labels="model")
    assert abs(result.base_loss) < 1e-6
    assert (
        result.geodesic_sharpness
        == quick(copy.deepcopy(model).float(), bert_batches(), labels="model").geodesic_sharpness
    )


# ---------------------------------------------------------------------------------------------------- shared memory


class Layers(nn.Module):
    """Two linear layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.b(torch.tanh(self.a(x))).square().mean()}


class Windows(nn.Module):
    """Two matrices that are windows on one table: as two parameters, or as one."""

    def __init__(self, *, apart: bool, rows: tuple[slice, slice]) -> None:
        super().__init__()
        table = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        self.rows = rows
        if apart:
            self.a, self.b = (nn.Parameter(table[r]) for r in rows)
        else:
            self.table = nn.Parameter(table)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a, b = (self.a, self.b) if hasattr(self, "a") else (self.table[r] for r in self.rows)
        return {"loss": (torch.tanh(x @ a.T) @ b[:, : a.shape[0]].T).square().mean()}


X = [{"x": torch.randn(5, 4, generator=torch.Generator().manual_seed(0))}]


def plain(model: nn.Module, **changes: Any) -> SharpnessResult:
    """Without symmetries."""
    return quick(model, X, **{"metric": "adaptive", "rho": 0.3, "steps": 10, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("metric", ["adaptive", "euclidean"])
@pytest.mark.filterwarnings("ignore::hf_geosharp.errors.GeosharpWarning")
def test_two_parameters_on_one_storage_are_one_perturbation(metric: str, dtype: torch.dtype) -> None:
    aliased, tied = Layers().to(dtype), Layers().to(dtype)
    aliased.b.weight = nn.Parameter(aliased.a.weight.data)
    tied.b.weight = tied.a.weight
    assert aliased.b.weight is not aliased.a.weight
    before = Snapshot(aliased)
    assert plain(aliased, metric=metric).geodesic_sharpness == plain(tied, metric=metric).geodesic_sharpness
    before.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("rows", [(slice(0, 4), slice(2, 6)), (slice(0, 3), slice(0, 6))])
@pytest.mark.filterwarnings("ignore::hf_geosharp.errors.GeosharpWarning")
def test_overlapping_parameters_are_one_perturbation(
    rows: tuple[slice, slice], average: bool, dtype: torch.dtype
) -> None:
    apart, whole = (Windows(apart=x, rows=rows) for x in (True, False))
    for model in (apart, whole):  # .to() would part what overlaps
        table = model.a if model is apart else model.table
        wide = table.data.as_strided((6, 4), (4, 1), 0).to(dtype)
        if model is apart:
            model.a, model.b = (nn.Parameter(wide[r]) for r in rows)
        else:
            model.table = nn.Parameter(wide)
    before = Snapshot(apart)
    found = plain(apart, average=average).geodesic_sharpness
    # The sums of gradients run in another order.
    assert found == pytest.approx(plain(whole, average=average).geodesic_sharpness, rel=1e-5)
    before.check()


def test_tied_embeddings_are_counted_once() -> None:
    model = gpt2(n_layer=2)
    assert model.lm_head.weight is model.transformer.wte.weight
    before = Snapshot(model)
    result = quick(model, gpt2_batches())
    before.check()
    assert "transformer.wte.weight" in result.share
    assert "lm_head.weight" not in result.share


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_attention_layers_that_share_storage_score_as_if_they_were_one_parameter(metric: str) -> None:
    aliased, tied = bert(), bert()
    for model in (aliased, tied):
        first, second = (layer.attention.self for layer in model.bert.encoder.layer)
        for role in ("query", "key"):
            for kind in ("weight", "bias"):
                p = getattr(getattr(first, role), kind)
                setattr(getattr(second, role), kind, p if model is tied else nn.Parameter(p.data))
    before = Snapshot(aliased)
    found, expected = (quick(m, bert_batches(), metric=metric) for m in (aliased, tied))
    before.check()
    assert found.pairs.by_kind == expected.pairs.by_kind
    assert found.pairs.dropped == []
    # The gradients of the two layers are added in float32, in another order.
    assert found.geodesic_sharpness == pytest.approx(expected.geodesic_sharpness, rel=1e-5)


@pytest.mark.parametrize("metric", ["inv", "mix", "adaptive"])
def test_parameters_in_another_memory_order_give_the_same_score(metric: str) -> None:
    plain_model, turned = bert().double(), bert().double()
    for p in turned.parameters():
        if p.ndim == 2:
            p.data = p.data.T.contiguous().T
            assert not p.is_contiguous() or 1 in p.shape
    before = Snapshot(turned)
    found = quick(turned, bert_batches(), metric=metric).geodesic_sharpness
    assert found == pytest.approx(quick(plain_model, bert_batches(), metric=metric).geodesic_sharpness, rel=1e-10)
    before.check()


def test_parameters_with_gaps_between_their_entries_give_the_same_score() -> None:
    dense, gappy = Layers(), Layers()
    gappy.a.weight = nn.Parameter(torch.stack([gappy.a.weight.data, torch.full((4, 4), 7.0)], -1)[..., 0])
    before = Snapshot(gappy)
    assert plain(gappy).geodesic_sharpness == pytest.approx(plain(dense).geodesic_sharpness, rel=1e-6)
    before.check()


def test_frozen_parameters_are_perturbed_and_stay_frozen() -> None:
    model = bert()
    free = quick(model, bert_batches()).geodesic_sharpness
    model.requires_grad_(False)
    assert quick(model, bert_batches()).geodesic_sharpness == free
    assert not any(p.requires_grad for p in model.parameters())


# -------------------------------------------------------------------------------------------------------- zeros


@pytest.mark.parametrize("metric", ["inv", "mix", "adaptive"])
def test_weights_that_are_zero_do_not_move_and_the_ball_holds(metric: str) -> None:
    model = bert()
    layer = model.bert.encoder.layer[0]
    with torch.no_grad():
        layer.intermediate.dense.weight[::2] = 0
        model.classifier.bias.zero_()
        layer.attention.self.query.weight[:4] = 0  # a dead head
        layer.attention.self.query.bias[:4] = 0
    batch, rho = bert_batches(1)[0], 0.2
    for order in ("first", "second"):
        with borrow(model) as borrowed:
            found = find_symmetries(model, batch)
            chart = Chart(borrowed, found, Geometry(metric, order))
            objective = Objective(model, batch)
            u = chart.space.zeros()
            for _ in range(3):
                chart.write(u)
                objective.evaluate(True)
                g = chart.pull()
                assert bool(torch.isfinite(g.flat()).all())
                assert all(p.grad is None for p in model.parameters())
                u = g.mul_(rho / chart.space.norm(g))
            assert chart.space.norm(u) == pytest.approx(rho)
            chart.write(u)
            assert not layer.intermediate.dense.weight[::2].any()
            assert not model.classifier.bias.any()
            assert layer.intermediate.dense.weight[1::2].ne(borrowed.originals[_name(model, layer)][1::2]).any()
            assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
            random = chart.space.random(torch.Generator().manual_seed(0))
            chart.write(random.mul_(0.1))
            assert not layer.intermediate.dense.weight[::2].any()
            if metric != "adaptive":
                assert not layer.attention.self.query.weight[:4].any()
                assert any("rank 0" in r for r in chart.reduced)


def _name(model: nn.Module, layer: Any) -> str:
    return next(n for n, p in model.named_parameters() if p is layer.intermediate.dense.weight)


@pytest.mark.parametrize("metric", ["inv", "mix", "adaptive"])
def test_the_chart_starts_at_the_function_of_the_model(metric: str) -> None:
    model, batch = bert().double(), bert_batches(1)[0]
    base = float(model(**batch).loss.detach())
    with borrow(model) as borrowed:
        chart = Chart(borrowed, find_symmetries(model, batch), Geometry(metric, "second"))
        chart.write(chart.space.zeros())
        # Layer norms and softmax run in float64 here.
        assert Objective(model, batch).evaluate(False) == pytest.approx(base, rel=1e-12)


def test_a_chart_counts_every_parameter_once() -> None:
    model = gpt2()
    with borrow(model) as borrowed:
        chart = Chart(borrowed, SymmetryMap(), Geometry("euclidean", "first"))
        assert chart.space.dimension == chart.space.size == sum(p.numel() for p in model.parameters())


# --------------------------------------------------------------------------------------------------- surroundings


def test_score_is_the_same_without_gradients_around_it() -> None:
    model = bert()
    free = quick(model, bert_batches()).geodesic_sharpness
    with torch.no_grad():
        assert quick(model, bert_batches()).geodesic_sharpness == free
        assert not torch.is_grad_enabled()
    with torch.inference_mode(), pytest.raises(UsageError, match=r"outside torch.inference_mode\(\)"):
        quick(model, bert_batches())


def test_dropout_is_off_and_does_not_make_the_score_random() -> None:
    calm = quick(bert(), bert_batches()).geodesic_sharpness
    model = bert(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5).train()
    assert quick(model, bert_batches()).geodesic_sharpness == calm
    assert model.training


def test_gradient_checkpointing_does_not_change_the_score() -> None:
    calm = quick(bert(), bert_batches()).geodesic_sharpness
    model = bert().train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    assert quick(model, bert_batches()).geodesic_sharpness == calm
    assert model.training


def test_a_model_that_does_not_compute_in_double_precision_is_proved_as_it_is() -> None:
    """As experts that add up in single precision do not."""
    model = bert()
    whole = quick(model, bert_batches())

    class Single(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.dtype == torch.float64:
                raise RuntimeError("self (Float) and source (Double) must have the same scalar type")
            return super().forward(*args, **kwargs)

    model.__class__ = Single
    before = Snapshot(model)
    found = quick(model, bert_batches())
    before.check()
    assert found.metric == "inv"
    assert found.pairs.by_kind == whole.pairs.by_kind
    assert found.pairs.dropped == []
    assert found.geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=1e-5)


def test_a_scripted_part_is_scored_as_it_was_before_it_was_compiled() -> None:
    model = bert().double()
    layer, norm = model.bert.encoder.layer[0].intermediate, model.bert.encoder.layer[0].attention.output.LayerNorm
    with torch.no_grad():
        # What cannot be looked into keeps its means and the norm its bias: there are none here.
        norm.bias.zero_()
        v = 1 / norm.weight
        layer.dense.weight -= torch.outer(layer.dense.weight @ v, v) / (v @ v)
    expected = quick(model, bert_batches(), dtype="float64").geodesic_sharpness
    layer.dense = torch.jit.script(layer.dense)
    before = Snapshot(model)
    with pytest.warns(GeosharpWarning, match="compiled to TorchScript"):
        found = quick(model, bert_batches(), dtype="float64").geodesic_sharpness
    assert found == pytest.approx(expected, rel=1e-9)
    before.check()
