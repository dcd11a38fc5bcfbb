"""What a score is made of: batches, radii, passes, seeds, losses, and the record that it returns."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from hf_geosharp import SharpnessResult, score
from hf_geosharp.comparable import Named, check_comparable
from hf_geosharp.errors import DataError, GeosharpWarning, ModelError, UsageError
from hf_geosharp.scoring import make_twin
from hf_geosharp.sharpness.choices import METRICS
from hf_geosharp.sharpness.jobs import Job, Outcome
from hf_geosharp.sharpness.progress import Progress
from hf_geosharp.sharpness.reproducibility import LEAST, compared, resolution, rounding_in
from hf_geosharp.sharpness.result import BatchScore, unit_of
from hf_geosharp.symmetry.trials.probe import Widened
from tests.families import batch_of, build
from tests.sharpness.tiny import adapter, bert, bert_batches, gpt2, gpt2_batches


def quick(model: Any, data: Any, **changes: Any) -> SharpnessResult:
    return score(model, data, **{"steps": 4, "reproducibility": False, **changes})


def values(result: SharpnessResult) -> list[float]:
    return [b.value for b in result.per_batch]


# ------------------------------------------------------------------------------------------------------- the record


def test_a_result_says_what_was_done() -> None:
    model = bert()
    batches = bert_batches(3, size=4)
    base = [float(model(**b).loss.detach()) for b in batches]
    result = score(model, batches, seed=3)
    assert (result.metric, result.geodesic, result.symmetries, result.mode) == ("inv", "second", "full", "worst")
    assert (result.rho, result.steps, result.seed) == (METRICS["inv"].rho, 20, 3)
    assert (result.samples, result.batch_size, result.schema) == (12, 4, 1)
    assert [b.index for b in result.per_batch] == [0, 1, 2]
    assert [b.base_loss for b in result.per_batch] == pytest.approx(base, rel=1e-5)
    assert all(b.value > 0 and 0 < b.steps <= 20 for b in result.per_batch)
    assert result.ascent == "auto"
    assert result.base_loss == pytest.approx(sum(base) / 3, rel=1e-5)
    mean = sum(values(result)) / 3
    assert result.geodesic_sharpness == pytest.approx(mean, rel=1e-14)
    assert result.stderr == pytest.approx(float(stats.sem(values(result))), rel=1e-12)
    assert result.interval95 == pytest.approx(stats.t.interval(0.95, 2, mean, result.stderr), rel=1e-9)
    # Two heads in two layers, each with a query/key and a value/output pair.
    assert result.pairs.by_kind == {"qk GL(4)": 4, "vo GL(4)": 4}
    assert result.pairs.count == 8
    # The last norm feeds the pooler alone; linear maps read each of the five, and two in each layer write to one, and
    # three tables. Four norms write to the residual; of the tables two can be held by a third.
    assert result.pairs.folded == {
        "key_bias": 2, "value_bias": 2, "norm_gain": 1, "read_mean": 5, "written_mean": 4 + 3, "stream_bias": 4 + 2
    }  # fmt: skip
    assert result.pairs.reduced == result.pairs.dropped == []
    assert result.pairs.deviation < 1e-5 * result.pairs.control
    assert sum(result.share.values()) == pytest.approx(1.0, rel=1e-6)
    assert list(result.share.values()) == sorted(result.share.values(), reverse=True)
    assert result.baselines == {}
    assert result.reproducible.ok is True
    assert 0 <= result.reproducible.spread <= 0.01
    assert result.model["class"] == "BertForSequenceClassification"
    assert result.model["stored_dtypes"] == ["float32"]
    assert set(result.versions) == {"hf-geosharp", "torch", "transformers", "datasets"}
    assert result.seconds > 0


def test_one_batch_has_no_error_bar() -> None:
    result = quick(bert(), bert_batches(1))
    assert result.stderr is None
    assert result.interval95 is None
    assert result.geodesic_sharpness == result.per_batch[0].value


@pytest.mark.parametrize("symmetries", ["paper", "attention"])
def test_the_preset_decides_what_folds(symmetries: str) -> None:
    result = quick(bert(), bert_batches(1), symmetries=symmetries)
    assert result.symmetries == symmetries
    assert result.pairs.folded == ({} if symmetries == "paper" else {"key_bias": 2, "value_bias": 2})


@pytest.mark.slow
def test_a_pass_counts_one_forward_and_one_backward_a_step() -> None:
    model, batches = bert(num_hidden_layers=1), bert_batches(3)
    forwards = 0

    def hook(_: Any, __: Any, outputs: Any) -> None:
        nonlocal forwards
        # Symmetries are looked for on fewer samples.
        forwards += torch.is_grad_enabled() and len(outputs.logits) == 6

    model.register_forward_hook(hook)
    result = score(model, batches, ascent="apgd", reproducibility=False)
    assert (result.passes.forwards, result.passes.backwards) == (3 * 21, 3 * 20)
    assert forwards == 3 * 20
    curve = score(model, batches, ascent="apgd", rho=(0.1, 0.05), reproducibility=False, baselines=["adaptive"])
    assert (curve.passes.forwards, curve.passes.backwards) == (2 * 3 * 21, 2 * 3 * 20)
    checked = score(model, batches, ascent="apgd")
    assert checked.passes == result.passes


def test_passes_are_those_of_the_batches_and_say_why_they_are_not_more() -> None:
    model, batches, radii = bert(num_hidden_layers=1), bert_batches(3), (0.05, 0.1)
    result = score(model, batches, rho=radii[0], reproducibility=False)
    assert result.passes.forwards == sum(b.passes for b in result.per_batch if b.passes)
    assert {b.stopped for b in result.per_batch} == {"converged"}
    assert all(b.converged and b.passes == b.steps + 1 < 21 for b in result.per_batch)
    short = score(model, batches, steps=2, reproducibility=False)
    assert {(b.stopped, b.passes) for b in short.per_batch} == {("budget", 3)}
    assert short.passes.backwards == 2 * 3
    average = score(model, batches, average=True, steps=6)
    assert average.ascent == "none"
    assert {b.passes for b in average.per_batch} == {6}


@pytest.mark.parametrize("metric", ["inv", "mix", "adaptive"])
def test_the_curve_ascends_and_the_first_radius_asked_for_is_the_score(metric: str) -> None:
    model, batches = bert(), bert_batches(2)
    result = quick(model, batches, metric=metric, rho=(0.1, 0.4, 0.02, 0.2), steps=3)
    assert [p.rho for p in result.curve] == [0.02, 0.1, 0.2, 0.4]
    rises = [p.geodesic_sharpness for p in result.curve]
    assert rises == sorted(rises)
    assert (result.rho, result.geodesic_sharpness) == (0.1, rises[1])
    assert (result.stderr, result.interval95) == (result.curve[1].stderr, result.curve[1].interval95)
    smallest = quick(model, batches, metric=metric, rho=0.02, steps=3)
    assert smallest.geodesic_sharpness == rises[0]


@pytest.mark.parametrize("average", [False, True])
def test_scores_repeat_bit_for_bit(average: bool) -> None:
    first, second = (quick(bert(), bert_batches(2), average=average, seed=5, baselines=["adaptive"]) for _ in range(2))
    assert dataclasses.replace(first, seconds=0.0) == dataclasses.replace(second, seconds=0.0)
    other = quick(bert(), bert_batches(2), average=average, seed=6)
    # Another seed is other draws; the worst case starts along the gradient and needs none.
    assert (values(other) == values(first)) is not average


def test_progress_ends_where_it_said_it_would() -> None:
    told: list[Progress] = []
    # A radius that is named twice is one.
    score(bert(), bert_batches(2), steps=3, rho=(0.1, 0.2, 0.1), baselines=["adaptive"], progress=told.append)
    assert {p.stage for p in told} >= {"score", "reproducibility", "baseline"}
    assert [p.done for p in told] == sorted(p.done for p in told)
    assert len({p.total for p in told}) == 1
    assert told[-1].total == told[-1].done


def test_progress_tells_the_steps_of_each_climb_and_ends_where_none_was_rough() -> None:
    told: list[Progress] = []
    score(bert(), bert_batches(2), rho=(1.0, 0.1), reproducibility=False, progress=told.append)
    assert {p.steps for p in told if p.rho == 0.1} == {13}
    assert {p.steps for p in told if p.rho == 1.0} == {13, 60}
    assert all(p.step <= p.steps for p in told)
    assert [p.done for p in told] == sorted(p.done for p in told)
    assert told[-1].total == told[-1].done


# ------------------------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_micro_batches_of_samples_do_not_change_the_score(micro_batch: int) -> None:
    model, batches = bert(), bert_batches(1)
    whole, parts = (quick(model, batches, dtype="float64", micro_batch=m) for m in (None, micro_batch))
    assert parts.base_loss == pytest.approx(whole.base_loss, rel=1e-12)
    assert parts.geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=1e-10)


# Language models take their own loss in float32 whatever they are themselves: 1e-5 is its rounding over a few steps.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-5)])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_micro_batches_of_padded_texts_do_not_change_the_score(dtype: str, tolerance: float, micro_batch: int) -> None:
    model, batches = gpt2(), gpt2_batches()
    lengths = batches[0]["attention_mask"].sum(1)
    assert len(set(lengths.tolist())) > 2
    whole = quick(model, batches, dtype=dtype)
    parts = quick(model, batches, dtype=dtype, micro_batch=micro_batch)
    assert parts.base_loss == pytest.approx(whole.base_loss, rel=tolerance)
    assert parts.geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=tolerance)
    assert parts.passes == whole.passes


# The model takes its loss in float32, one rounding of which is 2e-6 of the score: that is widened.
@pytest.mark.parametrize("ascent", ["apgd", "secant"])
def test_padding_does_not_change_the_score(ascent: str) -> None:
    batch = gpt2_batches()[0]
    padded = {k: nn.functional.pad(v, (0, 2), value=-100 if k == "labels" else 0) for k, v in batch.items()}
    with Widened():
        short, long = (quick(gpt2(), [b], dtype="float64", ascent=ascent) for b in (batch, padded))
    assert long.geodesic_sharpness == pytest.approx(short.geodesic_sharpness, rel=1e-10)


def per_sample(outputs: Any, batch: Any) -> Tensor:
    """Mean over the tokens of each text, then one number a text."""
    logits, labels = outputs.logits[:, :-1], batch["labels"][:, 1:]
    losses = nn.functional.cross_entropy(logits.mT, labels, ignore_index=-100, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1)


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_a_loss_per_sample_or_its_mean_give_the_same_score(micro_batch: int | None) -> None:
    model, batches = gpt2(), gpt2_batches()
    plain = quick(model, batches, loss=per_sample, dtype="float64").geodesic_sharpness
    for loss in (per_sample, lambda outputs, batch: per_sample(outputs, batch).mean()):
        found = quick(model, batches, loss=loss, micro_batch=micro_batch, dtype="float64").geodesic_sharpness
        assert found == pytest.approx(plain, rel=1e-10)
    assert plain != pytest.approx(quick(model, batches, dtype="float64").geodesic_sharpness, rel=1e-3)


def test_a_loss_that_is_the_model_s_own_gives_the_model_s_own_score() -> None:
    def loss(outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="none")

    model, batches = bert(), bert_batches(2)
    own = quick(model, batches).geodesic_sharpness
    assert quick(model, batches, loss=loss).geodesic_sharpness == pytest.approx(own, rel=1e-5)


def test_a_loss_of_ones_own_is_named_and_is_in_no_nats() -> None:
    own, plain = (quick(bert(), bert_batches(1), loss=loss) for loss in (per_label, None))
    assert own.data["loss"].startswith(f"{__name__}.per_label ")
    assert own.unit == "units of the loss"
    assert "loss" not in plain.data
    assert plain.unit == "nats"


def per_label(outputs: Any, batch: Any) -> Tensor:
    return nn.functional.multi_margin_loss(outputs.logits, batch["labels"], reduction="none")


@pytest.mark.parametrize("encoded", [False, True])
def test_a_loss_on_numbers_is_in_no_nats(encoded: bool) -> None:
    from datasets import Dataset

    batch = bert_batches(1)[0]
    batch["labels"] = batch["labels"].double() / 3
    data: Any = Dataset.from_dict({k: v.tolist() for k, v in batch.items()}) if encoded else [batch]
    result = quick(bert(num_labels=1), data, batch_size=len(batch["labels"]))
    assert result.data["labels"] == "regression"
    assert result.unit == "units of the loss"


def base_batches() -> list[dict[str, Tensor]]:
    return [{k: v for k, v in b.items() if k != "labels"} | {"_target": b["labels"]} for b in bert_batches(1)]


def test_a_base_model_needs_a_loss() -> None:
    model = bert().bert
    with pytest.raises(ModelError, match=r"returned no loss.*pass loss=\(outputs, batch\)"):
        quick(model, base_batches())
    result = quick(model, base_batches(), loss=lambda o, b: (o.last_hidden_state[:, 0, 0] - b["_target"]).square())
    assert result.geodesic_sharpness > 0
    assert result.pairs.count == 8


def test_a_loss_without_gradients_is_refused() -> None:
    with pytest.raises(ModelError, match=r"does not depend on the model's parameters.*torch\.no_grad"):
        quick(bert(), bert_batches(1), loss=lambda outputs, batch: outputs.logits.detach().sum())


def test_a_loss_of_another_model_is_refused() -> None:
    """It has a gradient, but none in what is perturbed: its rise of 0 would pass for a score."""
    other = bert()
    with pytest.raises(ModelError, match=r"does not depend on the model's parameters.*another model"):
        quick(bert(), bert_batches(1), loss=lambda outputs, batch: other(**batch).loss)


@pytest.mark.parametrize("symmetries", ["full", "paper"])
def test_a_loss_with_a_penalty_on_the_weights_is_refused(symmetries: str) -> None:
    """It is not invariant, and at the point where symmetries are divided out another: that passed for rounding."""
    model, batches = bert(), bert_batches(1)

    def penalised(outputs: Any, batch: Any) -> Tensor:
        loss = nn.CrossEntropyLoss()(outputs.logits, batch["labels"])
        return loss + 1e-3 * sum(p.square().sum() for p in model.parameters())

    with pytest.raises(UsageError, match="depends on the weights themselves"):
        quick(model, batches, loss=penalised, symmetries=symmetries)
    result = quick(model, batches, loss=penalised, metric="euclidean")
    expected = penalised(model(**batches[0]), batches[0]).item()
    assert result.base_loss == pytest.approx(expected, rel=1e-5)


def test_a_small_penalty_is_no_rounding() -> None:
    """Of a fresh model it changes by less than rounding may where pairs are moved only a little: it was scored."""
    model = bert()

    def penalised(outputs: Any, batch: Any) -> Tensor:
        return outputs.loss + 1e-5 * sum(p.square().sum() for p in model.parameters())

    with pytest.raises(UsageError, match="depends on the weights themselves"):
        quick(model, bert_batches(1), loss=penalised)


def test_a_loss_that_runs_the_model_again_and_reads_its_weights_is_refused() -> None:
    """What the model gives is held while the weights move, so that only the reading shows."""
    model = bert()

    def penalised(outputs: Any, batch: Any) -> Tensor:
        return model(**batch).loss + 1e-4 * sum(p.square().sum() for p in model.parameters())

    with pytest.raises(UsageError, match="depends on the weights themselves"):
        quick(model, bert_batches(1), loss=penalised)


def test_a_loss_of_hidden_states_and_a_head_is_scored_where_nothing_folds() -> None:
    """A gain folds into the head that reads these states."""
    model = bert(output_hidden_states=True)

    def headed(outputs: Any, batch: Any) -> Tensor:
        states = outputs.hidden_states[-1][:, 0]
        return nn.functional.cross_entropy(states @ model.classifier.weight.T, batch["labels"])

    with pytest.raises(ModelError, match="its loss may read hidden states or weights"):
        quick(model, bert_batches(1), loss=headed)
    assert quick(model, bert_batches(1), loss=headed, symmetries="paper").geodesic_sharpness > 0


def test_a_loss_that_remembers_what_it_was_given_is_refused() -> None:
    """No two values of it compare, and the weights are not to blame."""
    calls: list[int] = []

    def counted(outputs: Any, batch: Any) -> Tensor:
        calls.append(1)
        return outputs.loss * len(calls)

    with pytest.raises(UsageError, match="of the same outputs and batch when it is computed again"):
        quick(bert(), bert_batches(1), loss=counted)


@pytest.mark.parametrize("metric", ["inv", "euclidean"])
@pytest.mark.parametrize("kind", ["int64", "bool"])
def test_a_loss_of_whole_numbers_is_refused(kind: str, metric: str) -> None:
    with pytest.raises(ModelError, match=f"a tensor of {kind}, which has no gradient"):
        quick(
            bert(), bert_batches(1), metric=metric,
            loss=lambda outputs, batch: (outputs.logits.argmax(-1) != batch["labels"]).to(getattr(torch, kind)),
        )  # fmt: skip


def test_a_loss_that_runs_the_model_again_is_scored() -> None:
    model, batches = bert(), bert_batches(1)
    twice = quick(model, batches, loss=lambda outputs, batch: (outputs.loss + model(**batch).loss) / 2)
    assert twice.geodesic_sharpness == pytest.approx(quick(model, batches).geodesic_sharpness, rel=1e-4)


def test_a_loss_is_the_first_of_a_tuple() -> None:
    """As models return it without return_dict, and as a Trainer reads it."""
    expected, found = (quick(bert(return_dict=named), bert_batches(1)) for named in (True, False))
    assert (found.geodesic_sharpness, found.base_loss) == (expected.geodesic_sharpness, expected.base_loss)
    with pytest.raises(ModelError, match="returned no loss"):
        quick(bert(return_dict=False), [{k: v for k, v in bert_batches(1)[0].items() if k != "labels"}])


def test_an_error_of_the_model_itself_is_not_taken_for_overflow() -> None:
    def loss(outputs: Any, batch: Any) -> Tensor:
        raise ValueError("something else")

    with pytest.raises(ValueError, match=r"^something else$"):
        quick(bert(), bert_batches(1), loss=loss)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_labels_of_the_model_need_no_labels_and_are_invariant(dtype: torch.dtype, tolerance: float) -> None:
    model, twin = (bert(num_hidden_layers=1).to(dtype) for _ in range(2))
    make_twin(twin, condition=10.0)
    unlabelled = [{k: v for k, v in b.items() if k != "labels"} for b in bert_batches(2)]
    results = [score(m, unlabelled, labels="model", steps=20) for m in (model, twin)]
    assert all(abs(r.base_loss) < 10 * torch.finfo(dtype).eps for r in results)
    assert results[0].geodesic_sharpness > 1e-4
    assert results[0].data["labels"] == "model"
    assert results[0].reproducible.ok
    assert results[1].geodesic_sharpness == pytest.approx(results[0].geodesic_sharpness, rel=tolerance)


def test_labels_of_the_model_in_micro_batches_count_tokens() -> None:
    model, batches = gpt2(), gpt2_batches()
    whole, parts = (
        quick(model, batches, labels="model", dtype="float64", steps=1, rho=0.5, seed=1, micro_batch=m)
        for m in (None, 2)
    )
    assert parts.base_loss == pytest.approx(whole.base_loss, abs=1e-14)


# ------------------------------------------------------------------------------------------------------------ modes


class Perceptron(nn.Module):
    """No attention anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.outer(torch.tanh(self.inner(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


POINTS = [{"x": torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), "labels": torch.tensor([0, 1] * 3)}]


def test_a_model_without_attention_is_scored_as_adaptive_with_a_warning() -> None:
    with pytest.warns(GeosharpWarning, match="no attention symmetry"):
        result = quick(Perceptron(), POINTS)
    assert (result.metric, result.geodesic, result.symmetries) == ("adaptive", "first", "none")
    assert any("no attention symmetry" in w for w in result.warnings)
    assert result.pairs.count == 0
    assert result.rho == METRICS["adaptive"].rho
    assert result.geodesic_sharpness == quick(Perceptron(), POINTS, metric="adaptive").geodesic_sharpness


def test_a_loss_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(ModelError, match="the loss is a float, not a tensor"):
        quick(bert(), bert_batches(1), loss=lambda outputs, batch: 1.0)


def test_average_sharpness_is_below_the_worst_and_takes_a_forward_a_draw() -> None:
    model, batches = bert(), bert_batches(2)
    worst = quick(model, batches, steps=10)
    mean = quick(model, batches, steps=10, average=True, rho=(0.1, 0.2))
    assert mean.mode == "average"
    assert mean.geodesic_sharpness < worst.geodesic_sharpness
    assert (mean.passes.forwards, mean.passes.backwards) == (2 * (1 + 10 + 10), 0)
    assert mean.reproducible.ok is None
    assert [p.rho for p in mean.curve] == [0.1, 0.2]


def test_average_sharpness_does_not_depend_on_the_weights_a_function_is_written_in() -> None:
    model, twin = bert().double(), bert().double()
    make_twin(twin, condition=10.0)
    results = [quick(m, bert_batches(1), steps=10, average=True, rho=0.5) for m in (model, twin)]
    # Equal draws: the gauge fixes the signs of the columns, too. 1e-6 is what parts of the model in float32 leave.
    assert results[1].geodesic_sharpness == pytest.approx(results[0].geodesic_sharpness, rel=1e-6)


@pytest.mark.parametrize("ascent", ["secant", "apgd"])
@pytest.mark.slow
def test_a_search_that_found_no_finite_loss_does_not_pass_for_a_score_of_zero(ascent: str) -> None:
    """A head that weight decay has all but removed: mix moves it as far as all others, and far too far."""
    model = bert(layers=1)
    attention = model.bert.encoder.layer[0].attention
    with torch.no_grad():
        for linear in (attention.self.query, attention.self.key):
            linear.weight[:4] *= 1e-12
            linear.bias[:4] *= 1e-12
    mix, inv = (score(model, bert_batches(1), metric=m, rho=0.01, ascent=ascent) for m in ("mix", "inv"))
    assert mix.geodesic_sharpness == 0
    assert not mix.per_batch[0].converged
    assert mix.per_batch[0].stopped == "lost"
    assert any("0 is not a measurement" in text and "inv" in text for text in mix.warnings)
    assert mix.lost == 1
    assert mix.reproducible.ok is False
    assert sum("is not a measurement: in 1 of 1 batches" in text for text in mix.warnings) == 1
    with pytest.raises(DataError, match="is not a measurement: in 1 of 1"):
        check_comparable([Named("a", mix), Named("b", mix)], force=True)
    assert inv.geodesic_sharpness > 0
    assert not inv.warnings


@pytest.mark.slow
def test_a_head_that_all_but_vanishes_hardly_changes_a_score_of_mix() -> None:
    """What does not matter in the function does not matter in the ball: its exact geodesics lead away from zero."""
    values = []
    for size in (1e-2, 1e-4):
        model = bert(layers=1)
        attention = model.bert.encoder.layer[0].attention
        with torch.no_grad():
            for linear in (attention.self.query, attention.self.key):
                linear.weight[:4] *= size
                linear.bias[:4] *= size
        result = score(model, bert_batches(1), metric="mix", rho=0.01)
        assert not result.warnings
        values.append(result.geodesic_sharpness)
    assert values[1] == pytest.approx(values[0], rel=2e-3)


def test_what_an_exact_geodesic_does_not_reach_is_left_out_and_told() -> None:
    model = bert(layers=1)
    attention = model.bert.encoder.layer[0].attention
    with torch.no_grad():
        for linear in (attention.self.query, attention.self.key):
            linear.weight[4:8] *= 1e-12
            linear.bias[4:8] *= 1e-12
    result = score(model, bert_batches(1), metric="mix", rho=0.01, steps=1, reproducibility=False)
    (text,) = (text for text in result.warnings if "exact geodesic" in text)
    assert "batch 0: the exact geodesic of bert.encoder.layer.0.attention.qk head 1 was not found beyond" in text
    assert "at some points of the ball, rho 0.01" in text
    assert result.lost == 1
    with pytest.raises(
        ModelError, match=r"the exact geodesic of .* at a random perturbation of rho 0\.01; use a smaller"
    ):
        score(model, bert_batches(1), metric="mix", rho=0.01, average=True, steps=2)


def test_a_mistake_in_a_loss_is_no_point_that_is_left_out() -> None:
    calls = iter(range(100))

    def wrong(outputs: Any, batch: Any) -> Tensor:
        share = 1 / (8 - next(calls))
        return outputs.loss * share  # type: ignore[no-any-return]

    model = bert()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ZeroDivisionError):
        score(model, bert_batches(1), loss=wrong, metric="euclidean", steps=10)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_average_sharpness_at_a_radius_without_a_finite_loss_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"not finite at a random perturbation of rho 1e\+18"):
        quick(bert(), bert_batches(1), average=True, rho=1e18)


@pytest.mark.parametrize("baseline", ["adaptive", "euclidean"])
@pytest.mark.slow
def test_a_baseline_is_the_score_under_its_own_metric(baseline: str) -> None:
    model, batches = bert(), bert_batches(2)
    result = quick(model, batches, rho=(0.2, 0.1), baselines=[baseline])
    assert result.baselines == {baseline: quick(model, batches, metric=baseline, rho=0.2).geodesic_sharpness}
    assert result.geodesic_sharpness == quick(model, batches, rho=(0.2, 0.1)).geodesic_sharpness


@pytest.mark.parametrize("metric", ["inv", "mix"])
@pytest.mark.parametrize("geodesic", ["first", "second", "exact"])
@pytest.mark.slow
def test_geodesics_agree_at_small_radii(metric: str, geodesic: str) -> None:
    model, batches = bert(), bert_batches(1)
    straight = quick(model, batches, metric=metric, geodesic="first", rho=1e-3, dtype="float64").geodesic_sharpness
    found = quick(model, batches, metric=metric, geodesic=geodesic, rho=1e-3, dtype="float64")
    assert found.geodesic == geodesic
    assert found.geodesic_sharpness == pytest.approx(straight, rel=1e-2)


# --------------------------------------------------------------------------------------------------- reproducibility


@pytest.mark.parametrize(
    ("model", "data", "options"),
    [
        (bert, bert_batches(2), {"rho": 1e-6}),
        (bert, bert_batches(2), {"rho": 1e-4, "labels": "model"}),
        (gpt2, gpt2_batches(2), {"rho": 1e-6, "dtype": "float64"}),  # its loss is taken of single precision logits
        (gpt2, gpt2_batches(2), {"rho": 1e-6, "dtype": "float64", "micro_batch": 2}),
    ],
    ids=["float32", "divergence", "rounded inside", "rounded inside, in parts"],
)
def test_a_score_that_rounding_of_the_loss_makes_is_none(model: Any, data: Any, options: Any) -> None:
    result = score(model(), data, steps=3, **options)
    assert result.reproducible.ok is False
    assert any("rounding of the loss makes" in w and "use a larger radius" in w for w in result.warnings)


@pytest.mark.parametrize(
    ("bases", "singles", "dtype", "stationary", "expected"),
    [
        ((0.3, -4.0), (True, True), torch.float32, False, 4 * 2.0**-23),
        ((0.3, 4.0), (False, False), torch.float64, False, 4 * 2.0**-52),
        ((0.3, 4.0), (True, True), torch.float64, False, 4 * 2.0**-23),  # rounded inside
        ((0.3, 4.0), (True, False), torch.float64, False, 4 * 2.0**-52),  # one loss may be such a number by chance
        ((0.0, 0.0), (True, True), torch.float64, False, LEAST * 2.0**-52),
        ((0.0, 0.0), (True, True), torch.float64, True, 2.0**-52),
    ],
)
def test_a_loss_is_resolved_to_one_rounding_of_the_largest(
    bases: tuple[float, ...], singles: tuple[bool, ...], dtype: torch.dtype, stationary: bool, expected: float
) -> None:
    runs = [
        Outcome(Job("score", i), base, single=single)
        for i, (base, single) in enumerate(zip(bases, singles, strict=True))
    ]
    skipped = Outcome(Job("score", 9), 1e9 + 0.1, skipped="its loss is not finite")
    assert resolution([*runs, skipped], dtype, stationary=stationary) == expected


@pytest.mark.parametrize(("second", "advice"), [(1.6e-5, "use a larger radius"), (8e-5, "use a smaller radius")])
def test_runs_that_differ_by_what_rounding_makes_ask_for_a_larger_radius(second: float, advice: str) -> None:
    """Above a hundred roundings too, and however much it is of the score; what they differ by more is a rough loss."""

    def run(value: float) -> Outcome:
        return Outcome(Job("score", 0), 0.5, ((0.1, BatchScore(0, 0.5, value, 5, True)),))

    note = compared(run(1.2e-5), run(second), torch.float32, rounding=1e-7)[0.1].note
    assert note is not None
    assert advice in note


def test_an_average_that_rounding_of_the_loss_makes_is_told() -> None:
    """Spread over all weights of a large model a random perturbation hardly moves the loss at the usual radii."""
    told = [
        score(bert(), bert_batches(2), average=True, steps=2, rho=[rho, 1.0], dtype=dtype).warnings
        for rho, dtype in ((1e-4, "float32"), (1e-4, "float64"), (1.0, "float32"))
    ]
    lost = [any("average at rho 0.0001 is not a measurement" in w for w in each) for each in told]
    assert lost == [True, False, False]
    assert not any("rho 1 " in w for each in told for w in each)


def test_what_rounding_makes_is_seen_in_fourth_differences() -> None:
    """Nothing of a cubic is left in them, and of errors of one size that size."""
    errors = 1e-9 * torch.randn(2003, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.linspace(-1e-2, 1e-2, 2003, dtype=torch.float64)
    cubic = 3 - x + 5 * x**2 - 7 * x**3
    assert rounding_in(cubic.tolist()) < 1e-15
    assert rounding_in((cubic + errors).tolist()) == pytest.approx(1e-9, rel=0.1)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_what_a_model_in_double_precision_rounds_inside_is_seen(family: str) -> None:
    """T5's norms are in single precision, and its loss is not: -3e-9 was told at 1e-3, where 4.5e-7 at 1e-2 is true.

    The average grows with the square of the radius.
    """
    model, batches = build(family), [batch_of(family)]
    told = score(model, batches, average=True, steps=10, rho=[1e-3, 1e-2]).warnings
    lost = [any(f"average at rho {rho:g} is not a measurement" in text for text in told) for rho in (1e-3, 1e-2)]
    assert lost == [family == "t5", False]
    worst = score(model, batches, rho=1e-8)
    assert worst.reproducible.ok is (family == "bert")
    assert any("use a larger radius" in text for text in worst.warnings) is (family == "t5")


def test_an_average_is_over_the_same_directions_at_all_radii() -> None:
    """To the last bit."""
    how: dict[str, Any] = {"average": True, "steps": 4, "reproducibility": False}
    for point in score(bert(), bert_batches(2), rho=(0.3, 0.1), **how).curve:
        assert point.geodesic_sharpness == score(bert(), bert_batches(2), rho=point.rho, **how).geodesic_sharpness


def test_a_climb_that_found_no_finite_loss_is_not_said_to_repeat() -> None:
    result = score(bert(), bert_batches(1), steps=3, rho=1e18)
    assert result.per_batch[0].stopped == "lost"
    assert result.reproducible.ok is False
    assert not any("larger radius" in w for w in result.warnings)


def test_in_double_precision_small_radii_are_resolved() -> None:
    for options in ({"rho": 1e-5}, {"rho": 1e-3, "labels": "model"}):
        assert score(bert(), bert_batches(2), steps=3, dtype="float64", **options).reproducible.ok is True


@pytest.mark.parametrize(
    ("stored", "dtype", "cast"),
    [(torch.float32, "float64", torch.float32), (torch.bfloat16, None, torch.bfloat16)],
)
def test_code_for_one_precision_alone_is_told_of(stored: torch.dtype, dtype: str | None, cast: torch.dtype) -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = bert()
            self.head = nn.Linear(2, 2)

        def forward(self, labels: Tensor, **batch: Tensor) -> Any:
            logits = self.head(self.body(**batch).logits.to(cast))
            return SimpleNamespace(loss=nn.functional.cross_entropy(logits.float(), labels), logits=logits)

    model = Casting().to(stored)
    with pytest.raises(ModelError, match=r"in which its code does not run \(.*same dtype.*\): it may cast"):
        quick(model, bert_batches(1), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {stored}


@pytest.mark.parametrize("rho", [1e-20, 1e20])
def test_radii_beyond_what_numbers_can_hold_are_refused(rho: float) -> None:
    with pytest.raises(UsageError, match="a radius lies between 1e-18 and 1e"):
        quick(bert(), bert_batches(1), rho=rho)


@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_a_rank_that_rounding_of_the_weights_has_raised_counts_in_no_precision(
    metric: str, stored: torch.dtype
) -> None:
    """Nor does the re-run from weights that are moved a little raise it."""
    model = bert().to(stored)
    value = model.bert.encoder.layer[0].attention.self.value.weight
    with torch.no_grad():
        value[:4] = torch.outer(torch.linspace(0.3, 1.1, 4, dtype=stored), torch.linspace(-0.7, 0.9, 8, dtype=stored))
    single, double = (
        score(model, bert_batches(1), metric=metric, rho=0.1, dtype=dtype) for dtype in ("float32", "float64")
    )
    assert single.pairs.reduced == double.pairs.reduced
    assert "copies 0 (rank 1)" in single.pairs.reduced[0]
    assert single.reproducible.ok
    assert double.reproducible.ok
    assert double.geodesic_sharpness == pytest.approx(single.geodesic_sharpness, rel=1e-4)


@pytest.mark.parametrize("seed", [1, 6])
def test_the_re_run_of_pairs_of_less_than_full_rank_is_of_that_rank(seed: int, tmp_path: Path) -> None:
    """The move by 1e-6 makes singular values as large as the cut-off, now and then larger: with these seeds."""
    model = adapter()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.outer(torch.linspace(0.3, 1.1, len(p)), torch.linspace(-0.7, 0.9, 3)))
    how: dict[str, Any] = {"metric": "mix", "rho": 0.1, "params": "lora", "seed": seed, "steps": 8}
    result = score(model, bert_batches(1), **how, output=tmp_path)
    assert len(result.pairs.reduced) == 4
    assert result.reproducible.ok
    # So it is in a run that goes on after the scores.
    (journal,) = tmp_path.glob("*.jsonl")
    *kept, last = journal.read_text().splitlines(keepends=True)
    assert '"stage": "reproducibility"' in last
    journal.write_text("".join(kept))
    assert score(model, bert_batches(1), **how, output=tmp_path).reproducible == result.reproducible


def test_reproducibility_can_be_left_out() -> None:
    result = quick(bert(), bert_batches(1), reproducibility=False)
    assert result.reproducible.ok is None
    assert result.curve[0].reproducible is None


# ------------------------------------------------------------------------------------------------------------- JSON


@pytest.fixture(scope="module")
def rich() -> SharpnessResult:
    return score(bert(), bert_batches(2), steps=2, rho=(0.1, 0.2), baselines=["adaptive", "euclidean"])


@pytest.fixture(scope="module")
def poor() -> SharpnessResult:
    return score(Perceptron(), POINTS, metric="euclidean", steps=1, reproducibility=False)


@pytest.mark.parametrize("which", ["rich", "poor"])
def test_a_result_survives_the_way_through_json(which: str, request: pytest.FixtureRequest) -> None:
    result: SharpnessResult = request.getfixturevalue(which)
    assert SharpnessResult.from_dict(result.to_dict()) == result
    text = result.to_json()
    assert SharpnessResult.from_dict(json.loads(text)) == result
    assert SharpnessResult.from_dict(json.loads(text)).to_json() == text
    assert "NaN" not in text
    assert "Infinity" not in text


def test_the_keys_of_a_result_are_stable(rich: SharpnessResult) -> None:
    assert list(rich.to_dict()) == [
        "schema", "geodesic_sharpness", "stderr", "interval95", "base_loss", "rho", "metric", "geodesic", "symmetries",
        "mode", "steps", "seed", "samples", "batch_size", "per_batch", "curve", "baselines", "pairs", "share",
        "reproducible", "passes", "seconds", "model", "data", "versions", "warnings", "ascent", "starts",
        "params", "damping", "per", "profile",
    ]  # fmt: skip
    data = rich.to_dict()
    assert list(data["per_batch"][0]) == [
        "index", "base_loss", "value", "steps", "converged", "passes", "stopped", "rises", "rough",
    ]  # fmt: skip
    assert list(data["reproducible"]) == ["ok", "spread", "how"]
    assert list(data["passes"]) == ["forwards", "backwards"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_json_never_holds_a_number_that_is_none(rich: SharpnessResult, value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dataclasses.replace(rich, base_loss=value).to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2"),
        ({"extra": 1}, r"unknown keys \['extra'\]"),
        ({"rho": None}, r"missing keys \['rho'\]"),
    ],
)
def test_another_record_is_refused(rich: SharpnessResult, change: dict[str, Any], message: str) -> None:
    data = {k: v for k, v in {**rich.to_dict(), **change}.items() if v is not None or k in ("stderr", "interval95")}
    with pytest.raises(DataError, match=message):
        SharpnessResult.from_dict(data)


def test_the_precision_is_recorded_and_scores_of_different_ones_are_not_compared() -> None:
    found = {dtype: score(bert(), bert_batches(2), steps=2, dtype=dtype) for dtype in (None, "float64")}
    assert [r.model["dtype"] for r in found.values()] == ["float32", "float64"]
    with pytest.raises(UsageError, match="dtype float64 here, float32"):
        check_comparable([Named(str(dtype), result) for dtype, result in found.items()])


@pytest.mark.parametrize(
    ("model", "data", "unit"),
    [
        ({"task": "text-classification"}, {}, "nats"),
        ({"task": "text-classification"}, {"labels": "regression"}, "units of the loss"),
        ({"task": "causal-lm"}, {"loss": "my.loss"}, "units of the loss"),
        ({"task": None}, {}, "units of the loss"),
        ({"task": None}, {"labels": "model"}, "nats"),
    ],
)
def test_only_losses_that_are_known_to_be_logarithms_are_in_nats(model: Any, data: Any, unit: str) -> None:
    assert unit_of(data, model) == unit


class Odd(nn.Module):
    """Not finite anywhere in the ball for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        far = (self.w - 1).abs().max() > 1e-3
        loss = (self.w * x).sum() ** 2 + 1
        return SimpleNamespace(loss=torch.where(far & (x[0, 0] < 0), torch.inf, loss))


def test_a_mean_over_batches_of_which_some_found_no_finite_loss_is_no_measurement() -> None:
    """The worst batch repeats, and yet the others are not 0."""
    batches = [{"x": torch.tensor([[s, 1.0]]), "labels": torch.zeros(1)} for s in (1.0, -1.0)]
    result = score(Odd(), batches, metric="euclidean", rho=0.5, steps=5)
    assert (result.lost, result.reproducible.ok) == (1, False)
    assert any("in 1 of 2 batches no finite loss above that at the weights was found" in t for t in result.warnings)


def test_far_too_large_radii_are_told_and_never_a_raw_error() -> None:
    """Vectors so long that their products are no numbers."""
    model, batches = bert(), bert_batches(1)
    for metric in ("inv", "mix", "adaptive", "euclidean"):
        for rho in (1e2, 1e5, 1e8, 1e12, 1e16):
            result = score(model, batches, metric=metric, rho=rho, steps=6, reproducibility=False)
            assert math.isfinite(result.geodesic_sharpness)
