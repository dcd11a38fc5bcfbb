"""A loss that needs no labels: how far the perturbed model's output moves from its own unperturbed output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_geosharp.errors import ModelError, UsageError
from hf_geosharp.evaluating import evaluating
from hf_geosharp.tasks.kinds import IGNORED, TARGET_LOGITS, TARGET_MASK, Task, without_labels

if TYPE_CHECKING:
    import torch


def attach_model_targets(
    model: Any,
    batches: Sequence[Mapping[str, torch.Tensor]],
    task: Task | None,
    *,
    dtype: torch.dtype | None = None,
    params: str = "all",
) -> list[dict[str, torch.Tensor]]:
    """The batches with the model's own logits as their target, from one forward pass a batch.

    The pass is that of a score: in eval mode, in the same precision and with the same random numbers, so that the
    divergence from these targets is 0 at the weights.

    For tokens that is as many numbers a token as the vocabulary has words: pass few batches at a time where memory is
    short. Labels are left out, except where the model makes its decoder's input from them (seq2seq).

    Args:
        model: The model, unperturbed; it runs on its own device, and comes back as it was.
        batches: The batches, on any device; the new tensors are on the CPU.
        task: The task, or None: logits of three dimensions are then taken as tokens.
        dtype, params: The precision of the score, and which parameters move in it.

    Returns:
        Batches with ``_target_logits`` (batch, classes) or (batch, tokens, vocabulary) and, for tokens,
        ``_target_mask`` (batch, tokens): the tokens that count.

    Raises:
        ModelError: The model gives no logits.
        UsageError: The outputs are numbers (a regression), have classes along an axis that is not known, or padding
            among them that cannot be told from the rest.
    """
    import torch

    from hf_geosharp.carried import Carried
    from hf_geosharp.randomness import same_random_numbers
    from hf_geosharp.sharpness.borrow import borrow
    from hf_geosharp.sharpness.precision import full_float32
    from hf_geosharp.sharpness.selection import movable
    from hf_geosharp.symmetry.inputs import call

    device = next(model.parameters()).device
    attached = []
    with full_float32(), borrow(model, dtype, movable(model, params)), torch.no_grad():
        carried = Carried(model)
        for batch in batches:
            carried.put_back()
            kept = without_labels(task, model, batch)
            same_random_numbers()
            logits = _logits(call(model, {key: value.to(device) for key, value in kept.items()})).detach().cpu()
            precise = logits if logits.dtype == torch.float64 else logits.float()
            attached.append({**kept, **_target(model, precise, kept)})
    return attached


def divergence(model: Any) -> Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]:
    """The divergence from a model's own output: of one distribution over the classes, or of one for each class."""
    return bernoulli_kl_to_model if _problem(model) == "multi_label_classification" else kl_to_model


def _problem(model: Any) -> str | None:
    """What the configuration says that a classifier's outputs are, if it says it."""
    problem: str | None = getattr(getattr(model, "config", None), "problem_type", None)
    return problem


def check_next_token(model: Any, batch: Mapping[str, torch.Tensor]) -> None:
    """Makes sure that the loss of a causal language model is about the next token, as labels made from a text mean.

    Some classes (XLNet, the decoders of encoder-decoders) hold label i against position i and leave it to the caller to
    shift them. One sample is run twice, with and without a label at the first position, which none comes before.

    Raises:
        ModelError: The first label counts.
    """
    import torch

    from hf_geosharp.randomness import the_same_drawn
    from hf_geosharp.sharpness.shards import is_sharded
    from hf_geosharp.symmetry.inputs import call

    parameters = list(model.parameters())
    if any(p.is_meta or is_sharded(p) for p in parameters):
        # The one is refused elsewhere; the other runs on all processes together, in the score alone.
        return
    inputs = {key: value[:1].to(parameters[0].device) for key, value in batch.items()}
    less = inputs["labels"].clone()
    less[:, 0] = IGNORED

    def loss(labels: torch.Tensor) -> float:
        with the_same_drawn():
            return float(call(model, {**inputs, "labels": labels})["loss"])

    with evaluating(model), torch.no_grad():
        whole, rest = loss(inputs["labels"]), loss(less)
    if abs(whole - rest) > 1e-5 * abs(whole):
        raise ModelError(
            f"{type(model).__name__} compares its output at a position with the label there, not with the next one, so "
            "labels cannot be made from texts: its loss would be about tokens that it reads. Pass batches with labels "
            "that are shifted already, or score it without labels (labels='model')."
        )


def kl_to_model(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """KL(p_base || p) of every sample, or of every token that counts.

    Args:
        outputs: The model's outputs, with logits.
        batch: A batch of `attach_model_targets`.

    Returns:
        The losses, (samples,) or (tokens that count,), never negative up to rounding.
    """
    import torch

    logits, target = _compared(outputs, batch)
    base = torch.log_softmax(target, dim=-1)
    return (base.exp() * (base - torch.log_softmax(logits, dim=-1))).sum(dim=-1)


def bernoulli_kl_to_model(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The same where each class is there or not by itself (several labels a sample), summed over the classes."""
    from torch.nn.functional import logsigmoid

    logits, target = _compared(outputs, batch)
    there = logsigmoid(target).exp() * (logsigmoid(target) - logsigmoid(logits))
    absent = logsigmoid(-target).exp() * (logsigmoid(-target) - logsigmoid(-logits))
    return (there + absent).sum(dim=-1)


def _compared(outputs: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and those of the unperturbed model, where they count."""
    import torch

    logits = _logits(outputs)
    target = batch[TARGET_LOGITS].to(device=logits.device, dtype=logits.dtype)
    mask = batch.get(TARGET_MASK)
    if mask is None:
        return logits, target
    counted = mask.to(device=logits.device, dtype=torch.bool)
    return logits[counted], target[counted]


def _target(model: Any, logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch

    if logits.shape[-1] == 1 or _problem(model) == "regression":
        raise UsageError("The model's outputs are numbers (a regression), not a distribution: it needs labels.")
    if logits.ndim > 3:
        raise UsageError(
            f"The model's logits have the shape {tuple(logits.shape)}, in which the axis of the classes is not known: "
            "pass a loss of your own instead of labels='model'."
        )
    if logits.ndim < 3:
        return {TARGET_LOGITS: logits}
    if "labels" in batch:
        mask = batch["labels"] != IGNORED
    elif "attention_mask" in batch and batch["attention_mask"].shape == logits.shape[:2]:
        mask = batch["attention_mask"] != 0
    else:
        mask = _positions(model, logits, batch)
    return {TARGET_LOGITS: logits, TARGET_MASK: mask.cpu().to(torch.int64)}


def _positions(model: Any, logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Which positions of logits count, (batch, positions), where the mask is not one of them: of frames of sound, say.

    Raises:
        UsageError: there is padding, and where it is among the logits is not known.
    """
    import torch

    given = batch.get("attention_mask")
    if given is None or bool((given != 0).all()):
        return torch.ones(logits.shape[:-1], dtype=torch.bool)
    frames = getattr(model, "_get_feature_vector_attention_mask", None)
    if frames is not None:
        mask: torch.Tensor = frames(logits.shape[1], given) != 0
        if mask.shape == logits.shape[:2]:
            return mask
    raise UsageError(
        f"The inputs are padded (attention_mask of shape {tuple(given.shape)}), and which of the logits of shape "
        f"{tuple(logits.shape)} are padding is not known: pass inputs of one length, or a loss of your own instead of "
        "labels='model'."
    )


def _logits(outputs: Any) -> torch.Tensor:
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if logits is None:
        raise ModelError(
            f"The model's output ({type(outputs).__name__}) has no logits, so it has no distribution to compare with."
        )
    result: torch.Tensor = logits
    return result
