"""With the callback and without it the trained weights are the same, bit for bit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DataCollatorForLanguageModeling, TrainerCallback

from hf_geosharp import GeodesicSharpnessCallback
from hf_geosharp.untouched import untouched
from tests.trainer.tiny import QUICK, VOCABULARY, bert, dataset, rows, trainer


class Draws(TrainerCallback):
    """Draws from every global generator after each step, as augmentations do."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float, float]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))


class OwnDice(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows that are augmented by a generator of the data set's own."""

    def __init__(self) -> None:
        self.rows, self.dice = rows(), np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self.rows[index])
        row["input_ids"] = [int(self.dice.integers(3, VOCABULARY)), *row["input_ids"][1:]]
        return row


def masked() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(vocab_size=22, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                   max_position_embeddings=8)
    )  # fmt: skip


def masker(seed: int | None) -> Any:
    from tests.tasks.tiny import make_tokenizer

    return DataCollatorForLanguageModeling(make_tokenizer(), seed=seed)


def texts() -> Any:
    return dataset(24).remove_columns("label")


def frozen() -> Any:
    model = bert()
    for p in model.bert.embeddings.parameters():
        p.requires_grad_(False)
    return model


def compiled() -> Any:
    model = bert()
    # What a Trainer reads off the signature of forward is hidden by the wrapper.
    model.accepts_loss_kwargs = False
    return torch.compile(model, backend="eager")


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "dropout": lambda: {"model": bert(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)},
    "accumulation": lambda: {"gradient_accumulation_steps": 3},
    "checkpointing": lambda: {"gradient_checkpointing": True, "model": bert(hidden_dropout_prob=0.2)},
    "frozen": lambda: {"model": frozen()},
    "bf16": lambda: {"bf16": True},
    "half-weights": lambda: {"model": bert().bfloat16()},
    "label-smoothing": lambda: {"label_smoothing_factor": 0.1},
    "compiled": lambda: {
        "model": compiled(), "remove_unused_columns": False, "label_names": ["labels"],
    },
    "compiled-by-the-trainer": lambda: {"torch_compile": True, "torch_compile_backend": "eager"},
    "masked": lambda: {
        "model": masked(), "data_collator": masker(None), "train_dataset": texts(), "eval_dataset": texts(),
    },
    "masked-by-seed": lambda: {
        "model": masked(), "data_collator": masker(7), "train_dataset": texts(), "eval_dataset": texts(),
    },
    "own-dice": lambda: {"train_dataset": OwnDice()},
    "sgd-momentum": lambda: {"optim": "sgd", "optim_args": "momentum=0.9"},
    "eval-on-start": lambda: {"eval_on_start": True},
}  # fmt: skip


def run(folder: Path, case: str, callback: GeodesicSharpnessCallback | None) -> tuple[Any, list[Any]]:
    dice = Draws()
    random.seed(1), np.random.seed(2)
    trained = trainer(folder, callbacks=[dice], **CASES[case]())
    if callback is not None:
        callback.attach(trained)
    trained.train()
    return trained, dice.drawn


def states(trained: Any) -> dict[str, torch.Tensor]:
    kept = dict(trained.model.state_dict())
    for i, state in enumerate(trained.optimizer.state.values()):
        kept.update({f"optimizer.{i}.{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)})
    return kept


def assert_same(a: tuple[Any, list[Any]], b: tuple[Any, list[Any]]) -> None:
    first, second = states(a[0]), states(b[0])
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert a[1] == b[1]
    for p, q in zip(a[0].model.parameters(), b[0].model.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad
        assert (p.grad is None) == (q.grad is None)
    assert [m.training for m in a[0].model.modules()] == [m.training for m in b[0].model.modules()]


QUICK_CASES = ("dropout", "half-weights", "masked-by-seed", "own-dice")


@pytest.mark.parametrize("case", [c if c in QUICK_CASES else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_the_training_is_the_same(tmp_path: Path, case: str) -> None:
    callback = GeodesicSharpnessCallback(**QUICK)
    assert_same(run(tmp_path, case, None), run(tmp_path, case, callback))
    assert len(callback.results) >= 2
    assert all(result.geodesic_sharpness > 0 for _, result in callback.results)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), "epoch"])
@pytest.mark.slow
def test_the_training_is_the_same_whenever_it_is_measured(tmp_path: Path, every: Any) -> None:
    callback = GeodesicSharpnessCallback(every=every, **QUICK)
    assert_same(run(tmp_path, "dropout", None), run(tmp_path, "dropout", callback))
    assert len(callback.results) == (12 if every == 1 else 2)


@pytest.mark.filterwarnings("ignore:.*could not be measured")
@pytest.mark.slow
def test_the_training_is_the_same_when_measurements_fail(tmp_path: Path) -> None:
    calls: list[int] = []

    def breaks(outputs: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        torch.rand(3), np.random.rand(3), random.random()
        # Six calls are the trial before the training, six more come before the first ascent, which ends in its middle.
        if len(calls) > 13:
            raise ArithmeticError("no")
        return nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="none")

    callback = GeodesicSharpnessCallback(loss=breaks, **QUICK)
    assert_same(run(tmp_path, "dropout", None), run(tmp_path, "dropout", callback))
    assert len(calls) > 14
    assert callback.results == []


@pytest.mark.slow
def test_layerwise_optimizers_do_not_step_in_a_measurement(tmp_path: Path) -> None:
    """Their gradient hooks would run in its backward passes, so a copy is measured."""
    stepped: list[Any] = []

    def hooked() -> Any:
        model = bert()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: stepped.append(p.detach().add_(p.grad, alpha=-0.01)))
        return model

    counts = []
    for attached in (False, True):
        stepped.clear()
        trained = trainer(tmp_path, model=hooked())
        callback = GeodesicSharpnessCallback(**QUICK)
        if attached:
            callback.attach(trained)
        trained.train()
        counts.append((len(stepped), [p.detach().clone() for p in trained.model.parameters()]))
    assert counts[0][0] == counts[1][0] > 0
    assert all(map(torch.equal, counts[0][1], counts[1][1]))
    assert callback.results[0][1].geodesic_sharpness > 0


@pytest.mark.slow
def test_accelerate_does_not_notice(tmp_path: Path) -> None:
    from accelerate.state import GradientState

    seen: list[Any] = []

    class Looks(TrainerCallback):
        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            state = GradientState()
            seen.append((len(state.dataloader_references), state.sync_gradients, state.end_of_dataloader))

    for attached in (False, True):
        trained = trainer(tmp_path, callbacks=[Looks()], gradient_accumulation_steps=2)
        if attached:
            GeodesicSharpnessCallback(**QUICK).attach(trained)
        before = len(GradientState().dataloader_references)
        trained.train()
        after = [(references - before, *rest) for references, *rest in seen[-2:]]
        seen[-2:] = [*after, len(trained.accelerator._dataloaders)]
    assert seen[:3] == seen[3:]


class TestUntouched:
    def test_global_generators_come_back(self) -> None:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        expected = random.random(), np.random.rand(), torch.rand(())
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        with contextlib.suppress(KeyError), untouched(seed=5):
            random.random(), np.random.rand(), torch.rand(())
            raise KeyError
        assert (random.random(), np.random.rand(), torch.rand(())) == expected

    def test_the_seed_decides_what_is_drawn_inside(self) -> None:
        drawn = []
        for _ in range(2):
            random.random(), np.random.rand(), torch.rand(())
            with untouched(seed=5):
                drawn.append((random.random(), np.random.rand(), torch.rand(())))
        assert drawn[0] == drawn[1]

    @pytest.mark.parametrize(
        ("make", "draw"),
        [
            (lambda: torch.Generator().manual_seed(0), lambda g: float(torch.rand((), generator=g))),
            (lambda: np.random.default_rng(0), lambda g: float(g.random())),
            (lambda: np.random.RandomState(0), lambda g: float(g.rand())),
            (lambda: random.Random(0), lambda g: g.random()),
        ],
    )
    def test_generators_of_an_object_come_back(self, make: Any, draw: Any) -> None:
        class Holder:
            def __init__(self) -> None:
                self.generator, self.later, self.other = make(), None, None

        outer = Holder()
        outer.other = Holder()  # type: ignore[assignment]
        with untouched(outer):
            draw(outer.generator), draw(outer.other.generator)  # type: ignore[attr-defined]
            outer.later = make()
        fresh = draw(make())
        assert draw(outer.generator) == draw(outer.other.generator) == fresh  # type: ignore[attr-defined]
        assert outer.later is None
