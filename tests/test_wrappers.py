"""A score is of the model that was written, whatever is around it to run it, and leaves all of that alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from hf_geosharp import inspect, score
from hf_geosharp.errors import UnsupportedModelError
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.result import SharpnessResult
from tests import worlds
from tests.sharpness.test_borrow import Snapshot
from tests.sharpness.tiny import bert, bert_batches

QUICK: dict[str, Any] = {"steps": 3, "reproducibility": False}


def values(result: SharpnessResult) -> list[float]:
    return [batch.value for batch in result.per_batch]


@pytest.fixture(autouse=True)
def _accelerate_of_its_own() -> Iterator[None]:
    """What a training before has left would decide the precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def under_autocast(model: nn.Module) -> nn.Module:
    prepared: nn.Module = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    return prepared


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),  # type: ignore[dict-item, return-value]
    "accelerate": under_autocast,
    "torch.compile inside DataParallel": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),  # type: ignore[arg-type]
    "DataParallel inside torch.compile": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_has_the_score_and_the_name_of_the_one_inside(name: str) -> None:
    alone = score(bert(), bert_batches(), **QUICK)
    inner = bert()
    wrapped = WRAPPERS[name](inner)
    forward = inner.__dict__.get("forward")
    found = score(wrapped, bert_batches(), **QUICK)
    assert values(found) == values(alone)
    assert found.model == alone.model
    assert inner.__dict__.get("forward") is forward
    assert inspect(wrapped, bert_batches(1), cached=False).model["class"] == "BertForSequenceClassification"


@pytest.mark.filterwarnings("ignore")
def test_a_model_wrapped_in_fsdp1_is_refused_by_name(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(bert(), device_id=torch.device("cpu"))
        with pytest.raises(UnsupportedModelError, match="FSDP1"):
            score(model, bert_batches(1), **QUICK)
    finally:
        dist.destroy_process_group()


def in_two_processes() -> None:
    """The scores of a rank by itself, of its model in DistributedDataParallel and without."""
    dist.init_process_group("gloo")
    world, rank = World(), int(os.environ["RANK"])
    batches = bert_batches(2, seed=rank)
    # Ranks that take unequal numbers of passes would wait for each other.
    alone = score(bert(), batches, world=world, steps=3 + rank, ascent="apgd")
    wrapped = nn.parallel.DistributedDataParallel(bert())
    # As in training: a pass of its own has gone before.
    loss = wrapped(**batches[0]).loss
    loss.backward()
    found = score(wrapped, batches, world=world, steps=3 + rank, ascent="apgd")
    dist.barrier()
    print(json.dumps([values(alone), values(found)]), flush=True)
    dist.destroy_process_group()


@pytest.mark.slow
def test_gradients_of_different_balls_are_not_averaged_over_processes() -> None:
    for alone, wrapped in worlds.results(2, "in_two_processes", module="tests.test_wrappers"):
        assert wrapped == alone


# --------------------------------------------------------------------------------------------------- hooks on gradients


def clamped(g: Tensor) -> Tensor:
    return g.clamp(-1e-4, 1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_hooks_on_gradients_neither_change_a_score_nor_are_set_off() -> None:
    alone = score(bert(), bert_batches(), **QUICK)
    model = bert()
    optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}
    seen: list[str] = []

    def step(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        seen.append("step")

    handles = [p.register_hook(clamped) for p in model.parameters()]
    handles += [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    handles += [m.register_full_backward_hook(lambda *_: seen.append("back")) for m in model.modules()]
    before = Snapshot(model)
    found = score(model, bert_batches(), **QUICK)
    before.check()
    assert values(found) == values(alone)
    assert seen == []
    # They are there again, and can be taken off.
    model(**bert_batches(1)[0]).loss.backward()
    assert {"step", "back"} <= set(seen)
    assert all(p.grad is None or float(p.grad.abs().max()) <= 1e-4 for p in model.parameters())
    for handle in handles:
        handle.remove()
    seen.clear()
    model(**bert_batches(1)[0]).loss.backward()
    assert seen == []


def test_hooks_are_back_after_an_error() -> None:
    model = bert()
    model.classifier.weight.register_hook(clamped)

    def broken(outputs: Any, batch: Any) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        score(model, bert_batches(1), loss=broken)
    assert list(model.classifier.weight._backward_hooks.values()) == [clamped]
