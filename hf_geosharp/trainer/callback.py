"""The callback: when the Trainer has it measure, and where the value goes."""

from __future__ import annotations

import logging
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

from torch import nn
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback

from hf_geosharp.errors import GeosharpWarning, UsageError, warn
from hf_geosharp.geometry.metrics import Order
from hf_geosharp.sharpness.result import SharpnessResult
from hf_geosharp.sharpness.settings import Settings, radii_of
from hf_geosharp.symmetry.layouts import Layout, layouts_of
from hf_geosharp.trainer.advice import advice
from hf_geosharp.trainer.cost import Cost
from hf_geosharp.trainer.data import Choice, find_source, is_rows
from hf_geosharp.trainer.measure import Loss, Measurement, NamedLoss, function_of, other_loss
from hf_geosharp.trainer.ranks import all_agree, alone, first_of_all, of_the_first, together
from hf_geosharp.trainer.subject import fingerprint, refuse
from hf_geosharp.untouched import untouched
from hf_geosharp.wrappers import unwrap

logger = logging.getLogger(__name__)

_OF_THE_TRAINER = ("", "loss", "runtime", "samples_per_second", "steps_per_second")

Every = Literal["evaluate", "epoch"] | int
T = TypeVar("T")


class GeodesicSharpnessCallback(TrainerCallback):  # type: ignore[misc]
    """Measures geodesic sharpness during training, and logs it with the evaluation's own metrics.

    The value is ``eval_geodesic_sharpness`` in the record of an evaluation (``<prefix>_<name>`` in general), with the
    seconds it took as ``eval_geodesic_sharpness_runtime``; the record of the end of training has the sum of the seconds
    and their share of the training time. A value that could not be measured is NaN, which is never the best.

    Use ``GeodesicSharpnessCallback(...).attach(trainer)``: the callback then comes first, and reporters get the value
    too. With ``callbacks=[...]`` the reporters see the record before it is complete.

    Training is the same as without the callback, bit for bit. Every process measures, and all use the value of the
    first one.

    Args:
        data: the data to measure on: a data set, whose rows the Trainer's collator turns into batches, or batches (a
            list of dicts of tensors, or a DataLoader of them; one ball each). The default is rows of the training data.
        every: "evaluate" (with each evaluation), "epoch", or a number of steps.
        metric, geodesic, symmetries, layouts, rho, ascent, steps, starts, seed, average, damping: as for
            :func:`hf_geosharp.score`; with several radii the value at the first is logged.
        params: "all" measures a model with an adapter merged, on a copy; "lora" its adapter alone, in place.
        samples, batch_size: number of rows, and of rows per batch; each batch has its own ball.
        micro_batch: samples that go through the model at once; by default as many as in training, or one with gradient
            checkpointing.
        reproducibility: whether one batch is run again to check that rounding does not decide the value.
        loss: "model" (its own loss), "trainer" (that of the Trainer's ``compute_loss``; needs ``attach``), or a
            function of outputs and batch. The default is the model's own, with a warning if the Trainer uses another.
        max_fraction: skips measurements so that their share of the training time stays below it. How long one takes is
            known only after the first, which is always taken.
        on_error: "warn" continues training without a value when a measurement fails; "raise" stops. Errors that can be
            detected at the start of training are raised there in either case.
        name: name of the value in the records; a second callback on the same Trainer needs another one.

    Attributes:
        results: (global step, :class:`~hf_geosharp.SharpnessResult`) of every measurement.

    Raises:
        UsageError: an argument is not one of the choices, or is out of range.
    """

    def __init__(
        self,
        data: Any = None,
        every: Every = "evaluate",
        *,
        metric: str = "inv",
        geodesic: Order | None = None,
        symmetries: str = "full",
        layouts: Sequence[Layout] = (),
        rho: float | Sequence[float] | None = None,
        ascent: str = "auto",
        steps: int = 20,
        starts: int = 1,
        samples: int = 256,
        batch_size: int = 128,
        seed: int = 0,
        average: bool = False,
        damping: float = 0.0,
        params: str = "all",
        micro_batch: int | None = None,
        reproducibility: bool = True,
        loss: Loss | NamedLoss | None = None,
        max_fraction: float | None = None,
        on_error: Literal["warn", "raise"] = "warn",
        name: str = "geodesic_sharpness",
    ) -> None:
        if on_error not in ("warn", "raise"):
            raise UsageError(f"on_error is {on_error!r}; it is warn or raise")
        if not isinstance(name, str) or name in _OF_THE_TRAINER:
            raise UsageError(f"name is {name!r}; it is a name that the records of an evaluation do not have yet")
        self.every = _checked_every(every)
        self.on_error = on_error
        self.name = name
        self.results: list[tuple[int, SharpnessResult]] = []
        self._data = data
        self._are_batches = data is not None and not is_rows(data)
        self._choice = Choice(samples, batch_size, seed)
        self._settings = Settings(
            metric=metric, geodesic=geodesic, symmetries=symmetries, layouts=layouts_of(layouts), rho=radii_of(rho),
            ascent=ascent, steps=steps, starts=starts, seed=seed, average=average, damping=damping, params=params,
            micro_batch=micro_batch, reproducibility=reproducibility,
        )  # fmt: skip
        self._loss, self._function = loss, function_of(loss)
        self._cost = Cost(max_fraction)
        self._trainer: Any = None
        self._is_late = True
        self._measurement: Measurement | None = None
        self._prepared_for: list[Callable[[], Any]] = []
        self._known: tuple[tuple[int | str, ...], float] | None = None
        self._record: dict[str, float] = {}
        self._recorded: tuple[str, int] | None = None
        self._named: tuple[int, str] | None = None
        self._said: set[str] = set()

    def attach(self, trainer: Any) -> GeodesicSharpnessCallback:
        """Makes this the trainer's first callback, so that everything that logs gets the value; returns itself.

        Raises:
            UsageError: it is attached to another trainer, or another callback has its name there.
        """
        if self._trainer not in (None, trainer):
            raise UsageError("this callback is attached to another trainer; create one for each")
        callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", None)
        if not isinstance(callbacks, list):
            raise UsageError(f"trainer is {trainer!r:.60}; it is no Trainer of transformers")
        for other in callbacks:
            if isinstance(other, GeodesicSharpnessCallback) and other is not self and other.name == self.name:
                raise UsageError(f"another callback of this trainer logs {self.name!r}; pass another name= to this one")
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        self._trainer = trainer
        return self

    # ------------------------------------------------------------------------------------------------------ events

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes that it is among the callbacks that a trainer was made with: those that print come after these."""
        self._is_late = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuses what cannot work, and chooses the data."""
        self._cost.begin()
        sets: Any = None
        if self._trainer is not None:
            sets = self._trainer.eval_dataset if isinstance(self._trainer.eval_dataset, dict) else ()
        for text in advice(
            args, state, self.name, self.every, sets=sets, limit=self._cost.limit, late=self._is_late
        ):  # fmt: skip
            self._say(text)
        with self._cost.spent(measured=False):
            self._prepare(args, state, kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Completes the record of an evaluation, and that of the end of the training."""
        if "train_runtime" in logs and "train_loss" in logs:
            self._complete(logs, state, self._summary())
            return
        prefix = _evaluated(logs)
        if self.every == "evaluate" and prefix is not None and self._all_processes_log():
            self._evaluation(prefix, args, state, kwargs)
            key = f"{prefix}_{self.name}"
            # As texts, for NaN is not NaN; a record that is logged again has the value.
            if key in logs and str(logs[key]) != str(self._record[key]):
                self._say(f"{key} is there already, of compute_metrics maybe, and is replaced: pass another name=")
            self._complete(logs, state, self._record)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Completes the metrics of an evaluation where a Trainer logged others than it returns."""
        if self.every != "evaluate" or metrics is None:
            return
        prefix = _evaluated(metrics) or _losing(metrics) or "eval"
        if f"{prefix}_{self.name}" in metrics:
            return
        if self._recorded != (prefix, state.global_step):
            self._evaluation(prefix, args, state, kwargs)
            last = state.log_history[-1] if state.log_history else {}
            if _evaluated(last) == prefix:
                last.update(self._record)
            self._log(state, control, dict(self._record))
        metrics.update(self._record)
        self._recorded = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measures every so many steps."""
        if isinstance(self.every, int) and state.global_step % self.every == 0:
            self._between(args, state, control, kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measures every epoch."""
        if self.every == "epoch":
            self._between(args, state, control, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Says what the measurements cost."""
        if first_of_all():
            logger.info(
                "geodesic sharpness: %.1f s, %.1f %% of the training", self._cost.seconds, 100 * self._cost.share
            )

    # ----------------------------------------------------------------------------------------------------- records

    def _evaluation(self, prefix: str, args: Any, state: Any, kwargs: Mapping[str, Any]) -> None:
        """The record of an evaluation.

        Of several evaluation sets the first has the value under ``eval_`` too: there the best model is looked up.
        """
        value, seconds = self._value(args, state, kwargs)
        self._record = {f"{prefix}_{self.name}": value, f"{prefix}_{self.name}_runtime": seconds}
        here = (state.global_step, prefix)
        if prefix.startswith("eval_") and (self._named is None or self._named[0] != here[0] or self._named == here):
            self._record[f"eval_{self.name}"] = value
            self._named = here
        self._recorded = (prefix, state.global_step)

    def _between(self, args: Any, state: Any, control: Any, kwargs: Mapping[str, Any]) -> None:
        value, seconds = self._value(args, state, kwargs)
        self._log(state, control, {self.name: value, f"{self.name}_runtime": seconds})

    def _log(self, state: Any, control: Any, record: dict[str, float]) -> None:
        """A record of its own, through the Trainer if it is known."""
        if self._trainer is None:
            state.log_history.append({**record, "epoch": state.epoch, "step": state.global_step})
            return
        # Logging takes back a wish to log, which may not be fulfilled yet.
        wished = control.should_log
        self._trainer.log(record)
        control.should_log = self._trainer.control.should_log = wished

    def _complete(self, logs: dict[str, float], state: Any, record: Mapping[str, float]) -> None:
        """Adds to what is being logged, and to the copy that the history already has."""
        logs.update(record)
        if state.log_history:
            state.log_history[-1].update(record)

    def _summary(self) -> dict[str, float]:
        prefix = f"train_{self.name}"
        return {f"{prefix}_runtime": round(self._cost.seconds, 4), f"{prefix}_share": round(self._cost.share, 4)}

    # ------------------------------------------------------------------------------------------------- measurement

    def _value(self, args: Any, state: Any, kwargs: Mapping[str, Any]) -> tuple[float, float]:
        """The value and the seconds it took; NaN where there is none."""
        now = self._of_the_moment(kwargs)
        model: nn.Module = now[0]
        measurement = self._measurement
        if measurement is None or any(seen() is not one for seen, one in zip(self._prepared_for, now, strict=True)):
            measurement = self._prepare(args, state, kwargs)
        weights = fingerprint(unwrap(model))
        known = self._known[1] if self._known is not None and self._known[0] == weights else None
        affords = of_the_first(self._cost.affords())
        # Of sharded weights each process sees its own part.
        if all_agree(known is not None):
            return of_the_first(known) or 0.0, 0.0
        if not affords:
            self._say(
                f"step {state.global_step}: not measured, for the share of the training's time would be "
                f"{self._cost.expected():.1%} and max_fraction is {self._cost.limit:.1%}; the value is NaN"
            )
            return math.nan, 0.0
        try:
            with self._cost.spent():
                result = of_the_first(self._run(lambda: measurement.take(model, state.global_step)))
        except Exception as error:
            if self.on_error == "raise":
                raise
            self._say(
                f"step {state.global_step}: geodesic sharpness could not be measured, its value is NaN "
                f"({type(error).__name__}: {error})"
            )
            return math.nan, round(self._cost.last, 4)
        self.results.append((state.global_step, result))
        for text in result.warnings:
            self._say(text)
        # Where no finite loss was found the value 0 would be the best one.
        value = math.nan if result.lost else result.geodesic_sharpness
        self._known = (weights, value)
        return value, round(self._cost.last, 4)

    def _run(self, run: Callable[[], T]) -> T:
        """Runs on every process, unnoticed by the training; warnings are given once, by one process."""
        with untouched(), warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always", GeosharpWarning)
            result = together(run)
        for warning in heard:
            self._say(str(warning.message), warning.category)
        return result

    def _of_the_moment(self, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The model, and where rows come from: what an evaluation by hand may find exchanged since the last one.

        Between trainings the Trainer tells its callbacks of the model that it had before.
        """
        trainer, loader = self._trainer, kwargs.get("train_dataloader")
        if trainer is None:
            return kwargs["model"], loader, None, None
        return trainer.model, loader, trainer.train_dataset, trainer.data_collator

    def _prepare(self, args: Any, state: Any, kwargs: Mapping[str, Any]) -> Measurement:
        """The measurement that belongs to a model and a set-up; what cannot work fails here."""
        self._measurement = self._known = None
        now = self._of_the_moment(kwargs)
        model, loader = now[:2]
        compute = self._compute()

        def prepare() -> Measurement:
            refuse(model, args, self._settings.params)
            return Measurement.prepare(
                model,
                self._data if self._are_batches else find_source(self._data, model, args, self._trainer, loader),
                self._choice,
                self._sized(args, state),
                loss=self._function,
                compute=compute,
                hooked=not alone() or getattr(args, "deepspeed_plugin", None) is not None,
            )

        self._measurement = self._run(prepare)
        self._prepared_for = [_reference(one) for one in now]
        return self._measurement

    def _sized(self, args: Any, state: Any) -> Settings:
        """The settings, with micro-batches that need about as much memory as training does.

        That may have found a smaller size than was asked for.
        """
        if self._settings.micro_batch is not None:
            return self._settings
        # The second name is the older one of the first.
        saving = getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", False)
        found = (state.train_batch_size or args.train_batch_size) // max(1, args.n_gpu)
        return replace(self._settings, micro_batch=1 if saving else max(1, found))

    def _compute(self) -> Callable[[nn.Module, dict[str, Any]], Any] | None:
        """The Trainer's loss, if asked for."""
        trainer = self._trainer
        if self._loss == "trainer":
            if trainer is None:
                raise UsageError("loss='trainer' needs the trainer: use GeodesicSharpnessCallback(...).attach(trainer)")

            def compute(model: nn.Module, batch: dict[str, Any]) -> Any:
                with _not_logging(trainer):
                    found = trainer.compute_loss(model, batch, return_outputs=True)
                if not isinstance(found, tuple) or len(found) != 2:
                    raise UsageError(
                        f"compute_loss of {type(trainer).__name__} returns a {type(found).__name__} with "
                        "return_outputs=True; loss='trainer' needs (loss, outputs), as evaluations do"
                    )
                return found

            return compute
        if self._loss is None and trainer is not None and (how := other_loss(trainer)) is not None:
            self._say(
                f"the trainer {how}, but the loss measured is the one that the model itself returns. loss='trainer' "
                "measures the trainer's, loss='model' silences this warning"
            )
        return None

    def _all_processes_log(self) -> bool:
        """Whether a measurement, which all processes take part in, may happen where a record is logged.

        An ``evaluate`` of a subclass may log on one process only; its ``on_evaluate`` is called on all.
        """
        trainer = self._trainer
        return alone() or trainer is None or _known_evaluate(type(trainer))

    def _say(self, text: str, category: type[Warning] = GeosharpWarning) -> None:
        """Warns once, in one process."""
        if text not in self._said and first_of_all():
            warn(text, category)
        self._said.add(text)


def _reference(thing: Any) -> Callable[[], Any]:
    """Gives a thing back, and keeps it alive only where it has to: not a model after its training."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


def _checked_every(every: Any) -> Every:
    if every in ("evaluate", "epoch"):
        return every
    if hasattr(every, "__index__") and not isinstance(every, bool) and operator.index(every) >= 1:
        return operator.index(every)
    raise UsageError(f"every is {every!r}; it is 'evaluate', 'epoch' or a number of steps")


def _evaluated(record: Mapping[str, Any]) -> str | None:
    """The prefix of the evaluation that a record is of: it has a runtime and a speed under it."""
    for key in record:
        prefix = key.removesuffix("_samples_per_second")
        if prefix != key and prefix != "train" and f"{prefix}_runtime" in record:
            return prefix
    return None


def _losing(record: Mapping[str, Any]) -> str | None:
    """The prefix of metrics without a runtime."""
    return next((key.removesuffix("_loss") for key in record if key.endswith("_loss")), None)


@contextmanager
def _not_logging(trainer: Any) -> Iterator[None]:
    """What a ``compute_loss`` logs of a measurement's passes is no record of the training."""
    own = vars(trainer).get("log")
    trainer.log = lambda *args, **kwargs: None
    try:
        yield
    finally:
        if own is None:
            del trainer.log
        else:
            trainer.log = own


def _known_evaluate(kind: Any) -> bool:
    return kind.evaluate in (Trainer.evaluate, Seq2SeqTrainer.evaluate)
