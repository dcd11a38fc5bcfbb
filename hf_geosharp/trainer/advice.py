"""Settings of a Trainer under which the value would be lost, or misread as its opposite."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from hf_geosharp.errors import UsageError


def advice(
    args: Any,
    state: Any,
    name: str,
    every: str | int,
    *,
    sets: Collection[str] | None,
    limit: float | None,
    late: bool = False,
) -> Iterator[str]:
    """What to warn of at the beginning of a training.

    Args:
        args, state: the Trainer's.
        name: of the value.
        every: when it is measured.
        sets: the names of the trainer's evaluation sets, where there are several; None if the trainer is not known.
        limit: the share of time that leaves measurements out.
        late: whether the callback was added to a trainer that had its callbacks already, those that print among them.

    Raises:
        UsageError: the best model is to be chosen by a value that would not be there.
    """
    if sets is None and (args.report_to or every != "evaluate" or late):
        printed = "printed records" if late else "printed records outside an evaluation"
        yield (
            "the callback is not attached to its trainer: the value is in log_history, but reporters "
            f"({', '.join(args.report_to) or 'none'}) and {printed} do not get it. Use "
            f"GeodesicSharpnessCallback(...).attach(trainer) instead of {'add_callback' if late else 'callbacks=[...]'}"
        )
    if every == "evaluate" and str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no":
        yield "every='evaluate' measures with each evaluation, but eval_strategy is 'no': set eval_strategy, or every="
    if state.is_hyper_param_search:
        yield (
            "a hyperparameter search without compute_objective adds up all metrics of an evaluation, including "
            "this one: pass compute_objective"
        )
    best = args.metric_for_best_model or ""
    # The Trainer puts the prefix there if it is missing, also before the name of one of several evaluation sets.
    bare = best.removeprefix("eval_")
    if bare == name or (bare.endswith(f"_{name}") if sets is None else bare in {f"{one}_{name}" for one in sets}):
        yield from _choosing(args, best, every, limit)


def _choosing(args: Any, best: str, every: str | int, limit: float | None) -> Iterator[str]:
    needs = f"metric_for_best_model is {best!r}, which needs a value in each evaluation"
    if every != "evaluate":
        raise UsageError(f"{needs}: use every='evaluate'")
    if limit is not None:
        raise UsageError(f"{needs}, but max_fraction skips some: lower samples or steps instead")
    if args.greater_is_better is not False:
        yield (
            f"metric_for_best_model is {best!r} and greater_is_better is {args.greater_is_better}: the sharpest model "
            "would be kept as the best. Pass greater_is_better=False"
        )
