"""One measurement: the model of the moment, on the fixed batches, under the loss that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_geosharp.errors import UsageError
from hf_geosharp.parallel import World
from hf_geosharp.scoring import versions
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.estimate import check_function, estimate
from hf_geosharp.sharpness.identity import loss_name
from hf_geosharp.sharpness.objective import Objective, own_loss
from hf_geosharp.sharpness.parts import Batch, excerpt, on_device, samples
from hf_geosharp.sharpness.result import SharpnessResult
from hf_geosharp.sharpness.selection import movable
from hf_geosharp.sharpness.settings import Settings
from hf_geosharp.sharpness.shards import Shards, is_sharded, written_class
from hf_geosharp.symmetry.inputs import call
from hf_geosharp.tasks.batches import accepted_keys
from hf_geosharp.tasks.in_memory import batches_from, learns_numbers
from hf_geosharp.tasks.kinds import readings, task_of_model
from hf_geosharp.trainer.data import Choice, Source, choose, fitted
from hf_geosharp.trainer.subject import subject
from hf_geosharp.wrappers import unwrap

ComputeLoss = Callable[[nn.Module, dict[str, Any]], tuple[Tensor, Any]]
Loss = Callable[[Any, Mapping[str, Any]], Tensor]


class TrainerLoss(nn.Module):
    """A model that returns the loss which its Trainer computes, with its own outputs.

    ``compute`` must be a plain function: a copy of the module then does not copy the Trainer.
    """

    def __init__(self, inner: nn.Module, compute: ComputeLoss) -> None:
        super().__init__()
        self.inner = inner
        self.config = getattr(inner, "config", None)
        self._compute = compute
        self._stored = _dtype(inner)

    def forward(self, **batch: Any) -> dict[str, Any]:
        """Loss and outputs; outputs alone on the float64 copy that symmetries are proved on.

        A loss with constants in float32, such as weights of classes, could not be computed there.
        """
        if _dtype(self.inner) != self._stored:
            accepted = accepted_keys(self.inner)
            known = {key: value for key, value in batch.items() if accepted is None or key in accepted}
            if known:
                return {"outputs": self.inner(**known)}
        loss, outputs = self._compute(self.inner, batch)
        return {"loss": loss, "outputs": outputs}


def _dtype(model: nn.Module) -> torch.dtype:
    """float64, or everything else, which is scored in float32."""
    return torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Measurement:
    """What a measurement is taken on, and how; the same throughout a training.

    ``loss`` is the user's function of outputs and batch, ``compute`` the Trainer's; with neither it is the model's own.
    """

    batches: Sequence[Batch]
    settings: Settings
    identity: Mapping[str, Any]
    loss: Loss | None = None
    compute: ComputeLoss | None = None
    hooked: bool = False

    @classmethod
    def prepare(
        cls,
        model: nn.Module,
        data: Any,
        choice: Choice,
        settings: Settings,
        *,
        loss: Loss | None = None,
        compute: ComputeLoss | None = None,
        hooked: bool = False,
    ) -> Measurement:
        """Chooses the batches and tries one forward pass, so that what cannot work fails before the training.

        ``data`` is a Source, or batches.

        Raises:
            GeosharpError: as :mod:`hf_geosharp.trainer.data`, :mod:`hf_geosharp.trainer.subject` and
                :func:`hf_geosharp.sharpness.borrow.borrow`; the model gives no loss.
        """
        with subject(model, hooked=hooked, params=settings.params) as inner:
            scored = _scored(inner, compute)
            if isinstance(data, Source):
                drawn, identity = choose(data, choice)
                batches, _ = fitted(drawn, scored, choice, private=loss is not None)
            else:
                batches, identity = batches_from(
                    data, scored, samples=choice.samples, batch_size=choice.batch_size, seed=choice.seed
                )
                identity = {"id": "batches", **identity}
            named = "trainer" if compute is not None and loss is None else loss_name(loss)
            if named is not None:
                identity = {**identity, "loss": named}
            elif learns_numbers(inner, batches):
                identity = {**identity, "labels": "regression"}
            measurement = cls(tuple(batches), settings, identity, loss, compute, hooked)
            measurement._try(inner, None if inner is unwrap(model) else model)
        return measurement

    def _try(self, inner: nn.Module, trained: nn.Module | None) -> None:
        """One pass, and where there will be micro-batches, whether their losses make that of a batch.

        A loss that is not the model's own has to stay where symmetries are divided out. If ``inner`` is a copy, the
        loss must have no gradient in the model that is ``trained``.
        """
        scored = _scored(inner, self.compute)
        with (
            borrow(scored, None, movable(scored, self.settings.params)),
            torch.set_grad_enabled(trained is not None),
        ):
            device = next(scored.parameters()).device
            few = on_device(excerpt(self.batches[0], 0, 2), device)
            loss = (self.loss or own_loss)(call(scored, few), few)
            if not isinstance(loss, Tensor):
                raise UsageError(f"the loss of a batch is a {type(loss).__name__}; it is a tensor")
            if trained is not None and _reaches(loss, trained):
                raise UsageError(
                    "the loss is computed by the model in training, but what is measured here is a copy of it (merged "
                    "adapters, for example). The loss must use the model or the outputs that it is given: in "
                    "compute_loss, model instead of self.model"
                )
            size = self.settings.micro_batch
            weight = partial(readings, task_of_model(inner))
            if isinstance(size, int) and size < samples(self.batches[0]) and Shards.of(scored) is None:
                Objective(scored, self.batches[0], self.loss, weight, size).prove_parts()
        if (loss_of := self.loss or _of_outputs(inner, self.compute)) is not None:
            # A model's own loss has only its outputs to go by.
            world = _world(inner)
            with world.together():
                check_function(scored, self.batches, self.settings, loss=loss_of, weight=weight, world=world)

    def take(self, model: nn.Module, step: int) -> SharpnessResult:
        """The sharpness of the model as it is now.

        Raises:
            GeosharpError: as :func:`hf_geosharp.sharpness.estimate.estimate`.
        """
        with subject(model, hooked=self.hooked, params=self.settings.params) as inner:
            name = written_class(inner).__name__
            task = task_of_model(inner)
            world = _world(inner)
            with world.together():
                return estimate(
                    _scored(inner, self.compute),
                    self.batches,
                    self.settings,
                    loss=self.loss,
                    weight=partial(readings, task),
                    model_identity={
                        "id": getattr(getattr(inner, "config", None), "_name_or_path", "") or name,
                        "class": name,
                        "task": task.name if task else None,
                        "parameters": sum(p.numel() for p in inner.parameters()),
                        "step": step,
                    },
                    data_identity=self.identity,
                    versions=versions(),
                    world=world,
                )


def _world(inner: nn.Module) -> World:
    """Processes that share the weights share the passes; others do the same side by side."""
    shared = any(map(is_sharded, inner.parameters()))
    return World.find(next(inner.parameters()).device.type) if shared else World()


def _reaches(loss: Tensor, model: nn.Module) -> bool:
    """Whether a loss has a gradient in one of the model's parameters; none is left there."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    if not (wanted and loss.requires_grad):
        return False
    found = torch.autograd.grad(loss.sum(), wanted, allow_unused=True)
    return any(gradient is not None for gradient in found)


def _of_outputs(inner: nn.Module, compute: ComputeLoss | None) -> Loss | None:
    """The Trainer's loss as a function that is given outputs, and does not need them."""
    return None if compute is None else lambda _, batch: compute(inner, dict(batch))[0]


def _scored(inner: nn.Module, compute: ComputeLoss | None) -> nn.Module:
    return inner if compute is None else TrainerLoss(inner, compute)


NAMED_LOSSES = ("model", "trainer")
NamedLoss = Literal["model", "trainer"]


def function_of(loss: Loss | str | None) -> Loss | None:
    """The user's own function, if the loss is one.

    Raises:
        UsageError: neither a function nor a name of a loss.
    """
    if loss is None or callable(loss):
        return loss
    if loss in NAMED_LOSSES:
        return None
    raise UsageError(f"loss is {loss!r}; it is 'model', 'trainer', or a function of outputs and batch")


def other_loss(trainer: Any) -> str | None:
    """In what a Trainer's loss differs from its model's own; None if it does not."""
    from transformers import Trainer

    if getattr(trainer, "label_smoother", None) is not None:
        return "smooths labels"
    if getattr(trainer, "compute_loss_func", None) is not None:
        return "has a compute_loss_func"
    if type(trainer).compute_loss is not Trainer.compute_loss:
        return f"has a compute_loss of its own ({type(trainer).__name__})"
    return None
