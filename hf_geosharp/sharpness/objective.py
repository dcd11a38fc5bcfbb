"""The loss of one batch at the weights that the model has at the moment, and its gradient in the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.errors import ModelError
from hf_geosharp.symmetry.inputs import call

Batch = Mapping[str, Any]
Loss = Callable[[Any, Batch], Tensor]
"""(outputs, batch) -> losses of the samples (or tokens), or their mean."""

Weight = Callable[[Batch], float]
"""Number of loss terms in a batch: what its mean loss has to be multiplied by to give the sum."""


def own_loss(outputs: Any, batch: Batch) -> Tensor:
    """The loss that the model itself returns for a batch with labels.

    Raises:
        ModelError: the outputs have no loss.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        hint = "" if "labels" in batch else f"; the batch has no 'labels' (it has {sorted(batch)})"
        raise ModelError(
            f"the model returned no loss{hint}: give labels, or pass loss=(outputs, batch) -> losses of the samples"
        )
    return loss


def samples(batch: Batch) -> int:
    """Number of samples: the first dimension of its tensors."""
    return next(int(v.shape[0]) for v in batch.values() if isinstance(v, Tensor) and v.ndim)


def rows(batch: Batch, start: int, stop: int) -> dict[str, Any]:
    """The samples start..stop of a batch."""
    n = samples(batch)
    return {k: v[start:stop] if isinstance(v, Tensor) and v.ndim and v.shape[0] == n else v for k, v in batch.items()}


class Reach:
    """Which rows of a model's embeddings a batch looks up, seen while it runs (a context manager).

    ``rows`` maps the identity of a weight to the sorted rows.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.max_norm is None]
        self._seen: dict[int, list[Tensor]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Reach:
        def hook(module: nn.Module, args: Any) -> None:
            self._seen.setdefault(id(module.weight), []).append(args[0].detach().reshape(-1))

        self._handles = [m.register_forward_pre_hook(hook) for m in self._modules]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def rows(self) -> dict[int, Tensor]:
        """id(weight) -> (n,) the rows that were looked up."""
        return {key: torch.unique(torch.cat(ids)) for key, ids in self._seen.items()}


class Objective:
    """Loss of a batch under a model, as a mean over its samples or tokens, in micro-batches if asked.

    Counts its passes: ``forwards`` and ``backwards`` over the whole batch.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        loss: Loss | None = None,
        weight: Weight | None = None,
        micro_batch: int | None = None,
    ) -> None:
        self.model, self.loss = model, loss or own_loss
        device = next(model.parameters()).device
        self.batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        n = samples(batch)
        size = n if micro_batch is None else micro_batch
        self._spans: Sequence[tuple[int, int]] = [(i, min(i + size, n)) for i in range(0, n, size)]
        self._weight: Weight = weight or (lambda b: float(samples(b)))
        self.forwards = self.backwards = 0

    def _pieces(self) -> Iterator[tuple[dict[str, Any], float]]:
        if len(self._spans) == 1:
            yield dict(self.batch), 1.0
            return
        total = self._weight(self.batch)
        for start, stop in self._spans:
            piece = rows(self.batch, start, stop)
            if weight := self._weight(piece):
                yield piece, weight / total

    def evaluate(self, gradient: bool) -> float:
        """The loss; with ``gradient`` the parameters' ``.grad`` hold its gradient afterwards (fresh, not added).

        Raises:
            ModelError: the model returns no loss, or one that does not depend on its parameters.
        """
        value = 0.0
        if gradient:
            for p in self.model.parameters():
                p.grad = None
        with torch.set_grad_enabled(gradient):
            for piece, share in self._pieces():
                loss = self.loss(call(self.model, piece), piece).mean()
                if gradient:
                    if not loss.requires_grad:
                        raise ModelError("the loss does not depend on the model's parameters; is it detached?")
                    (loss * share).backward()
                value += float(loss.detach()) * share
        self.forwards += 1
        self.backwards += gradient
        return value
