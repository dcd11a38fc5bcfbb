"""What cannot be scored is refused with a message that names the culprit, and the model stays as it was."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_geosharp import score
from hf_geosharp.errors import DataError, GeosharpError, GeosharpWarning, ModelError, UnsupportedModelError, UsageError
from hf_geosharp.sharpness.base_point import BasePoint
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.settings import radii_of
from hf_geosharp.symmetry.map import SymmetryMap
from tests.sharpness.test_borrow import Snapshot, in_use
from tests.sharpness.tiny import bert, bert_batches, randomise


def refused(model: nn.Module, data: Any, kind: type[GeosharpError], message: str, **options: Any) -> None:
    """The right error, a message that names the culprit, and a model that nobody touched."""
    before = Snapshot(model)
    with pytest.raises(kind, match=message) as caught:
        score(model, data, **{"steps": 2, "reproducibility": False, **options})
    assert type(caught.value) is kind
    before.check()


@pytest.fixture
def model() -> Any:
    return in_use(bert())


# ------------------------------------------------------------------------------------------------------- the model

QUERY = "bert.encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize("options", [{}, {"metric": "adaptive"}, {"labels": "model"}])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_parameter_that_is_not_finite_is_named(model: Any, value: float, options: dict[str, Any]) -> None:
    with torch.no_grad():
        model.get_parameter(QUERY)[0, :2] = value
    refused(model, bert_batches(), ModelError, rf"^{QUERY} has 2 NaN or infinite entries", **options)


@pytest.mark.parametrize("options", [{}, {"labels": "model"}])
def test_a_parameter_on_the_meta_device_is_named(options: dict[str, Any]) -> None:
    model = bert()
    model.classifier.weight = nn.Parameter(torch.empty(3, 8, device="meta"))
    with pytest.raises(UnsupportedModelError, match=r"^classifier\.weight is on the meta device"):
        score(model, bert_batches(), steps=2, **options)


@pytest.mark.parametrize("options", [{}, {"labels": "model"}])
def test_a_parameter_of_integers_is_named(model: Any, options: dict[str, Any]) -> None:
    model.classifier.weight = nn.Parameter(torch.ones(3, 8, dtype=torch.int8), requires_grad=False)
    refused(model, bert_batches(), UnsupportedModelError, r"^classifier\.weight has dtype torch\.int8", **options)


def test_parameters_in_eight_bit_floats_are_named(model: Any) -> None:
    weight = model.classifier.weight.detach().to(torch.float8_e4m3fn)
    model.classifier.weight = nn.Parameter(weight, requires_grad=False)
    refused(model, bert_batches(), UnsupportedModelError, r"^classifier\.weight has dtype torch\.float8_e4m3fn")


def test_a_quantised_model_is_refused(model: Any) -> None:
    model.is_quantized = True
    refused(model, bert_batches(), UnsupportedModelError, "quantised")


def test_an_offloaded_module_is_named(model: Any) -> None:
    model.bert.pooler._hf_hook = SimpleNamespace(offload=True)
    refused(model, bert_batches(), UnsupportedModelError, r"^bert\.pooler is offloaded")


def test_an_expanded_parameter_is_named(model: Any) -> None:
    model.classifier.weight = nn.Parameter(torch.ones(3, 1).expand(3, 8))
    refused(model, bert_batches(), UnsupportedModelError, r"^classifier\.weight is an expanded tensor")


def test_a_model_without_parameters_is_refused() -> None:
    refused(nn.Identity(), [{"input": torch.ones(2)}], ModelError, "no parameters")


class Explosive(nn.Module):
    """A loss that is not finite at the model's own weights."""

    def __init__(self, loss: float) -> None:
        super().__init__()
        self.linear, self.value = nn.Linear(2, 1), loss

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.linear(x).mean() * self.value}


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_at_the_model_s_own_weights_is_refused(value: float, average: bool) -> None:
    data = [{"x": torch.ones(3, 2)}]
    refused(Explosive(value), data, ModelError, r"batch 0: .*loss.* (nan|-?inf)", metric="adaptive", average=average)


def test_a_model_that_returns_no_loss_is_refused(model: Any) -> None:
    unlabelled = [{k: v for k, v in b.items() if k != "labels"} for b in bert_batches()]
    refused(model, unlabelled, ModelError, r"returned no loss; the batch has no 'labels' \(it has .*'input_ids'")


# -------------------------------------------------------------------------------------------------------- the data


def test_a_micro_batch_without_a_label_that_counts_is_told_apart_from_overflow() -> None:
    """Answers that lie behind the text count in no loss; of such samples alone there is none."""
    from transformers import BertForQuestionAnswering

    model = randomise(BertForQuestionAnswering(bert(num_labels=2).config))
    ids = bert_batches(1)[0]["input_ids"]
    positions = torch.tensor([9, 9, 1, 2, 3, 4])
    batch = {"input_ids": ids, "start_positions": positions, "end_positions": positions}
    assert score(model, [batch], steps=1, reproducibility=False).base_loss > 0
    refused(model, [batch], ModelError, r"or a micro-batch without a label that counts: leave out", micro_batch=2)


@pytest.mark.parametrize("data", [[], iter(()), datasets.Dataset.from_dict({"input_ids": []})])
def test_empty_data_are_refused(model: Any, data: Any) -> None:
    refused(model, data, DataError, "(?i)empty")


def test_a_batch_without_samples_is_refused(model: Any) -> None:
    refused(model, [{k: v[:0] for k, v in bert_batches()[0].items()}], DataError, "Batch 0 is empty")


@pytest.mark.parametrize(
    ("label", "message"), [(3, r"labels hold 3 \(batch 1, row 2\).*0 to 2"), (-1, "hold -1.*row 2")]
)
def test_labels_out_of_range_are_named(model: Any, label: int, message: str) -> None:
    batches = bert_batches()
    batches[1]["labels"][2] = label
    refused(model, batches, DataError, message)


def test_labels_that_are_all_ignored_are_refused(model: Any) -> None:
    batches = bert_batches()
    batches[0]["labels"].fill_(-100)
    refused(model, batches, DataError, r"All labels are -100 \(batch 0\)")


def test_tokens_outside_the_vocabulary_are_named(model: Any) -> None:
    batches = bert_batches()
    batches[0]["input_ids"][1, 1] = 99
    refused(model, batches, DataError, r"input_ids hold 99 \(batch 0, row 1\)")


def test_data_of_another_kind_are_refused(model: Any) -> None:
    refused(model, "imdb", UsageError, "Data of type str")


# ------------------------------------------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho": 0}, "rho is"),
        ({"rho": -0.1}, "rho is"),
        ({"rho": (0.1, 0.0)}, "rho is"),
        ({"rho": math.nan}, "rho is"),
        ({"rho": math.inf}, "rho is"),
        ({"metric": "riemann"}, "metric is 'riemann'; it is one of inv, mix, adaptive, euclidean"),
        ({"geodesic": "third"}, "geodesic is 'third'; it is one of first, second, exact"),
        ({"symmetries": "none"}, "symmetries is 'none'; it is one of full, attention, paper"),
        ({"baselines": ["inv"]}, "baseline is 'inv'; it is one of adaptive, euclidean"),
        ({"baselines": "mix"}, "baseline is 'mix'"),
        ({"rho": "wide"}, "rho is 'wide'"),
        ({"rho": [None]}, r"rho is \[None\]"),
        ({"steps": 0}, "steps is 0"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"damping": -1.0}, "damping is -1"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
        ({"labels": "none"}, "labels is 'none'"),
        ({"labels": "model", "loss": lambda outputs, batch: outputs.logits.sum()}, "not both"),
        ({"samples": 0}, "samples"),
        ({"steps": 2.0}, "steps is 2.0; it is a whole number"),
        ({"metric": "adaptive", "geodesic": "exact"}, "geodesics of the metric adaptive are straight lines"),
        ({"metric": "euclidean", "damping": 0.1}, "the metric euclidean has no directions to damp"),
        ({"seed": -1}, "seed is -1; it lies between 0 and"),
        ({"batch_size": 1.5}, "batch_size is 1.5; it is a whole number"),
    ],
)
def test_an_option_out_of_range_is_named(model: Any, options: dict[str, Any], message: str) -> None:
    refused(model, bert_batches(), UsageError, message, **options)


def test_whole_numbers_may_be_those_of_numpy() -> None:
    options = {"steps": np.int64(2), "seed": np.int64(1), "micro_batch": np.int32(3)}
    result = score(bert(), bert_batches(1), reproducibility=False, **options)
    assert (result.steps, result.seed) == (2, 1)
    assert json.loads(result.to_json())["seed"] == 1


@pytest.mark.parametrize("rho", [torch.tensor(0.1), torch.tensor([0.1]), np.float32(0.1), [0.1], (0.1,)])
def test_a_radius_may_be_any_number_or_sequence_of_numbers(rho: Any) -> None:
    model = bert()
    expected = score(model, bert_batches(1), rho=0.1, steps=2, reproducibility=False).geodesic_sharpness
    found = score(model, bert_batches(1), rho=rho, steps=2, reproducibility=False).geodesic_sharpness
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_name_is_no_model_and_no_loss() -> None:
    model: Any = "bert"
    with pytest.raises(
        UsageError,
        match="the model is 'bert', not a module; to score a model by its name or folder call score_pretrained",
    ):
        score(model, bert_batches(1))
    with pytest.raises(UsageError, match="loss is 'model'; it is a function of outputs and batch"):
        score(bert(), bert_batches(1), loss=model.replace("bert", "model"))


@pytest.mark.parametrize("rho", [(0.1, 0.2), [0.1, 0.2], np.array([0.1, 0.2]), torch.tensor([0.1, 0.2])])
def test_radii_come_in_whatever_holds_numbers(rho: Any) -> None:
    assert radii_of(rho) == pytest.approx((0.1, 0.2))
    assert radii_of(rho[0]) == pytest.approx((0.1,))


@pytest.mark.parametrize("rho", [[], "much", ["much"], object()])
def test_what_holds_none_is_refused(rho: Any) -> None:
    with pytest.raises(UsageError, match="rho is"):
        radii_of(rho)


class Detached(nn.Module):
    """Half of it, or what nothing reads, takes part without a gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.backbone, self.head, self.spare = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 4)
        self.how = how

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        with torch.set_grad_enabled(self.how != "no_grad" and torch.is_grad_enabled()):
            y = torch.tanh(self.backbone(x))
        y = self.head(y.detach() if self.how == "detach" else y)
        return SimpleNamespace(loss=nn.functional.cross_entropy(y, labels), logits=y)


@pytest.mark.parametrize("how", ["no_grad", "detach"])
def test_parameters_that_the_loss_depends_on_without_a_gradient_are_told(how: str) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(8, 4, generator=generator), "labels": torch.arange(8) % 3}
    model = Detached(how)
    before = Snapshot(model)
    with pytest.warns(GeosharpWarning, match=r"without a gradient: 4, backbone.weight, backbone.bias"):
        result = score(model, [batch, batch], metric="adaptive", steps=2)
    before.check()
    assert sum("in which it has no gradient" in text for text in result.warnings) == 1


class Refusing(torch.autograd.Function):
    """What has a backward pass in training alone, or none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise AssertionError("use model.train()")


class Without(Refusing):
    """None at all."""

    backward = torch.autograd.Function.backward


@pytest.mark.parametrize(("function", "reason"), [(Refusing, r"use model.train\(\)"), (Without, "must implement")])
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_backward_pass_that_is_refused_is_told_in_words(
    function: type[torch.autograd.Function], reason: str, micro_batch: int | None
) -> None:
    class Model(Detached):
        def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
            return super().forward(function.apply(x * self.spare.weight[0]), labels)  # type: ignore[no-any-return]

    model = Model("all")
    before = Snapshot(model)
    batch = {"x": torch.ones(8, 4), "labels": torch.arange(8) % 3}
    with pytest.raises(ModelError, match=rf"backward pass fails.*{reason}"):
        score(model, [batch], metric="adaptive", steps=2, micro_batch=micro_batch)
    before.check()


def test_what_is_tried_without_a_gradient_is_put_back_at_once() -> None:
    model, tried, said = Detached("detach"), [], list[str]()
    with borrow(model) as borrowed:
        weight = borrowed.leaves["backbone.weight"].tensor
        before = weight.clone()

        def loss(index: int) -> float:
            tried.append(weight.clone())
            return 1.0

        base_point = BasePoint(borrowed, SymmetryMap(), loss, lambda index: (), lambda: None, said.append)
        ball: Any = SimpleNamespace(unfelt=["backbone.weight"], number=0, base=0.5)
        base_point.check_felt(ball)
        assert torch.equal(weight, before)
    assert not torch.equal(tried[0], before)
    assert "without a gradient: 1, backbone.weight" in said[0]


def test_a_loss_is_the_stored_one_but_for_rounding() -> None:
    with borrow(Detached("all")) as borrowed:
        base_point = BasePoint(borrowed, SymmetryMap(), lambda index: 0.0, lambda index: (), lambda: None, print)
    base_point.expect({0: 2.0, 1: 1e-4, 2: math.nan})
    cases = [
        (0, 2.0 - 1e-5, 0.0, True), (0, 2.0 + 4e-5, 0.0, False), (0, 2.0 + 4e-5, 5e-5, True),
        (1, 1e-4 + 5e-8, 0.0, True), (1, 1e-4 + 3e-7, 0.0, False), (2, 1.0, 0.0, True), (3, 1.0, 0.0, True),
    ]  # fmt: skip
    for index, base, noise, same in cases:
        assert base_point.is_stored_loss(index, base, noise) is same, (index, base)


@pytest.mark.parametrize("metric", ["adaptive", "inv"])
@pytest.mark.parametrize("starts", [1, 3])
def test_a_model_of_zeros_is_refused_in_words(metric: str, starts: int) -> None:
    model = bert()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    with pytest.raises(ModelError, match="all weights that may be perturbed are zero"):
        score(model, bert_batches(1), metric=metric, starts=starts, steps=2)


class Constant(nn.Module):
    """A scale that is detached, and a norm at ones and zeros."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.head, self.norm, self.scale = nn.Linear(4, 3), nn.LayerNorm(4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        y = nn.functional.layer_norm(x, (4,), self.norm.weight.detach(), self.norm.bias.detach())
        y = self.head(y * self.scale.detach())
        return SimpleNamespace(loss=nn.functional.cross_entropy(y, labels), logits=y)


def test_parameters_of_one_value_are_told_too_also_when_a_journal_is_continued(tmp_path: Any) -> None:
    batch = {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), "labels": torch.arange(8) % 3}
    with pytest.warns(GeosharpWarning, match="without a gradient: 3, scale, norm.weight, norm.bias"):
        first = score(Constant(), [batch], metric="adaptive", steps=2, output=tmp_path)
    again = score(Constant(), [batch], metric="adaptive", steps=2, output=tmp_path)
    assert again.warnings == first.warnings


def test_parameters_that_nothing_reads_are_no_matter() -> None:
    batch = {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), "labels": torch.arange(8) % 3}
    result = score(Detached("all"), [batch], metric="adaptive", steps=2)
    assert result.warnings == []
