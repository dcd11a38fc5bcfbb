"""What is measured on: which rows, which columns, which loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback

from hf_geosharp import GeodesicSharpnessCallback, score
from hf_geosharp.errors import DataError, GeosharpWarning, ModelError, UsageError
from tests.sharpness.tiny import randomise
from tests.trainer.tiny import QUICK, bert, dataset, rows, trainer

KEY = "eval_geodesic_sharpness"


def measured(folder: Path, callback: GeodesicSharpnessCallback, attach: bool = True, **changes: Any) -> float:
    """The first value of a training of one epoch."""
    callbacks = None if attach else [callback]
    trained = trainer(folder, num_train_epochs=1, callbacks=callbacks, **changes)
    if attach:
        callback.attach(trained)
    trained.train()
    return callback.results[0][1].geodesic_sharpness


def batch(found: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.tensor([row["input_ids"] for row in found]),
        "attention_mask": torch.tensor([row["attention_mask"] for row in found]),
        "labels": torch.tensor([row["label"] for row in found]),
    }


@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.slow
def test_the_rows_are_drawn_by_the_seed_out_of_the_training_data(tmp_path: Path, attach: bool) -> None:
    drawn: list[list[list[int]]] = []

    def run(seed: int) -> None:
        seen: list[list[int]] = []

        def watches(outputs: Any, batch: Any) -> torch.Tensor:
            seen.extend(batch["_number"].tolist())
            return nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="none")

        data = [{**row, "number": [i], "input_ids": row["input_ids"]} for i, row in enumerate(rows(24))]
        callback = GeodesicSharpnessCallback(**{**QUICK, "seed": seed}, loss=watches)
        trained = trainer(
            tmp_path, kind=IgnoresNumbers, train_dataset=data, remove_unused_columns=False, num_train_epochs=1,
            eval_strategy="no", callbacks=None if attach else [callback],
        )  # fmt: skip
        if attach:
            callback.attach(trained)
        with pytest.warns(GeosharpWarning):
            trained.train()
        drawn.append(seen)

    run(0), run(0), run(1)
    assert drawn[0] == drawn[1] != drawn[2]


class IgnoresNumbers(Trainer):
    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        inputs.pop("number", None)
        return super().compute_loss(model, inputs, **kwargs)


def test_numbers_may_be_those_of_numpy(tmp_path: Path) -> None:
    trained = trainer(tmp_path, num_train_epochs=1)
    numbers = {"samples": np.int64(8), "batch_size": np.int64(4), "seed": np.int64(1), "every": np.int64(3)}
    callback = GeodesicSharpnessCallback(**{**QUICK, **numbers}).attach(trained)
    trained.train()
    assert [step for step, _ in callback.results] == [3, 6]
    assert json.loads(callback.results[0][1].to_json())["data"]["batch_size"] == 4


def test_batches_given_are_used_as_they_are(tmp_path: Path) -> None:
    given = [batch(rows(6, 5)), batch(rows(6, 6))]
    trained = trainer(tmp_path, model=randomise(bert(), scale=0.8))
    GeodesicSharpnessCallback(given, steps=2, reproducibility=False).attach(trained)
    expected = score(trained.model, given, steps=2, reproducibility=False).geodesic_sharpness
    assert trained.evaluate()[KEY] == pytest.approx(expected, rel=1e-4)


def test_a_loader_of_batches(tmp_path: Path) -> None:
    loader = DataLoader(rows(12, 5), batch_size=6, collate_fn=batch, shuffle=True)
    callback = GeodesicSharpnessCallback(loader, **{**QUICK, "samples": 12})
    assert measured(tmp_path, callback) > 0
    assert callback.results[0][1].batch_size == 6


@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.parametrize("ready", [True, False])
def test_another_data_set_goes_through_the_collator_without_unused_columns(
    tmp_path: Path, attach: bool, ready: bool
) -> None:
    other = dataset(12, 9, text=lambda i: f"a text that no model takes {i}")
    callback = GeodesicSharpnessCallback(other, **QUICK)
    trained = trainer(tmp_path, train_dataset=dataset(24), callbacks=None if attach else [callback], num_train_epochs=1)
    if attach:
        callback.attach(trained)
    if ready:
        trained.train()
    elif attach:
        trained.evaluate()
    else:
        with pytest.raises(UsageError, match="attach"):
            trained.evaluate()
        return
    assert callback.results[0][1].data["rows"] == 12
    assert callback.results[0][1].data["id"] == "data"


def test_few_rows_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(GeosharpWarning, match="24 rows, not the 1000"):
        measured(tmp_path, GeodesicSharpnessCallback(**{**QUICK, "samples": 1000}))


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(rows(24))


@pytest.mark.parametrize(
    ("changes", "settings", "error", "message"),
    [
        ({"train_dataset": Stream(), "max_steps": 3}, {}, UsageError, "stream"),
        ({}, {"samples": 100, "batch_size": 50}, DataError, "24 rows .* Lower batch_size"),
        ({}, {"data": [{"wrong": torch.ones(4, 2)}]}, DataError, "takes no 'wrong'"),
        ({}, {"data": []}, DataError, "empty"),
        ({}, {"data": dataset(12).remove_columns("label")}, ModelError, "no loss"),
        ({}, {"data": dataset(12, 0, x=lambda i: 1).select_columns(["x"])}, DataError, "none of which"),
        ({}, {"loss": lambda outputs, batch: 1.0}, UsageError, "tensor"),
        ({"data_collator": lambda found: (1, 2)}, {}, DataError, "collator makes a tuple"),
        ({}, {"data": rows(12)}, DataError, r"a list, not a tensor.*Dataset\.from_list"),
    ],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_what_cannot_be_measured_on_is_refused_at_the_start(
    tmp_path: Path, changes: Any, settings: Any, error: type[Exception], message: str
) -> None:
    trained = trainer(tmp_path, **changes)
    GeodesicSharpnessCallback(**{**QUICK, **settings}).attach(trained)
    with pytest.raises(error, match=message):
        trained.train()
    assert trained.state.global_step == 0


# ---------------------------------------------------------------------------------------------------------- the loss


class Weighted(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([5.0, 1.0, 1.0]))
        return (loss, outputs) if return_outputs else loss


def own_function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return 3 * nn.functional.cross_entropy(outputs["logits"], labels)


def smoothed(outputs: Any, batch: Any) -> torch.Tensor:
    logs = torch.log_softmax(outputs.logits, -1)
    nll = -logs.gather(1, batch["labels"][:, None])[:, 0]
    return 0.7 * nll - 0.3 * logs.mean(-1)


def weighted(outputs: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits, batch["labels"], weight=torch.tensor([5.0, 1.0, 1.0]))


def tripled(outputs: Any, batch: Any) -> torch.Tensor:
    return 3 * nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="none")


@pytest.mark.parametrize(
    ("changes", "oracle"),
    [
        ({"label_smoothing_factor": 0.3}, smoothed),
        ({"compute_loss_func": own_function}, tripled),
        ({"kind": Weighted}, weighted),
    ],
)
def test_the_trainers_loss_is_measured_when_asked_for(tmp_path: Path, changes: Any, oracle: Any) -> None:
    data = dataset(24)
    whole = [batch([data[i] for i in range(24)])]
    trained = trainer(tmp_path, model=randomise(bert(), scale=0.8), train_dataset=data, **changes)
    settings = {"steps": 3, "reproducibility": False}
    callback = GeodesicSharpnessCallback(samples=24, batch_size=24, micro_batch=24, loss="trainer", **settings)
    callback.attach(trained)
    expected = score(trained.model, whole, loss=oracle, **settings).geodesic_sharpness
    assert expected != pytest.approx(score(trained.model, whole, **settings).geodesic_sharpness, rel=0.02)
    assert trained.evaluate()[KEY] == pytest.approx(expected, rel=2e-3)
    ((_, result),) = callback.results
    assert result.data["loss"] == "trainer"


@pytest.mark.parametrize(
    ("changes", "how"),
    [({"label_smoothing_factor": 0.3}, "smooths labels"), ({"compute_loss_func": own_function}, "compute_loss_func"),
     ({"kind": Weighted}, "Weighted")],
)  # fmt: skip
def test_by_default_the_models_own_is_measured_and_said_so(
    tmp_path: Path, changes: Any, how: str, recwarn: pytest.WarningsRecorder
) -> None:
    trained, plain = trainer(tmp_path, **changes), trainer(tmp_path)
    GeodesicSharpnessCallback(**QUICK).attach(plain)
    GeodesicSharpnessCallback(**QUICK).attach(trained)
    expected = plain.evaluate()[KEY]
    with pytest.warns(GeosharpWarning, match=rf"{how}.*loss='trainer'"):
        assert trained.evaluate()[KEY] == expected
    silent = trainer(tmp_path, **changes)
    GeodesicSharpnessCallback(**QUICK, loss="model").attach(silent)
    recwarn.clear()
    assert silent.evaluate()[KEY] == expected
    assert not [w for w in recwarn if issubclass(w.category, GeosharpWarning)]


def test_a_loss_that_is_not_made_of_the_losses_of_samples_is_refused_at_the_start(tmp_path: Path) -> None:
    """As the measurement would do after the first epochs; it needs as many samples at once as a batch has."""
    settings = {**QUICK, "batch_size": 8, "loss": "trainer"}
    trained = trainer(tmp_path, kind=Weighted)
    GeodesicSharpnessCallback(**settings).attach(trained)
    with pytest.raises(UsageError, match="micro_batch as large as the batch"):
        trained.train()
    assert trained.state.global_step == 0
    assert measured(tmp_path, GeodesicSharpnessCallback(**settings, micro_batch=8), kind=Weighted) > 0


class LossAlone(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(**inputs).loss


def test_the_trainers_loss_comes_with_outputs(tmp_path: Path) -> None:
    trained = trainer(tmp_path, kind=LossAlone)
    GeodesicSharpnessCallback(**QUICK, loss="trainer").attach(trained)
    with pytest.raises(UsageError, match=r"LossAlone returns a Tensor.*needs \(loss, outputs\)"):
        trained.train()


def test_the_trainers_loss_needs_the_trainer(tmp_path: Path) -> None:
    trained = trainer(tmp_path, callbacks=[GeodesicSharpnessCallback(**QUICK, loss="trainer")])
    with pytest.raises(UsageError, match="attach"):
        trained.train()


def test_the_size_of_micro_batches_does_not_change_the_value(tmp_path: Path) -> None:
    values = [
        trainer_value(tmp_path, micro_batch=size, per_device_train_batch_size=batch, gradient_checkpointing=saving)
        for size, batch, saving in ((8, 4, False), (3, 4, False), (None, 2, False), (None, 4, True))
    ]
    assert values[1:] == pytest.approx([values[0]] * 3, rel=1e-4)


class Small(Trainer):
    """Has memory for two samples at once."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(inputs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, *args, **kwargs)


@pytest.mark.slow
def test_micro_batches_are_as_small_as_the_training_has_found_out(tmp_path: Path) -> None:
    seen: list[int] = []

    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        seen.append(len(batch["labels"]))
        return nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="none")

    trained = trainer(tmp_path, kind=Small, auto_find_batch_size=True, num_train_epochs=1)
    callback = GeodesicSharpnessCallback(**{**QUICK, "batch_size": 8}, loss=loss).attach(trained)
    trained.add_callback(Clears(seen))
    trained.train()
    assert len(callback.results) == 1
    assert max(seen) == 2


class Clears(TrainerCallback):
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.clear()


def clip() -> Any:
    from transformers import CLIPConfig, CLIPModel, set_seed

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    set_seed(0)
    return CLIPModel(
        CLIPConfig(
            text_config={**sizes, "vocab_size": 20, "max_position_embeddings": 8, "eos_token_id": 2},
            vision_config={**sizes, "image_size": 8, "patch_size": 4}, projection_dim=8,
        )
    )  # fmt: skip


@pytest.mark.slow
def test_a_collator_may_ask_for_the_loss_by_a_flag(tmp_path: Path) -> None:
    pixels = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = [{"ids": row["input_ids"], "image": image} for row, image in zip(rows(), pixels, strict=True)]

    def collate(found: list[Any]) -> dict[str, Any]:
        ids, images = torch.tensor([row["ids"] for row in found]), torch.stack([row["image"] for row in found])
        return {"input_ids": ids, "pixel_values": images, "return_loss": True}

    trained = trainer(
        tmp_path, model=clip(), train_dataset=data, eval_dataset=data[:8], data_collator=collate,
        remove_unused_columns=False, num_train_epochs=1,
    )  # fmt: skip
    callback = GeodesicSharpnessCallback(**QUICK).attach(trained)
    trained.train()
    batches = [{**batch, "return_loss": torch.tensor(True)} for batch in callback._measurement.batches]
    settings = {"steps": QUICK["steps"], "reproducibility": False}
    assert callback.results[0][1].geodesic_sharpness == score(trained.model, batches, **settings).geodesic_sharpness > 0


def trainer_value(folder: Path, micro_batch: int | None, **changes: Any) -> float:
    trained = trainer(folder, model=randomise(bert(), scale=0.8), **changes)
    GeodesicSharpnessCallback(
        **{**QUICK, "batch_size": 8}, micro_batch=micro_batch
    ).attach(trained)  # fmt: skip
    return trained.evaluate()[KEY]


def test_a_loss_that_changes_what_it_is_given_is_measured(tmp_path: Path) -> None:
    """It is computed more than once before the training, of the same outputs and batch each time."""

    class Sharpened(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs, twice = model(**inputs), model(**inputs)
            logits = outputs.logits.mul_(2).add_(twice.logits)
            loss = nn.functional.cross_entropy(logits, labels)
            return (loss, outputs) if return_outputs else loss

    trained = trainer(tmp_path, kind=Sharpened, max_steps=2, eval_strategy="steps", eval_steps=2)
    callback = GeodesicSharpnessCallback(**QUICK, loss="trainer").attach(trained)
    trained.train()
    assert callback.results[-1][1].geodesic_sharpness > 0


@pytest.mark.parametrize("loss", ["trainer", "function"])
def test_a_penalty_on_the_weights_is_refused_before_the_training(tmp_path: Path, loss: str) -> None:
    """No symmetry leaves it as it is. That was found at the measurement, whose value was NaN."""
    model = bert()

    def penalised(outputs: Any, batch: Any) -> Any:
        return outputs.loss + 1e-4 * sum(p.square().sum() for p in model.parameters())

    class Decaying(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            found = penalised(outputs, inputs)
            return (found, outputs) if return_outputs else found

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = trainer(tmp_path, model=model, kind=Decaying)
    kind: Any = "trainer" if loss == "trainer" else penalised
    GeodesicSharpnessCallback(**QUICK, loss=kind).attach(trained)
    with pytest.raises(UsageError, match="depends on the weights themselves, as a penalty on them does"):
        trained.train()
    assert trained.state.global_step == 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    # Where no symmetries are divided out the penalty is a part of the loss like any other.
    trained = trainer(tmp_path, model=bert(), kind=Decaying, max_steps=2, eval_strategy="steps", eval_steps=2)
    callback = GeodesicSharpnessCallback(**QUICK, loss="trainer", metric="euclidean").attach(trained)
    trained.train()
    assert callback.results[-1][1].geodesic_sharpness > 0
