"""Batches in parts: what is cut and what is not, and that a loss in parts is the loss of the whole or is refused."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from benchmarks import subjects
from hf_geosharp import score
from hf_geosharp.errors import ModelError, UsageError
from hf_geosharp.sharpness.memory import MicroBatch
from hf_geosharp.sharpness.objective import Objective
from hf_geosharp.sharpness.parts import excerpt, other_cut, rows, same_by_another_cut, samples, uncut
from hf_geosharp.tasks.kinds import readings, task_of_model
from tests import worlds
from tests.sharpness.tiny import bert, bert_batches, gpt2, gpt2_batches, randomise

Batch = dict[str, Tensor]

SIZES = {
    "vocab_size": 20, "d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8,
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8, "max_position_embeddings": 12,
}  # fmt: skip


def bart_decoder() -> Any:
    return randomise(transformers.BartForCausalLM(transformers.BartConfig(**SIZES)))


def llava() -> Any:
    text = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    sight = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sight, image_size=4, patch_size=2),
        text_config=transformers.LlamaConfig(**text, max_position_embeddings=12),
        image_token_id=19, vision_feature_layer=-1,
    )  # fmt: skip
    return randomise(transformers.LlavaForConditionalGeneration(config))


def ctc() -> Any:
    config = transformers.Wav2Vec2Config(
        vocab_size=12, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, conv_dim=(8, 8),
        conv_stride=(4, 2), conv_kernel=(4, 2), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
    )  # fmt: skip
    return randomise(transformers.Wav2Vec2ForCTC(config), scale=0.2)


def texts() -> Batch:
    """Of unequal length, and not all of them with a label at their first token."""
    (batch,) = gpt2_batches(size=4)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, :1] = -100
    batch["input_ids"] = batch["input_ids"].clamp(max=18)
    return batch


def sounds() -> Batch:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1, 12, (4, 5), generator=generator)
    labels[0, 1:] = labels[2, 3:] = -100
    return {"input_values": torch.randn(4, 160, generator=generator), "labels": labels}


CASES = {
    "a decoder that shifts no labels": (bart_decoder, texts),
    "images and text, of no task that is known": (llava, texts),
    "sequences scored by a sum over samples": (ctc, sounds),
    "a language model that shifts them": (gpt2, texts),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_in_micro_batches_is_that_of_the_whole(case: str) -> None:
    build, data = CASES[case]
    model, batch = build(), data()
    with torch.no_grad():
        expected = float(model(**batch).loss)
    for size in (1, 2, 3):
        objective = Objective(model, batch, weight=partial(readings, task_of_model(model)), micro_batch=size)
        assert objective.evaluate(False) == pytest.approx(expected, rel=2e-6)
    objective.evaluate(True)
    mine = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(**batch).loss.backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(mine[name], p.grad, rtol=1e-3, atol=1e-5)


def weighted(outputs: Any, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, batch["labels"], weight=torch.tensor([5.0, 1.0, 0.2]))


def contrastive(outputs: Any, batch: Batch) -> Tensor:
    similar = outputs.logits @ outputs.logits.mT
    return nn.functional.cross_entropy(similar, torch.arange(len(similar)))


@pytest.mark.parametrize("labels", [[0, 1, 2, 0, 1, 2], [1, 1, 1, 1, 2, 0]])
@pytest.mark.parametrize("loss", [weighted, contrastive])
def test_a_loss_that_is_not_made_of_those_of_its_samples_is_refused_in_parts(loss: Any, labels: list[int]) -> None:
    """Also where the first samples are of one class, by which a weight cannot be told."""
    model, (batch,) = bert(), bert_batches(1)
    batch["labels"] = torch.tensor(labels)
    options: dict[str, Any] = {"loss": loss, "steps": 2, "reproducibility": False, "metric": "adaptive"}
    assert score(model, [batch], **options).geodesic_sharpness > 0
    with pytest.raises(UsageError, match="not made of the losses of each"):
        score(model, [batch], micro_batch=2, **options)


class Rounding(nn.Module):
    """Losses near 0 that are rounded otherwise with two samples than with one, as kernels do."""

    def __init__(self, error: float, between: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.error, self.between = error, between

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        losses = x * self.scale + self.error * (len(x) > 1)
        # What samples have to do with each other: nothing where they are the same.
        return SimpleNamespace(loss=losses.mean() + self.between * losses.var(unbiased=False))


def in_parts(model: nn.Module) -> float:
    batch = {"x": torch.tensor([0.001, 0.006, 0.002, 0.004]), "labels": torch.tensor([0, 1, 0, 1])}
    return Objective(model, batch, micro_batch=1).evaluate(False)


def test_rounding_is_not_taken_for_a_loss_that_has_no_parts() -> None:
    """3e-5 of the smallest loss that counts were seen of a trained vision transformer in float32."""
    assert in_parts(Rounding(5e-7)) == pytest.approx(0.00325, rel=1e-6)
    # What rounding does not explain, and what it could not make.
    for model in (Rounding(0.0, between=0.1), Rounding(5e-7, between=1.0), Rounding(1e-4)):
        with pytest.raises(UsageError, match="not made of the losses of each"):
            in_parts(model)


@pytest.mark.parametrize("name", ["digits-vit", "digits-vit-twin"])
@pytest.mark.slow
def test_pairs_of_a_trained_model_are_settled_whatever_their_losses(name: str) -> None:
    """Of the training images most have losses near 0, and the twin rounds them ten times as much: by 4e-6 at most."""
    model, (whole,) = subjects.demo(name)
    with torch.no_grad():
        for first in range(0, 128, 2):
            pair = rows(whole, first, first + 2)
            expected = float(model(**pair).loss)
            assert Objective(model, pair, micro_batch=1).evaluate(False) == pytest.approx(expected, abs=1e-5)


def test_a_mean_over_tokens_of_the_callers_is_told_from_one_over_samples() -> None:
    def by_token(outputs: Any, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def by_sample(outputs: Any, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits[:, :-1].mT, batch["labels"][:, 1:], reduction="none").sum(1)

    for loss in (by_token, by_sample):
        whole, parts = (
            score(gpt2(), [texts()], loss=loss, steps=2, metric="adaptive", reproducibility=False, micro_batch=size)
            for size in (None, 1)
        )
        assert parts.base_loss == pytest.approx(whole.base_loss, rel=1e-6)


def test_what_a_loss_is_a_mean_over_is_proved_once_where_it_is_sure() -> None:
    model, micro = gpt2(), MicroBatch(2)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    weight = partial(readings, task_of_model(model))
    for batch, passes in ((texts(), 3 + 2), (texts(), 2)):
        calls.clear()
        Objective(model, batch, weight=weight, micro_batch=micro).evaluate(False)
        assert len(calls) == passes


# -------------------------------------------------------------------------------------------- what is not by samples

PATCHES = {
    "pixel_values": torch.zeros(40, 6),
    "image_grid_thw": torch.ones(4, 3, dtype=torch.long),
    "input_ids": torch.arange(12).reshape(4, 3),
    "labels": torch.arange(12).reshape(4, 3),
    "position_ids": torch.arange(3)[None],
}


def test_samples_are_counted_by_labels_or_tokens_and_not_by_patches() -> None:
    assert samples(PATCHES) == 4
    assert samples({"pixel_values": torch.zeros(5, 3), "number": torch.tensor(1)}) == 5


def test_numbers_that_all_samples_share_are_not_counted() -> None:
    assert samples({"scale": torch.tensor(2.0), "x": torch.zeros(4, 2)}) == 4


def test_a_batch_of_patches_has_no_parts() -> None:
    assert uncut(PATCHES) == "'pixel_values' has 40 rows for 4 samples"
    assert excerpt(PATCHES, 0, 2).keys() == PATCHES.keys()
    assert all(excerpt(PATCHES, 0, 2)[name] is PATCHES[name] for name in PATCHES)


def test_what_all_samples_share_and_what_only_the_loss_reads_is_in_every_part() -> None:
    batch = {k: v for k, v in PATCHES.items() if k != "pixel_values"} | {"_weights": torch.ones(7)}
    assert uncut(batch) is None
    part = rows(batch, 1, 3)
    assert {k: len(v) for k, v in part.items()} == {
        "image_grid_thw": 2, "input_ids": 2, "labels": 2, "position_ids": 1, "_weights": 7
    }  # fmt: skip


class Patched(nn.Module):
    """Two patches for each of its samples, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.see, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SimpleNamespace:
        seen = self.see(pixel_values).reshape(len(labels), 2, 4).mean(1)
        logits = self.head(torch.tanh(seen))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def test_a_model_of_patches_is_scored_at_once_and_refused_in_parts() -> None:
    batch = {
        "pixel_values": torch.randn(8, 3, generator=torch.Generator().manual_seed(1)),
        "labels": torch.arange(4) % 2,
    }
    result = score(Patched(), [batch], steps=3)
    assert result.geodesic_sharpness > 0
    assert (result.samples, result.batch_size) == (4, 4)
    with pytest.raises(UsageError, match=r"'pixel_values' has 8 rows for 4 samples, .*leave out micro_batch"):
        score(Patched(), [batch], steps=3, micro_batch=2)


# ---------------------------------------------------------------------------------------------------- random numbers


class Drawing(nn.Module):
    """Part of its output is drawn in eval mode too, as models do that look at some of an image's patches only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.head(x * (torch.rand(x.shape) > 0.5))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


@pytest.mark.parametrize("average", [False, True])
def test_a_model_that_draws_random_numbers_draws_the_same_at_every_point(average: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(8, 3, generator=generator), "labels": torch.arange(8) % 2}
    model = Drawing()
    before = torch.get_rng_state()
    # So close to its weights that other draws would be all that changes the loss.
    result = score(model, [batch], rho=1e-6, average=average, steps=6)
    assert abs(result.geodesic_sharpness) < 1e-5
    assert torch.equal(torch.get_rng_state(), before)


# --------------------------------------------------------------------------------------------------------- other cuts


def test_another_cut_has_every_sample_once_and_other_neighbours() -> None:
    for count, size in ((8, 1), (8, 2), (9, 4), (5, 3), (2, 1)):
        cut = other_cut(count, size)
        assert sorted(i for part in cut for i in part) == list(range(count))
        usual = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
        assert {frozenset(part) for part in cut} != {frozenset(part) for part in usual}


def rare(outputs: Any, batch: Batch) -> Tensor:
    """The first two classes have the same weight, the third another."""
    return nn.functional.cross_entropy(outputs.logits, batch["labels"], weight=torch.tensor([1.0, 1.0, 20.0]))


def ignoring(outputs: Any, batch: Batch) -> Tensor:
    """Leaves out a class that only the loss knows of."""
    return nn.functional.cross_entropy(outputs.logits, batch["labels"], ignore_index=2)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("loss", [rare, ignoring])
def test_what_two_samples_do_not_show_is_seen_by_another_cut(loss: Any, size: int) -> None:
    model, (batch,) = bert(), bert_batches(1, size=8)
    batch["labels"] = torch.tensor([0, 1, 0, 2, 1, 0, 2, 1])
    options: dict[str, Any] = {"loss": loss, "steps": 2, "reproducibility": False, "metric": "adaptive"}
    assert score(model, [batch], **options).geodesic_sharpness > 0
    if loss is ignoring and size == 1:
        # A part of nothing but what is left out has no mean.
        with pytest.raises(ModelError, match="any step is nan"):
            score(model, [batch], micro_batch=size, **options)
    else:
        with pytest.raises(UsageError, match="from other parts of the same batch"):
            score(model, [batch], micro_batch=size, **options)


@pytest.mark.parametrize(
    ("value", "other", "dtype", "rounding", "same"),
    [
        (2.0, 2.0 + 1e-5, torch.float32, None, True),  # half of 1e-5 of it: nobody asks what rounding makes
        (2.0, 2.0 + 1e-3, torch.float32, 4e-4, False),
        (2.0, 2.0 + 1e-3, torch.float32, 6e-4, True),
        (2.0 + 1e-3, 2.0, torch.float32, 6e-4, True),
        (2.0, 2.0 + 3e-3, torch.float32, None, False),  # more than rounding can make
        (2.0, 2.0 + 3e-3, torch.bfloat16, None, True),
        (2.0, 2.1, torch.bfloat16, None, False),
        (1e-4, 1e-4 + 9e-8, torch.float32, None, True),  # held against 0.01
        (1e-4, 1.5e-4, torch.float32, None, False),
        (-2.0, -2.1, torch.float32, None, False),
        (math.nan, 2.0, torch.float32, None, True),
        (2.0, math.inf, torch.float32, None, True),
    ],
)
def test_what_another_cut_may_differ_by(
    value: float, other: float, dtype: torch.dtype, rounding: float | None, same: bool
) -> None:
    """What rounding makes is asked for only where it is in question, and counts twice."""

    def made() -> float:
        assert rounding is not None
        return rounding

    with nullcontext() if same else pytest.raises(UsageError, match="from other parts of the same batch"):
        same_by_another_cut(value, other, dtype, made)


def test_labels_that_are_left_out_are_no_terms_of_a_classifier_s_loss() -> None:
    model, (batch,) = bert(), bert_batches(1, size=8)
    batch["labels"] = torch.tensor([0, -100, 1, 2, -100, -100, 1, 0])
    options: dict[str, Any] = {"steps": 2, "reproducibility": False, "metric": "adaptive"}
    whole = score(model, [batch], **options)
    for size in (1, 3):
        parts = score(model, [batch], micro_batch=size, **options)
        assert parts.base_loss == pytest.approx(whole.base_loss, rel=1e-6)
        assert parts.geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=1e-4)


def of_each_sample(outputs: Any, batch: Batch) -> Tensor:
    """The losses of the samples, 0 where the label is left out."""
    return nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="none")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_losses_of_samples_that_are_zero_where_labels_are_left_out_are_terms_too(size: int) -> None:
    model, (batch,) = bert(), bert_batches(1, size=8)
    batch["labels"] = torch.tensor([0, 1, -100, 2, 1, -100, 0, 2])
    options: dict[str, Any] = {"loss": of_each_sample, "steps": 2, "reproducibility": False, "metric": "adaptive"}
    whole, parts = (score(model, [batch], micro_batch=n, **options) for n in (None, size))
    assert parts.base_loss == pytest.approx(whole.base_loss, rel=1e-6)


def test_readings_that_differ_in_nothing_so_far_are_not_proved_again() -> None:
    """And those that differ in another batch are."""
    micro, (batch,) = MicroBatch(2), bert_batches(1, size=4)
    weight = partial(readings, task_of_model(bert()))
    calls: list[int] = []
    model = bert()
    model.register_forward_hook(lambda *_: calls.append(1))
    left_out = {**batch, "labels": torch.tensor([0, -100, 1, 2])}
    for one, passes in ((batch, 3 + 2), (batch, 2), (left_out, 5 + 2), (batch, 2), (left_out, 2)):
        calls.clear()
        Objective(model, one, weight=weight, micro_batch=micro).evaluate(False)
        assert len(calls) == passes


def out_of_memory_above(limit: int) -> Any:
    """A model that has no memory for more samples than that without gradients, as one that barely fits."""
    model = bert()

    def check(module: Any, args: Any, kwargs: Any) -> None:
        if len(kwargs["input_ids"]) > limit and not torch.is_grad_enabled():
            raise RuntimeError("out of memory: too many samples")

    model.register_forward_pre_hook(check, with_kwargs=True)
    return model


@pytest.mark.parametrize("size", [1, "auto"])
def test_other_parts_that_do_not_fit_are_left_out(size: Any) -> None:
    (batch,) = bert_batches(1, size=6)
    options: dict[str, Any] = {"steps": 2, "reproducibility": False, "metric": "adaptive"}
    whole = score(bert(), [batch], **options)
    parts = score(out_of_memory_above(1), [batch], micro_batch=size, **options)
    assert parts.geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=1e-4)


def learnt_apart(limits: str) -> None:
    """Two ranks that share samples, of which each has the memory for another number of them."""
    dist.init_process_group("gloo")
    model = bert()

    def check(module: Any, args: Any, kwargs: Any) -> None:
        if len(kwargs["input_ids"]) > int(limits.split()[dist.get_rank()]):
            raise RuntimeError("out of memory: too many samples")

    model.register_forward_pre_hook(check, with_kwargs=True)
    (batch,) = bert_batches(1, size=12)
    options: dict[str, Any] = {"steps": 2, "reproducibility": False, "metric": "adaptive", "shard": "samples"}
    print(json.dumps(score(model, [batch], micro_batch="auto", verify=False, **options).geodesic_sharpness))


@pytest.mark.slow
@pytest.mark.parametrize("limits", ["99 3", "3 99", "1 99", "1 1"])
def test_ranks_that_have_learnt_different_sizes_agree_on_one_cut(limits: str) -> None:
    (batch,) = bert_batches(1, size=12)
    whole = score(bert(), [batch], steps=2, reproducibility=False, metric="adaptive").geodesic_sharpness
    for found in worlds.results(2, "learnt_apart", limits, module="tests.sharpness.test_parts"):
        assert found == pytest.approx(whole, rel=1e-4)
