"""Where the value goes: logs, history, state file, reporters, printing, the Trainer's card; and what chooses by it."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from hf_geosharp import GeodesicSharpnessCallback, score
from hf_geosharp.errors import GeosharpWarning, UsageError
from hf_geosharp.trainer.measure import Measurement
from tests.sharpness.tiny import randomise
from tests.trainer.tiny import QUICK, bert, dataset, evaluations, trainer

KEY = "eval_geodesic_sharpness"


class Reporter(TrainerCallback):
    """Keeps what is logged, at the moment it is logged."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))

    def having(self, key: str) -> list[float]:
        return [record[key] for record in self.logs if key in record]


def test_an_evaluations_record_has_the_value_everywhere(tmp_path: Path, capsys: Any) -> None:
    reporter = Reporter()
    trained = trainer(tmp_path, callbacks=[reporter], save_strategy="epoch")
    callback = GeodesicSharpnessCallback(**QUICK).attach(trained)
    trained.train()
    values = [result.geodesic_sharpness for _, result in callback.results]
    assert len(values) == 2
    assert all(value > 0 for value in values)
    assert [record[KEY] for record in evaluations(trained)] == values
    assert reporter.having(KEY) == values
    assert all(type(value) is float for value in reporter.having(KEY))
    stored = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_text())
    assert [record[KEY] for record in stored["log_history"] if KEY in record] == values
    assert capsys.readouterr().out.count(f"'{KEY}'") == 2
    trained.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "Geodesic Sharpness" in card
    assert f"{values[-1]:.4f}" in card


def test_the_value_is_that_of_score_on_the_same_batches(tmp_path: Path) -> None:
    data = dataset(24)
    trained = trainer(tmp_path, model=randomise(bert(), scale=0.8), train_dataset=data)
    settings = {"rho": 0.05, "steps": 3, "seed": 5}
    callback = GeodesicSharpnessCallback(samples=24, batch_size=24, reproducibility=False, **settings).attach(trained)
    metrics = trained.evaluate()
    whole = {
        "input_ids": torch.tensor(data["input_ids"]), "attention_mask": torch.ones(24, 6, dtype=torch.long),
        "labels": torch.tensor(data["label"]),
    }  # fmt: skip
    expected = score(trained.model, [whole], reproducibility=False, **settings).geodesic_sharpness
    assert metrics[KEY] == pytest.approx(expected, rel=1e-4)
    assert callback.results[0][1].data["id"] == "train_dataset"


def test_evaluation_alone_measures_too_and_equal_weights_only_once(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    callback = GeodesicSharpnessCallback(**QUICK).attach(trained)
    first, second = trained.evaluate(), trained.evaluate(metric_key_prefix="test")
    assert first[KEY] == second["test_geodesic_sharpness"]
    assert first[f"{KEY}_runtime"] > 0 == second["test_geodesic_sharpness_runtime"]
    assert len(callback.results) == 1
    with torch.no_grad():
        trained.model.classifier.weight.mul_(1.5)
    assert trained.evaluate()[KEY] != first[KEY]


def test_what_is_exchanged_before_an_evaluation_by_hand_is_measured(tmp_path: Path) -> None:
    """The model, of which a Trainer does not tell its callbacks, and the data."""

    def fresh(seed: int, data: int) -> float:
        made = trainer(tmp_path, model=bert(seed), train_dataset=dataset(24, data))
        GeodesicSharpnessCallback(**QUICK).attach(made)
        return made.evaluate()[KEY]

    trained = trainer(tmp_path, model=bert(1), train_dataset=dataset(24, 2))
    GeodesicSharpnessCallback(**QUICK).attach(trained)
    found = [trained.evaluate()[KEY]]
    trained.model = trained.model_wrapped = bert(3)
    found.append(trained.evaluate()[KEY])
    trained.train_dataset = dataset(24, 4)
    found.append(trained.evaluate()[KEY])
    assert found == [fresh(1, 2), fresh(3, 2), fresh(3, 4)]
    assert len(set(found)) == 3


def test_a_callback_of_another_trainer_does_not_measure_on_its_data(tmp_path: Path) -> None:
    callback = GeodesicSharpnessCallback(**QUICK)
    trainer(tmp_path, callbacks=[callback], num_train_epochs=1).train()
    other = trainer(tmp_path, model=bert(1), callbacks=[callback], train_dataset=dataset(24, 5))
    with pytest.raises(UsageError, match="no training data to measure on"):
        other.evaluate()


def test_several_evaluation_sets_share_one_measurement(tmp_path: Path) -> None:
    sets = {"a": dataset(8, 1), "b": dataset(8, 2)}
    trained = trainer(
        tmp_path, eval_dataset=sets, metric_for_best_model="geodesic_sharpness", greater_is_better=False,
        load_best_model_at_end=True, save_strategy="epoch",
    )  # fmt: skip
    callback = GeodesicSharpnessCallback(**QUICK).attach(trained)
    trained.train()
    assert len(callback.results) == 2
    for name in sets:
        found = [record[f"eval_{name}_geodesic_sharpness"] for record in evaluations(trained, f"eval_{name}")]
        assert found == [result.geodesic_sharpness for _, result in callback.results]
    # Early stopping counts an evaluation once, so one record of a round has the unnamed value.
    assert len([record for record in trained.state.log_history if KEY in record]) == 2
    assert trained.state.best_metric == min(result.geodesic_sharpness for _, result in callback.results)
    assert KEY in trained.evaluate()
    assert KEY in trained.evaluate()


@pytest.mark.parametrize("name", ["geodesic_sharpness", "eval_geodesic_sharpness"])
@pytest.mark.slow
def test_the_flattest_checkpoint_is_the_best(tmp_path: Path, name: str) -> None:
    trained = trainer(
        tmp_path, num_train_epochs=4, save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model=name,
        greater_is_better=False,
    )  # fmt: skip
    callback = GeodesicSharpnessCallback(**QUICK).attach(trained)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeosharpWarning)
        trained.train()
    step, best = min(((step, r.geodesic_sharpness) for step, r in callback.results), key=lambda item: item[1])
    assert (trained.state.best_global_step, trained.state.best_metric) == (step, best)
    assert trained.state.best_model_checkpoint.endswith(f"checkpoint-{step}")
    # The weights that were loaded are the ones that were measured.
    assert trained.evaluate()[KEY] == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_early_stopping_in_any_order(tmp_path: Path, first: bool) -> None:
    stopping = EarlyStoppingCallback(early_stopping_patience=1)
    callback = GeodesicSharpnessCallback(**QUICK)
    trained = trainer(
        tmp_path, num_train_epochs=6, save_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="geodesic_sharpness", greater_is_better=False,
        callbacks=[callback, stopping] if first else [stopping, callback],
    )  # fmt: skip
    trained.train()
    values = [record[KEY] for record in evaluations(trained)]
    assert len(values) < 6
    assert values[-1] >= min(values[:-1])
    assert all(b < a for a, b in pairwise(values[:-1]))


SETS = {"a": dataset(8, 1), "b": dataset(8, 2)}


@pytest.mark.parametrize(
    ("data", "best"),
    [(dataset(8, 1), "geodesic_sharpness"), (SETS, "eval_b_geodesic_sharpness"), (SETS, "b_geodesic_sharpness")],
)
def test_the_sharpest_as_the_best_is_warned_of(tmp_path: Path, data: Any, best: str) -> None:
    trained = trainer(
        tmp_path, save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model=best, eval_dataset=data
    )
    GeodesicSharpnessCallback(**QUICK).attach(trained)
    with pytest.warns(GeosharpWarning, match="greater_is_better=False"):
        trained.train()


@pytest.mark.parametrize(
    ("changes", "message"), [({"every": "epoch"}, "every='evaluate'"), ({"max_fraction": 0.5}, "max_fraction")]
)
@pytest.mark.parametrize("best", ["geodesic_sharpness", "b_geodesic_sharpness"])
def test_a_best_model_needs_a_value_in_each_evaluation(tmp_path: Path, changes: Any, message: str, best: str) -> None:
    trained = trainer(
        tmp_path, save_strategy="epoch", metric_for_best_model=best, greater_is_better=False, eval_dataset=SETS
    )
    GeodesicSharpnessCallback(**QUICK, **changes).attach(trained)
    with pytest.raises(UsageError, match=message):
        trained.train()
    assert trained.state.global_step == 0


def test_without_attach_all_but_the_reporters_have_it(tmp_path: Path) -> None:
    reporter, callback = Reporter(), GeodesicSharpnessCallback(**QUICK)
    trained = trainer(tmp_path, callbacks=[reporter, callback])
    trained.args.report_to = ["tensorboard"]
    with pytest.warns(GeosharpWarning, match=r"tensorboard.*attach\(trainer\)"):
        trained.train()
    values = [result.geodesic_sharpness for _, result in callback.results]
    assert [record[KEY] for record in evaluations(trained)] == values
    assert reporter.having(KEY) == []


def test_attaching_one_that_was_passed_moves_it_to_the_front(tmp_path: Path) -> None:
    callback = GeodesicSharpnessCallback(**QUICK)
    trained = trainer(tmp_path, callbacks=[callback])
    assert callback.attach(trained).attach(trained) is callback
    assert trained.callback_handler.callbacks[0] is callback
    assert sum(c is callback for c in trained.callback_handler.callbacks) == 1
    with pytest.raises(UsageError, match="another trainer"):
        callback.attach(trainer(tmp_path))
    with pytest.raises(UsageError, match="name="):
        GeodesicSharpnessCallback(**QUICK).attach(trained)


def test_a_metric_of_the_same_name_is_warned_of(tmp_path: Path) -> None:
    trained = trainer(tmp_path, compute_metrics=lambda predicted: {"geodesic_sharpness": 7.0})
    callback = GeodesicSharpnessCallback(**QUICK).attach(trained)
    with pytest.warns(GeosharpWarning, match=f"{KEY} is there already.*another name"):
        assert trained.evaluate()[KEY] == callback.results[0][1].geodesic_sharpness


def test_the_best_by_a_longer_name_is_that_of_another(tmp_path: Path) -> None:
    """A value "sharpness" between evaluations is none of those that "geodesic_sharpness" is chosen by."""
    for best in ("geodesic_sharpness", "eval_geodesic_sharpness"):
        trained = trainer(
            tmp_path, save_strategy="epoch", metric_for_best_model=best, greater_is_better=False, num_train_epochs=1
        )
        GeodesicSharpnessCallback(**QUICK).attach(trained)
        GeodesicSharpnessCallback(**QUICK, name="sharpness", every="epoch").attach(trained)
        trained.train()
        assert trained.state.best_metric == evaluations(trained)[0][KEY]


def test_two_callbacks_under_two_names(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    GeodesicSharpnessCallback(**QUICK).attach(trained)
    GeodesicSharpnessCallback(**QUICK, rho=0.01, name="sharpness_nearby").attach(trained)
    metrics = trained.evaluate()
    assert metrics[KEY] > metrics["eval_sharpness_nearby"] > 0


@pytest.mark.parametrize(("every", "expected"), [("epoch", [6, 12]), (4, [4, 8, 12])])
@pytest.mark.slow
def test_epochs_and_steps_have_records_of_their_own(tmp_path: Path, every: Any, expected: list[int]) -> None:
    reporter = Reporter()
    trained = trainer(tmp_path, callbacks=[reporter], eval_strategy="no", save_strategy="epoch")
    callback = GeodesicSharpnessCallback(every=every, **QUICK).attach(trained)
    trained.train()
    found = [record for record in trained.state.log_history if "geodesic_sharpness" in record]
    assert [record["step"] for record in found] == [step for step, _ in callback.results] == expected
    assert reporter.having("geodesic_sharpness") == [record["geodesic_sharpness"] for record in found]
    # Nothing else went missing from the history.
    assert [record["step"] for record in trained.state.log_history if "loss" in record] == [2, 4, 6, 8, 10, 12]


def test_epochs_without_attach_are_in_the_history(tmp_path: Path) -> None:
    callback = GeodesicSharpnessCallback(every="epoch", **QUICK)
    trained = trainer(tmp_path, callbacks=[callback])
    with pytest.warns(GeosharpWarning, match="is not attached to its trainer"):
        trained.train()
    found = [record for record in trained.state.log_history if "geodesic_sharpness" in record]
    assert [(record["step"], record["epoch"]) for record in found] == [(6, 1.0), (12, 2.0)]


@pytest.mark.parametrize("late", [True, False])
def test_records_are_printed_with_the_value_unless_the_callback_was_added_late(
    tmp_path: Path, late: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = GeodesicSharpnessCallback(**QUICK)
    trained = trainer(tmp_path, callbacks=[] if late else [callback], disable_tqdm=True)
    if late:
        trained.add_callback(callback)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        trained.train()
    printed = [line for line in capsys.readouterr().out.splitlines() if "eval_loss" in line]
    assert printed
    assert all(("eval_geodesic_sharpness" in line) is not late for line in printed)
    assert any("printed records do not get it" in str(one.message) for one in heard) is late


def test_nothing_to_measure_with_is_warned_of(tmp_path: Path) -> None:
    trained = trainer(tmp_path, eval_strategy="no")
    GeodesicSharpnessCallback(**QUICK).attach(trained)
    with pytest.warns(GeosharpWarning, match="eval_strategy"):
        trained.train()


class LogsItsLoss(Trainer):
    """Logs while it computes its loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        self.log({"part": 1.0})
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_what_a_loss_logs_of_a_measurement_is_no_record(tmp_path: Path) -> None:
    records = []
    for attached in (False, True):
        reporter = Reporter()
        trained = trainer(tmp_path, kind=LogsItsLoss, num_train_epochs=1, callbacks=[reporter])
        if attached:
            GeodesicSharpnessCallback(loss="trainer", **QUICK).attach(trained)
        trained.train()
        records.append((len(trained.state.log_history), len(reporter.having("part"))))
    assert records[0] == records[1]
    assert [record[KEY] > 0 for record in evaluations(trained)] == [True]
    assert "log" not in vars(trained)


class LogsAnother(Trainer):
    """Logs a new dict, as trainers do that add metrics of their own."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, "eval_own" if "eval_loss" in logs else "own": 1.0})


class EvaluatesItself(Trainer):
    """Evaluates without logging."""

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        output = self.evaluation_loop(self.get_eval_dataloader(), "own", metric_key_prefix=metric_key_prefix)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, output.metrics)
        return output.metrics


@pytest.mark.parametrize("kind", [LogsAnother, EvaluatesItself])
@pytest.mark.slow
def test_subclasses_that_log_or_evaluate_their_own_way(tmp_path: Path, kind: type[Trainer]) -> None:
    reporter = Reporter()
    trained = trainer(
        tmp_path, kind=kind, callbacks=[reporter], num_train_epochs=3, save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="geodesic_sharpness", greater_is_better=False,
    )  # fmt: skip
    callback = GeodesicSharpnessCallback(**QUICK).attach(trained)
    trained.train()
    values = [result.geodesic_sharpness for _, result in callback.results]
    assert trained.state.best_metric == min(values)
    assert reporter.having(KEY) == values
    assert [record[KEY] for record in trained.state.log_history if KEY in record] == values


@pytest.mark.slow
def test_a_seq2seq_trainer(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import (
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    from tests.tasks.tiny import make_tokenizer

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=22, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    data = Dataset.from_list(
        [{"input_ids": [6 + i % 9, 7, 5][: 2 + i % 2], "labels": [8, 6 + i % 7, 5]} for i in range(8)]
    )
    trained = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=1, eval_strategy="epoch", save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=True, predict_with_generate=True, generation_max_length=4,
            per_device_train_batch_size=4, dataloader_pin_memory=False,
        ),
        data_collator=DataCollatorForSeq2Seq(make_tokenizer("t5"), model=model),
        train_dataset=data,
        eval_dataset=data,
    )  # fmt: skip
    GeodesicSharpnessCallback(**QUICK).attach(trained)
    trained.train()
    assert evaluations(trained)[0][KEY] > 0


@pytest.mark.slow
@pytest.mark.parametrize("restore", [True, False])
def test_a_training_that_is_resumed(tmp_path: Path, restore: bool) -> None:
    def run(folder: Path, **changes: Any) -> Trainer:
        made = trainer(folder, num_train_epochs=3, save_strategy="epoch", **changes)
        GeodesicSharpnessCallback(**QUICK).attach(made)
        return made

    whole = run(tmp_path / "whole")
    whole.train()
    later = run(tmp_path / "later", restore_callback_states_from_checkpoint=restore)
    later.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert [r[KEY] for r in evaluations(later)] == [r[KEY] for r in evaluations(whole)]
    for a, b in zip(whole.model.parameters(), later.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_a_model_made_for_each_training(tmp_path: Path) -> None:
    """As hyperparameter searches do: the callback measures the model of the moment."""
    seeds = iter([1, 2, 2, 3])
    made = trainer(tmp_path, model_init=lambda: bert(next(seeds)), num_train_epochs=1)
    callback = GeodesicSharpnessCallback(**QUICK).attach(made)
    for _ in range(3):
        made.train()
    first, second, third = (result.geodesic_sharpness for _, result in callback.results)
    assert first == second != third


class TestFailures:
    @pytest.fixture
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from hf_geosharp.trainer.measure import Measurement

        real, calls = Measurement.take, []

        def take(self: Any, model: Any, step: int) -> Any:
            calls.append(step)
            if len(calls) == 1:
                raise RuntimeError("CUDA out of memory")
            return real(self, model, step)

        monkeypatch.setattr(Measurement, "take", take)

    @pytest.mark.slow
    def test_a_failed_measurement_does_not_end_the_training(self, tmp_path: Path, failing: None) -> None:
        trained = trainer(
            tmp_path, num_train_epochs=3, save_strategy="epoch", load_best_model_at_end=True,
            metric_for_best_model="geodesic_sharpness", greater_is_better=False,
        )  # fmt: skip
        GeodesicSharpnessCallback(**QUICK).attach(trained)
        with pytest.warns(GeosharpWarning, match=r"step 6: .* NaN \(RuntimeError: CUDA out of memory\)"):
            trained.train()
        values = [record[KEY] for record in evaluations(trained)]
        assert math.isnan(values[0])
        assert trained.state.best_metric == min(values[1:])
        trained.create_model_card()  # wants the same columns in each record

    def test_or_ends_it_when_asked(self, tmp_path: Path, failing: None) -> None:
        trained = trainer(tmp_path)
        GeodesicSharpnessCallback(on_error="raise", **QUICK).attach(trained)
        with pytest.raises(RuntimeError, match="out of memory"):
            trained.train()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every": "day"}, "every"), ({"every": 0}, "every"), ({"every": True}, "every"),
        ({"rho": "wide"}, "rho"), ({"rho": -1.0}, "rho"), ({"metric": "flat"}, "metric"),
        ({"loss": "mine"}, "loss"), ({"max_fraction": 0}, "max_fraction"), ({"max_fraction": 2}, "max_fraction"),
        ({"on_error": "cry"}, "on_error"), ({"batch_size": 0}, "batch_size"), ({"steps": 0}, "steps"),
        ({"data": {"train": []}}, "several sets"), ({"data": "train.csv"}, "'train.csv', a name: load"),
        ({"max_fraction": "5 %"}, "max_fraction is '5 %'; it is a number"),
        ({"name": "loss"}, "name is 'loss'"), ({"name": ""}, "name is ''"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_at_once(wrong: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GeodesicSharpnessCallback(**wrong)


def test_it_is_attached_to_a_trainer_alone() -> None:
    with pytest.raises(UsageError, match="is no Trainer of transformers"):
        GeodesicSharpnessCallback().attach(bert())


@pytest.mark.filterwarnings("ignore::hf_geosharp.errors.GeosharpWarning")
def test_where_no_finite_loss_was_found_the_value_is_no_number_rather_than_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Measurement.take

    def lost(self: Measurement, *arguments: Any) -> Any:
        result = take(self, *arguments)
        batches = [dataclasses.replace(batch, value=0.0, stopped="lost") for batch in result.per_batch]
        return dataclasses.replace(result, geodesic_sharpness=0.0, per_batch=batches)

    monkeypatch.setattr(Measurement, "take", lost)
    trained = trainer(tmp_path)
    GeodesicSharpnessCallback(**QUICK).attach(trained)
    assert math.isnan(trained.evaluate()[KEY])
