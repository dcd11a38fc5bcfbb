"""What is folded must leave the loss of every batch as it is, whatever the samples were that it was proved on."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from hf_geosharp import SharpnessResult, score
from hf_geosharp.errors import GeosharpError, GeosharpWarning, ModelError
from hf_geosharp.sharpness.base_point import BasePoint
from hf_geosharp.sharpness.objective import Objective
from hf_geosharp.sharpness.parts import padded, structure
from tests import worlds
from tests.sharpness.tiny import bert, bert_batches, gpt2, randomise
from tests.versions import TORCH, needs_fully_shard

WORDS, WIDTH, CLASSES = 20, 6, 3


def quick(model: Any, data: Any, **changes: Any) -> SharpnessResult:
    return score(model, data, **{"steps": 3, "rho": 0.03, "reproducibility": False, **changes})


class LeavesOut(nn.Module):
    """Attention that leaves out word 0 after its softmax: a bias of its values is no constant where that word is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for part in (self.embed, self.q, self.k, self.v, self.o, self.head):
                part.reset_parameters()
        randomise(self)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        weights = torch.softmax(self.q(x) @ self.k(x).mT / WIDTH**0.5, dim=-1)
        weights = weights * (input_ids != 0)[:, None].to(weights)
        y = torch.tanh(x + self.o(weights @ self.v(x)))
        logits = self.head(y.mean(1))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def words(*left_out: int, seed: int = 0) -> dict[str, Tensor]:
    """Ten texts of 15 words; those given have word 0 in them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (10, 15), generator=generator)
    ids[list(left_out), 2] = 0
    return {"input_ids": ids, "labels": torch.randint(CLASSES, (10,), generator=generator)}


@pytest.mark.parametrize("batches", [[words(), words(4, seed=1)], [words(5)]], ids=["another batch", "other rows"])
def test_another_function_is_not_scored(batches: list[dict[str, Tensor]]) -> None:
    model = LeavesOut().double()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(
        ModelError, match=rf"batch {len(batches) - 1}: its loss is .*once symmetries are divided out.*'paper'"
    ):
        quick(model, batches)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_where_nothing_is_folded_the_loss_is_that_of_the_model() -> None:
    model, batches = LeavesOut().double(), [words(), words(4, seed=1)]
    result = quick(model, batches, symmetries="paper")
    with torch.no_grad():
        expected = [float(model(**batch).loss) for batch in batches]
    assert [batch.base_loss for batch in result.per_batch] == pytest.approx(expected, rel=1e-12)


def test_a_fold_that_does_not_hold_on_the_samples_looked_at_is_dropped() -> None:
    model, batch = LeavesOut().double(), words(0)
    result = quick(model, [batch])
    assert "value_bias" not in result.pairs.folded
    with torch.no_grad():
        assert result.base_loss == pytest.approx(float(model(**batch).loss), rel=1e-12)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_on_the_left_is_looked_at_wherever_it_is(implementation: str) -> None:
    model = gpt2(attn_implementation=implementation).double()
    ids = torch.randint(3, 20, (16, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[6:9, :4] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    with torch.no_grad():
        expected = float(model(**batch).loss)
    with (
        pytest.warns(GeosharpWarning, match="symmetry dropped: .*value_bias")
        if implementation == "sdpa" and TORCH >= (2, 5)  # before, rows without keys attend to all of them
        else nothing()
    ):
        result = quick(model, [batch])
    assert result.base_loss == pytest.approx(expected, rel=1e-5)


def nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


class Clips(nn.Module):
    """Attention without biases, whose values are clipped, as for half precision: no symmetry where they are large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24, bias=False) for _ in range(4))
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> SimpleNamespace:
        q, k, v = (part(x).unflatten(-1, (4, 6)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = torch.softmax(q @ k.mT / 6**0.5, dim=-1) @ v.clamp(-20, 20)
        y = self.head(x + self.o(mixed.transpose(1, 2).flatten(2)))
        return SimpleNamespace(loss=(y / (1 + y.abs())).square().mean())


def of_size(size: float, seed: int) -> dict[str, Tensor]:
    x = torch.randn(4, 7, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"x": size * x}


@pytest.mark.parametrize("order", [(1.0, 30.0), (30.0, 1.0), (1.0, 1.0, 30.0)])
def test_pairs_that_do_not_hold_on_the_last_batch_are_dropped(order: tuple[float, ...]) -> None:
    batches = [of_size(size, seed) for seed, size in enumerate(order)]
    model = Clips().double()
    result = quick(model, batches)
    assert result.pairs.by_kind == {"qk GL(6)": 4}
    with torch.no_grad():
        stored = [float(model(batch["x"]).loss) for batch in batches]
    assert [batch.base_loss for batch in result.per_batch] == pytest.approx(stored, rel=1e-9)


def test_pairs_that_do_not_hold_on_another_batch_are_an_error() -> None:
    """Its loss would be that of another function; without a fold, too, and where moving the pairs excuses itself."""
    batches = [of_size(1.0, 0), of_size(30.0, 1), of_size(1.0, 2)]
    with pytest.raises(ModelError, match=r"batch 1: its loss is .*divided out.*vo: outputs move by .* without this"):
        quick(Clips().double(), batches)


class RoundsInside(LeavesOut):
    """The same without a word that is left out, and with attention in half precision."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        q, k, v = (part(x).bfloat16() for part in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.mT / WIDTH**0.5, dim=-1)
        logits = self.head(torch.tanh(x + self.o((weights @ v).to(x.dtype))).mean(1))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounding_inside_a_model_is_no_other_function(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    real = BasePoint.check_function

    def counted(self: BasePoint, *arguments: Any) -> None:
        looked.append(len(arguments))
        real(self, *arguments)

    monkeypatch.setattr(BasePoint, "check_function", counted)
    model, batches = RoundsInside(), [words(seed=seed) for seed in range(8)]
    result = quick(model, batches, dtype=dtype)
    assert set(result.pairs.folded) == {"key_bias", "value_bias"}
    # What folding rounds otherwise is more than what it does to a model that does not round inside.
    assert looked
    with torch.no_grad():
        stored = [float(model(**batch).loss) for batch in batches]
    assert [batch.base_loss for batch in result.per_batch] == pytest.approx(stored, rel=0.01)


@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float64])
def test_masks_tell_batches_apart_however_they_are_written(kind: torch.dtype) -> None:
    mask = torch.tensor([[1, 1], [0, 1]], dtype=kind)
    assert structure({"x": torch.rand(2, 2), "mask": mask}) is None
    assert structure({"x": torch.rand(2, 2), "labels": torch.tensor([1, 0])}) is not None


def test_of_images_one_batch_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    real = Objective.evaluate

    def counted(self: Objective, gradient: Any) -> float:
        passes.append(gradient)
        return real(self, gradient)

    monkeypatch.setattr(Objective, "evaluate", counted)
    quick(bert(), bert_batches(3), steps=1)
    assert sum(gradient is False for gradient in passes) == 3 + 3  # the last step of each has no gradient
    passes.clear()
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    vit = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_labels=3, **size))
    generator = torch.Generator().manual_seed(0)
    batches = [
        {"pixel_values": torch.rand(4, 3, 8, 8, generator=generator), "labels": torch.tensor([0, 1, 2, i])}
        for i in range(3)
    ]
    assert quick(randomise(vit), batches, steps=1).pairs.folded
    assert sum(gradient is False for gradient in passes) == 1 + 3
    images = [{"pixels": torch.rand(2, 3, 4, 4), "labels": torch.tensor([i, 1])} for i in range(3)]
    assert len({structure(batch) for batch in images}) == 1
    assert structure(images[0]) != structure({**images[0], "pixels": torch.rand(2, 3, 4, 6)})
    assert structure(bert_batches(1)[0]) is None


def test_padded_samples() -> None:
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 0], [0, 0, 1]])
    batch = {"input_ids": torch.randint(3, 9, (4, 3)), "attention_mask": mask, "pixels": torch.rand(4, 3)}
    assert padded(batch, 0) == [1, 3]
    assert padded(batch, -1) == [2]
    assert padded({**batch, "attention_mask": mask.bool()}, 0) == [1, 3]
    assert padded({**batch, "attention_mask": mask.double()}, 0) == [1, 3]
    assert padded({**batch, "attention_mask": torch.ones(4, 3), "token_type_ids": mask}, 0) == []


def two_ranks(how: str) -> None:
    """What two processes come to on a batch where a fold is another function."""
    dist.init_process_group("gloo")
    model = LeavesOut().double()
    if how == "sharded":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for part in (model.q, model.k, model.v, model.o, model.head):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    try:
        result = quick(model, [words(), words(4, seed=1)], shard="samples" if how == "samples" else "batches")
        print(json.dumps(result.warnings))
    except GeosharpError as error:
        print(json.dumps([str(error)]))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["batches", "samples", pytest.param("sharded", marks=needs_fully_shard)])
def test_several_processes_see_it_too(how: str) -> None:
    told = worlds.results(2, "two_ranks", how, module="tests.sharpness.test_folds")
    assert all(any("batch 1: its loss is" in text for text in each) for each in told), told
