"""The loss of one batch at the weights that the model has at the moment, and its gradient in the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.carried import Carried
from hf_geosharp.errors import ModelError, UsageError, first_line
from hf_geosharp.parallel import World
from hf_geosharp.randomness import same_random_numbers
from hf_geosharp.sharpness.ascent import Wanted, is_wanted
from hf_geosharp.sharpness.memory import MicroBatch, is_out_of_memory
from hf_geosharp.sharpness.parts import (
    SETTLED,
    Batch,
    Weight,
    agree,
    by_each_reading,
    excerpt,
    on_device,
    other_cut,
    picked,
    proved_reading,
    rows,
    same_by_another_cut,
    samples,
    uncut,
)
from hf_geosharp.sharpness.shards import Shards
from hf_geosharp.symmetry.inputs import call, output_tensors

Loss = Callable[[Any, Batch], Tensor]
"""(outputs, batch) -> losses of the samples (or tokens), or their mean."""


_INDEPENDENT = "the loss does not depend on the model's parameters;"


def own_loss(outputs: Any, batch: Batch) -> Tensor:
    """The loss that the model itself returns for a batch with labels.

    Raises:
        ModelError: the outputs have no loss.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if type(outputs) is tuple and outputs and isinstance(outputs[0], Tensor) and outputs[0].ndim == 0:
        # Without return_dict the loss comes first; a Trainer reads it there.
        loss = outputs[0]
    if loss is None:
        hint = "" if "labels" in batch else f"; the batch has no 'labels' (it has {sorted(batch)})"
        raise ModelError(
            f"the model returned no loss{hint}: give labels, or pass loss=(outputs, batch) -> losses of the samples"
        )
    return loss


class Reach:
    """Which rows of a model's embeddings a batch looks up, seen while it runs (a context manager).

    ``rows`` maps the identity of a weight to the sorted rows; an embedding that is not called with indices alone is
    left out, for what it looks up is not known.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.max_norm is None]
        # While a sharded model runs its modules have other weights.
        self._keys: dict[nn.Module, int] = {m: id(m.weight) for m in self._modules}
        self._seen: dict[int, list[Tensor]] = {}
        self._unknown: set[int] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> Reach:
        def hook(module: nn.Module, args: Any) -> None:
            key = self._keys[module]
            if args and isinstance(args[0], Tensor) and not args[0].is_floating_point():
                self._seen.setdefault(key, []).append(args[0].detach().reshape(-1))
            else:
                self._unknown.add(key)

        self._handles = [m.register_forward_pre_hook(hook) for m in self._modules]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def rows(self) -> dict[int, Tensor]:
        """id(weight) -> (n,) the rows that were looked up."""
        return {key: torch.unique(torch.cat(ids)) for key, ids in self._seen.items() if key not in self._unknown}


class Objective:
    """Loss of a batch under a model, as a mean over its samples or tokens, in micro-batches if asked.

    In a world of several ranks each of them takes a part of the samples; losses and gradients are summed, and all
    ranks get the same. Counts its passes over the whole batch: ``forwards``, and the ``backwards`` that were wanted.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        loss: Loss | None = None,
        weight: Weight | None = None,
        micro_batch: MicroBatch | int | None = None,
        world: World | None = None,
        shards: Shards | None = None,
        run: Callable[..., Any] | None = None,
    ) -> None:
        """``shards`` are those of the model, if it is sharded over the world; ``run`` stands for the model's code."""
        self._run = run
        self.model, self.loss = model, loss or own_loss
        self._shards = shards
        self._terms: Weight = weight or (lambda b: float(samples(b)))
        self._micro = micro_batch if isinstance(micro_batch, MicroBatch) else MicroBatch(micro_batch)
        self._world = world or World()
        self._whole = batch
        n = samples(batch)
        start, stop = self._world.span(n)
        self._uncut = uncut(batch)
        if stop - start < n:
            self._refuse_parts("be spread over processes: leave out shard 'samples'")
        if self._micro.size(n) < n and not self._micro.adapts:
            self._refuse_parts(
                "go through the model in micro-batches: leave out micro_batch, or make it as large as the batch"
            )
        own = batch if stop - start == n else rows(batch, start, stop)
        device = next(model.parameters()).device
        self.batch = on_device(own, device)
        self._samples = stop - start
        self._carried = Carried(model)
        self.forwards = self.backwards = 0
        self.without: set[int] = set()
        """Identities of the parameters that had no gradient after the last backward pass, of this rank's samples."""
        self.single = True
        """Whether the losses of this rank's pieces have all been numbers of single precision, to the last bit."""
        self._idle: list[tuple[dict[str, Any], float]] = []
        if self._world.size > 1:
            # Ranks prove it together, also those that get no samples.
            self._reading = self._find_reading()
        if shards is not None:
            self._idle = self._idle_pieces(batch, device)

    def _refuse_parts(self, what: str) -> None:
        if self._uncut:
            raise UsageError(f"{self._uncut}, so the batch cannot {what}")

    def _idle_pieces(self, batch: Batch, device: torch.device) -> list[tuple[dict[str, Any], float]]:
        """Passes of no weight: ranks of a sharded model run equally often, whether they have samples or not."""
        own = sum(1 for _ in self._pieces())
        missing = max(self._world.gather(own)) - own
        if not missing:
            return []
        single = (rows(batch, i, i + 1) for i in range(samples(batch)))
        filler = next(row for row in single if self._weight(row))
        return missing * [(on_device(filler, device), 0.0)]

    @cached_property
    def _reading(self) -> int:
        return self._find_reading()

    def prove_parts(self) -> None:
        """Finds out how the losses of parts make that of the batch, as any pass in parts does first.

        Raises:
            UsageError: they do not.
        """
        self._find_reading()

    def _find_reading(self) -> int:
        """What the loss is a mean over: of the weight's readings the one by which the losses of samples add up."""
        if (known := self._micro.readings) and (len(known) == 1 or agree(self._whole, self._terms, known)):
            return known[0]
        device = next(self.model.parameters()).device

        def loss(part: Batch) -> float:
            part = on_device(part, device)
            with torch.no_grad():
                return float(self._mean_loss(part))

        try:
            found = proved_reading(self._whole, self._terms, loss, self._narrowest)
        except (RuntimeError, MemoryError) as error:
            if self._shards is not None or not is_out_of_memory(error):
                raise
            # Two samples do not fit: nothing can be proved, and the likeliest is taken.
            found = ()
        if self._shards is not None:
            # Or the next pass would see what was gathered here, whatever is written into the rows before.
            self._shards.settle()
        self._micro.readings = tuple(self._world.broadcast(found))
        return (*self._micro.readings, 0)[0]

    def check_parts(self, value: float) -> None:
        """Makes sure that the batch's loss, which is ``value`` from its parts, is the same from others.

        All ranks that share it have to call. A batch that goes through the model at once has no parts.

        Raises:
            UsageError: it is another one, so that the parts do not make the loss of the batch.
        """
        n = samples(self._whole)
        # Ranks may have learnt different sizes.
        size = min(self._world.gather(self._micro.size(-(-n // self._world.size))))
        if self._uncut or size >= n or n < 2:
            return
        cut = other_cut(n, size)
        mine = cut[self._world.rank :: self._world.size]
        # Ranks of a sharded model run equally often.
        idle = 0 if self._shards is None else -(-len(cut) // self._world.size) - len(mine)

        def share(which: list[int]) -> float:
            weight = self._weight(picked(self._whole, which))
            # A mean over nothing is no number.
            found = self._loss_of_part(which) if weight or self._shards is not None else 0.0
            return weight * found / self._total if weight else 0.0

        def shares() -> float:
            total = sum(map(share, mine))
            for _ in range(idle):
                self._loss_of_part(cut[0])
            return total

        other = self._fitting(shares)
        if other is None:
            return
        if self._world.size > 1:
            other = self._world.sum(other)

        def rounding() -> float:
            half = cut[0][: max(1, size // 2)]
            found = self._fitting(lambda: abs(self._loss_of_part(half + half) - self._loss_of_part(half)))
            return math.inf if found is None else max(self._world.gather(found))

        same_by_another_cut(value, other, self._narrowest, rounding)

    @property
    def _narrowest(self) -> torch.dtype:
        """The narrowest dtype that the model computes in; single precision stands for double, too."""
        return next((p.dtype for p in self.model.parameters() if p.dtype not in SETTLED), torch.float32)

    def _loss_of_part(self, which: list[int]) -> float:
        """The loss of some samples of the whole batch, by the model's own code."""
        part = on_device(picked(self._whole, which), next(self.model.parameters()).device)
        same_random_numbers()
        with torch.no_grad():
            return float(self._mean_loss(part, compiled=False))

    def _fitting(self, run: Callable[[], float]) -> float | None:
        """What it comes to; None, on all ranks, where some rank has not the memory for it."""
        found: float | None = None
        try:
            found = run()
        except (RuntimeError, MemoryError) as error:
            if self._shards is not None or not is_out_of_memory(error):
                raise
        finally:
            if self._shards is not None:
                self._shards.reset()
        return found if all(self._world.gather(found is not None)) else None

    def _weight(self, part: Batch) -> float:
        return by_each_reading(self._terms, part)[self._reading]

    @cached_property
    def _total(self) -> float:
        return self._weight(self._whole)

    def _pieces(self) -> Iterator[tuple[dict[str, Any], float]]:
        # "auto" may have learnt from a batch that had parts.
        size = self._samples if self._uncut else self._micro.size(self._samples)
        if self._world.size == 1 and size == self._samples:
            yield dict(self.batch), 1.0
            return
        for start in range(0, self._samples, max(size, 1)):
            piece = rows(self.batch, start, min(start + size, self._samples))
            if weight := self._weight(piece):
                yield piece, weight / self._total

    def evaluate(self, gradient: Wanted) -> float:
        """The loss; with ``gradient`` the parameters' ``.grad`` hold its gradient afterwards (fresh, not added).

        Where it is asked for the gradient once the loss is known, and does not want it, there is no backward pass; but
        for micro-batches, which have theirs as they come.

        Raises:
            ModelError: the model returns no loss, or one that does not depend on its parameters; out of memory, if need
                be with a single sample at a time.
        """
        try:
            return self._evaluated(gradient)
        finally:
            self._carried.put_back()

    def _evaluated(self, gradient: Wanted) -> float:
        losses: list[float] = []
        graphs: list[Tensor] = []
        forward = partial(self._own_part, bool(gradient), losses, graphs)
        while not self._fits(forward):
            pass
        # fsum cannot add what is not finite.
        value = math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)
        if self._world.size > 1:
            value = self._world.sum(value)
        wanted = is_wanted(gradient, value)
        self.forwards += 1
        self.backwards += wanted
        if wanted:
            # Where memory runs out here, the loss stands.
            while graphs and not self._fits(partial(_backward, graphs.pop())):
                while not self._fits(forward):
                    pass
        elif gradient:
            self._clear()
        if self._shards is not None:
            # A forward pass that no backward one follows leaves more to be forgotten.
            (self._shards.reset if graphs else self._shards.settle)()
        if wanted:
            for p in self.model.parameters():
                if p.grad is not None and p.grad.is_sparse:  # of a lookup that was asked for one
                    p.grad = p.grad.to_dense()
            self.without = {id(p) for p in self.model.parameters() if p.grad is None}
            # Of a sharded model there may be no gradient because another rank has failed, which is told in time.
            whole = self._shards is None
            if whole and losses and all(id(p) in self.without for p in self.model.parameters() if p.requires_grad):
                raise ModelError(f"{_INDEPENDENT} does it come from another model?")
        if wanted and self._world.size > 1 and self._shards is None:
            self._world.add_(self._gradients())
        return value

    @property
    def compiled(self) -> bool:
        """Whether other code than the model's own runs."""
        return self._run is not None

    def look(self) -> None:
        """A pass of the model's own code for those who look on, where the passes that count are of another.

        Compiled code does not notice hooks.
        """

        def run() -> None:
            with torch.no_grad():
                for piece, _ in self._pieces():
                    self._carried.put_back()
                    call(self.model, piece)

        try:
            while not self._fits(run):
                pass
        finally:
            self._carried.put_back()

    def _own_part(self, gradient: bool, losses: list[float], graphs: list[Tensor]) -> None:
        """The losses of this rank's pieces, and their gradients.

        But of a single piece only what its backward pass starts from, in ``graphs``: it can wait.
        """
        losses.clear()
        graphs.clear()
        # A model that draws random numbers draws the same at every point; the user's states come back with the model.
        same_random_numbers()
        if gradient:
            self._clear()
        pieces = [*self._pieces(), *self._idle]
        alone = len(pieces) == 1 and (self._shards is None or self._shards.forgets)
        # Gradients of a sharded model come out as means over the ranks.
        ranks = 1 if self._shards is None else self._shards.size * self._shards.copies
        with torch.set_grad_enabled(gradient):
            for piece, share in pieces:
                loss = self._mean_loss(piece)
                value = float(loss.detach())
                self.single = self.single and is_single(value)
                losses.append(value * share)
                if not gradient:
                    continue
                if not loss.requires_grad:
                    raise ModelError(f"{_INDEPENDENT} is it detached, or does the model run under torch.no_grad?")
                scaled = loss * (share * ranks)
                if alone:
                    graphs.append(scaled)
                else:
                    _backward(scaled)

    def _mean_loss(self, piece: Batch, *, compiled: bool = True) -> Tensor:
        # What a pass has left was computed at other weights, and a backward pass has freed its graph.
        self._carried.put_back()
        loss: Any = self.loss(call(self.model, piece, self._run if compiled else None), piece)
        if not isinstance(loss, Tensor):
            raise ModelError(
                f"the loss is a {type(loss).__name__}, not a tensor: loss=(outputs, batch) has to return the losses of "
                "the samples, or their mean, as torch computes them"
            )
        if not loss.is_floating_point():
            raise ModelError(
                f"the loss is a tensor of {str(loss.dtype).removeprefix('torch.')}, which has no gradient: it has to "
                "be one of floating-point numbers"
            )
        return loss.mean()

    def _fits(self, run: Callable[[], None]) -> bool:
        """Runs it; False where memory ran out, and there are smaller micro-batches from now on."""
        try:
            run()
            return True
        except (RuntimeError, MemoryError) as error:
            if self._shards is not None:
                # Where a rank fails the others fail for want of it.
                self._world.poll(now=True)
            if not is_out_of_memory(error):
                raise
            if not self._micro.adapts:
                raise ModelError(
                    f"out of memory with {self._micro.size(self._samples)} samples at a time. A smaller "
                    "micro_batch, or 'auto', and gradient_checkpointing leave the score unchanged; a smaller "
                    "batch_size changes it, because each batch has its own ball"
                ) from error
        self._refuse_parts("be halved where memory has run out: use fewer samples per batch")
        # Out here, where neither the error nor its cause holds on to what the pass had computed.
        del run
        self._clear()
        self._micro.halve(self._samples)
        return False

    def _clear(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def _gradients(self) -> list[Tensor]:
        """One for each parameter that may move, on every rank, whether its samples touch the parameter or not."""
        found = []
        for p in filter(lambda p: p.requires_grad, self.model.parameters()):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            found.append(p.grad)
        return found


def _backward(loss: Tensor) -> None:
    """The backward pass.

    Raises:
        ModelError: code of the model's own refuses it.
        RuntimeError: as torch raises it, where memory runs out for one.
    """
    try:
        loss.backward()
    except Exception as error:
        if isinstance(error, (RuntimeError, MemoryError)) and not isinstance(error, NotImplementedError):
            raise
        raise ModelError(
            f"the model's backward pass fails, and a worst case needs one ({type(error).__name__}: "
            f"{first_line(error)}); the model is in evaluation mode, for which some code has none"
        ) from error


def is_single(value: float) -> bool:
    """Whether single precision holds a number to the last bit; what is none says nothing, and passes for one."""
    return not math.isfinite(value) or torch.tensor(value, dtype=torch.float32).item() == value


def few_outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    """What a model answers to a few samples of a batch, always with the same random numbers."""
    few = on_device(excerpt(batch, 0, max(1, min(2, samples(batch) // 2))), next(model.parameters()).device)
    same_random_numbers()
    with torch.no_grad():
        return output_tensors(call(model, few))
