"""Several starts in one ball, on objectives with several peaks of known height, and in scores of tiny models."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_geosharp import SharpnessResult, find_symmetries, score
from hf_geosharp.errors import UsageError
from hf_geosharp.geometry.space import Tangent, Vector
from hf_geosharp.sharpness.ascent import Climb, NotFiniteError, Wanted, auto_pgd
from hf_geosharp.sharpness.choices import MORE, PATIENCE
from hf_geosharp.sharpness.choices import search as in_words
from hf_geosharp.sharpness.result import BatchScore
from hf_geosharp.sharpness.secant import secant
from hf_geosharp.sharpness.settings import Settings
from hf_geosharp.sharpness.starts import Peaks, Ways, higher, peaks, told
from tests.sharpness.test_ascent import Counted, plain_space
from tests.sharpness.tiny import bert, bert_batches

SPACE = plain_space(3, 2)


def search(evaluate: Counted, starts: int, *, rho: float = 1.0, seed: int = 0) -> Peaks:
    ends: list[Tangent] = []
    given: list[tuple[float, Tangent]] = []

    def ascend() -> Climb:
        start = ends.pop() if ends else None
        base = None if start is None else float(evaluate.f(torch.zeros(5, dtype=torch.float64)))
        return secant(SPACE, evaluate, rho, 20, start=start, given=given.pop() if given else None, base=base)

    return peaks(Ways(ascend, ascend), ends, given, evaluate, SPACE, rho, starts, torch.Generator().manual_seed(seed))


def lopsided(u: Tensor) -> Tensor:
    """The slope at 0 leads to u₀ = 1, where it is 1.1; at u₀ = -1 it is 1.9."""
    return 0.1 * u[0] + u[0] ** 2 - 0.5 * u[0] ** 3 * u[0].abs()


def sloping(u: Tensor) -> Tensor:
    """A slope that outweighs what is quadratic."""
    return u[0] + 0.1 * u[0] ** 2


def test_one_start_is_the_ascent_alone() -> None:
    evaluate, alone = Counted(lopsided), Counted(lopsided)
    found, climb = search(evaluate, 1), secant(SPACE, alone, 1.0, 20)
    assert found.rises == (climb.rise,)
    assert found.highest.history == climb.history
    assert found.evaluations == len(evaluate.points) == len(alone.points)


def test_the_second_start_finds_the_peak_on_the_other_side() -> None:
    found = search(Counted(lopsided), 2)
    assert found.rises == (pytest.approx(0.6, rel=1e-3), pytest.approx(1.4, rel=1e-3))
    assert found.highest.rise == max(found.rises)
    assert float(found.highest.u.flat()[0]) == pytest.approx(-1, rel=1e-3)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_highest_peak_is_kept_whichever_start_finds_it() -> None:
    """The second start lies on its peak already, so that the next step leads to where it is."""
    found = search(Counted(lambda u: 0.1 * u[0] + u[0] ** 2), 2)
    assert found.rises == (pytest.approx(1.1, rel=1e-3), pytest.approx(0.9, rel=1e-3))
    assert found.highest.rise == found.rises[0]


def test_nobody_climbs_opposite_a_slope() -> None:
    """That is known by one forward pass."""
    evaluate = Counted(sloping)
    found = search(evaluate, 2)
    assert found.rises == (pytest.approx(1.1), 0.0)
    assert not evaluate.wanted[-1]
    assert torch.allclose(evaluate.points[-1], -found.highest.u.flat())


def test_further_starts_are_random_and_the_same_for_one_seed() -> None:
    found = [search(Counted(lopsided), 4, seed=seed) for seed in (0, 0, 1)]
    assert found[0].rises == found[1].rises
    assert len(found[0].rises) == 4
    evaluate = Counted(sloping)
    first, second = (next(p for p in points if abs(float(p.norm()) - 1) < 1e-12) for points in _starts(evaluate))
    assert not torch.equal(first, second)


def _starts(evaluate: Counted) -> tuple[list[Tensor], list[Tensor]]:
    """The points of the climbs from the two random ones of four starts."""
    search(evaluate, 2)
    before = len(evaluate.points)
    search(evaluate, 3)
    third = evaluate.points[2 * before :]
    search(evaluate, 3, seed=5)
    return third, evaluate.points[3 * before + len(third) :]


def test_evaluations_are_those_that_were_made() -> None:
    for f in (lopsided, sloping):
        evaluate = Counted(f)
        assert search(evaluate, 4).evaluations == len(evaluate.points)


def test_where_the_ascent_found_nothing_the_other_starts_are_random() -> None:
    def flat_then_high(u: Tensor) -> Tensor:
        return torch.relu(u.norm() - 0.9) * u[1] + 0 * u.sum()

    found = search(Counted(flat_then_high), 3)
    assert len(found.rises) == 3
    assert max(found.rises[1:]) > 0


def test_a_start_without_a_finite_loss_is_left_out_and_told() -> None:
    def half(u: Tensor) -> Tensor:
        return torch.where(u[0] < -0.5, torch.inf, u[0] + u[0] ** 2)

    found = search(Counted(half), 2)
    assert found.rises == (pytest.approx(2.0), 0.0)
    assert not found.highest.finite
    assert not found.highest.lost


def test_a_loss_that_is_not_finite_at_the_base_point_is_an_error_as_with_one_start() -> None:
    with pytest.raises(NotFiniteError):
        search(Counted(lambda u: u.sum() * math.nan), 3)


# ------------------------------------------------------------------------------------------------------- rough balls


def rough_search(evaluate: Counted, steps: int, starts: int = 1) -> Peaks:
    """By so many steps of the secant ascent, then by Auto-PGD."""
    ends: list[Tangent] = []
    given: list[tuple[float, Tangent]] = []

    def climb(ascent: Any, steps: int) -> Climb:
        start, slope = (ends.pop() if ends else None), (given.pop() if given else None)
        base = float(evaluate.f(torch.zeros(5, dtype=torch.float64)))
        return ascent(SPACE, evaluate, 1.0, steps, start=start, given=slope, base=base)  # type: ignore[no-any-return]

    ways = Ways(*(partial(climb, *way) for way in ((secant, steps), (secant, 20), (auto_pgd, 60))))
    return peaks(ways, ends, given, evaluate, SPACE, 1.0, starts, torch.Generator().manual_seed(0))


def test_where_the_first_climb_does_not_settle_another_ascent_climbs_from_the_base_point() -> None:
    evaluate, reference = Counted(lopsided), auto_pgd(SPACE, Counted(lopsided), 1.0, 60)
    found = rough_search(evaluate, 1)
    first = secant(SPACE, Counted(lopsided), 1.0, 1)
    assert found.rises == (max(first.rise, reference.rise),)
    assert found.rough
    assert found.evaluations == len(evaluate.points) == 2 + 61
    assert torch.equal(evaluate.points[2], torch.zeros(5, dtype=torch.float64))


def test_meanwhile_only_the_first_peak_is_kept() -> None:
    def most_alive(search: Callable[[Counted], Any]) -> int:
        alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        counts = [0]

        class Watched(Counted):
            def __call__(self, u: Vector, gradient: Wanted) -> tuple[float, Tangent | None]:
                loss, g = super().__call__(u, gradient)
                assert isinstance(u, Tangent)
                alive.update({id(t): t for t in (*u.pieces, *(() if g is None else g.pieces))})
                counts.append(len(alive))
                return loss, g

        search(Watched(lopsided))
        return max(counts)

    alone = most_alive(lambda evaluate: auto_pgd(SPACE, evaluate, 1.0, 60))
    assert most_alive(lambda evaluate: rough_search(evaluate, 2)) == alone + 2  # the space has two parts


def test_where_it_settles_there_is_no_other() -> None:
    evaluate = Counted(lopsided)
    found = rough_search(evaluate, 20)
    assert found.highest.stopped == "converged"
    assert not found.rough
    assert found.evaluations == len(evaluate.points)


def test_where_it_finds_less_the_first_climb_counts() -> None:
    """That did not settle on the highest peak, which Auto-PGD with one step does not reach."""
    ends: list[Tangent] = []
    first = partial(secant, SPACE, Counted(lopsided), 1.0, 2)
    weak = partial(auto_pgd, SPACE, Counted(lopsided), 0.1, 1)
    found = peaks(Ways(first, first, weak), ends, [], Counted(lopsided), SPACE, 1.0, 1, torch.Generator())
    assert found.rough
    assert found.rises == (first().rise,)
    assert weak().rise < first().rise


def test_further_starts_come_after_it_and_lie_opposite_the_higher_of_both() -> None:
    evaluate = Counted(lopsided)
    found = rough_search(evaluate, 1, starts=3)
    assert len(found.rises) == 3
    assert torch.allclose(evaluate.points[63], -rough_search(Counted(lopsided), 1).highest.u.flat())
    assert found.evaluations == len(evaluate.points)


def test_a_ball_is_rough_only_if_the_ascent_had_the_time_to_settle() -> None:
    usual, few = Settings(), Settings(steps=PATIENCE)
    assert (usual.first, usual.rough, usual.further) == (("secant", PATIENCE), ("apgd", MORE * 20), ("secant", 20))
    assert (few.first, few.rough) == (("secant", PATIENCE), None)
    for ascent in ("secant", "apgd"):
        alone = Settings(ascent=ascent)
        assert (alone.first, alone.rough, alone.further) == ((ascent, 20), None, (ascent, 20))
    assert Settings(average=True).rough is None


def test_evaluations_are_counted_for_all_climbs() -> None:
    assert Settings(ascent="secant", starts=3).evaluations == 3 * 21
    assert Settings(starts=3).evaluations == PATIENCE + 1 + 3 * 20 + 1 + 2 * 21
    assert Settings(average=True, steps=10).evaluations == 11


def test_a_score_is_that_of_the_higher_climb_and_tells_both() -> None:
    """At this radius the loss of the model is far from quadratic."""
    auto, apgd = take(steps=20), take(ascent="apgd", steps=60)
    secant_alone = take(ascent="secant", steps=PATIENCE)
    for batch, reference, first in zip(auto.per_batch, apgd.per_batch, secant_alone.per_batch, strict=True):
        assert batch.rough
        assert batch.value == pytest.approx(max(first.value, reference.value), rel=1e-9)
        assert batch.rises == ()
        assert batch.passes == PATIENCE + 1 + 61
    assert auto.converged == f"settled in {sum(b.converged for b in auto.per_batch)} of 3 batches, 3 rough"
    assert SharpnessResult.from_dict(auto.to_dict()) == auto
    assert not auto.warnings  # a climb that did not settle is no peak of its own
    assert auto.passes.forwards == sum(batch.passes or 0 for batch in auto.per_batch)


def test_in_rough_balls_the_score_of_moved_weights_is_the_same() -> None:
    moved = bert().double()
    symmetries = find_symmetries(moved)
    symmetries.apply(moved, symmetries.random_element(moved, 1, condition=10.0))
    result = score(moved, bert_batches(3), rho=1.0, reproducibility=False, dtype="float64")
    here = take(steps=20)
    assert all(batch.rough for batch in here.per_batch)
    assert result.geodesic_sharpness == pytest.approx(here.geodesic_sharpness, rel=1e-6)


def test_the_peak_at_one_radius_is_let_go_of_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def watched(*arguments: Any) -> Peaks:
        found = peaks(*arguments)
        alive.extend(peak() is not None for peak in held)  # the chart knew the last point until it wrote another
        held.append(weakref.ref(found.highest.u.pieces[0]))
        return found

    monkeypatch.setattr("hf_geosharp.sharpness.ball.peaks", watched)
    score(bert(), bert_batches(1), rho=(0.3, 0.1), steps=4, reproducibility=False)
    assert alive == [False]


def test_in_a_smooth_ball_it_is_the_secant_ascent() -> None:
    auto, alone = (take(ascent=ascent, steps=20, rho=0.05) for ascent in ("auto", "secant"))
    assert all(batch.stopped == "converged" for batch in alone.per_batch)
    assert auto.per_batch == alone.per_batch


# ------------------------------------------------------------------------------------------------------ what is told


def test_only_peaks_that_differ_by_more_than_the_ascent_resolves_are_higher() -> None:
    assert higher(()) == higher((1.0,)) == higher((1.0, 1.009)) == higher((1.0, 0.0, 0.5)) == 0
    assert higher((1.0, 0.5, 1.25)) == pytest.approx(0.25)
    assert higher((0.0, 0.5)) == math.inf


def test_it_is_told_at_which_radius_and_in_how_many_batches() -> None:
    def batch(index: int, *rises: float) -> BatchScore:
        return BatchScore(index, 1.0, max(rises), 3, True, 4, "converged", rises)

    scores = {0.3: [batch(0, 1.0, 1.74), batch(1, 1.0, 1.0)], 0.1: [batch(0, 1.0, 0.0), batch(1, 1.0, 1.0)]}
    (note,) = told(scores)
    assert note.startswith("rho 0.3: in 1 of 2 batches another start found more than the first, by up to 74%")
    (note,) = told({0.3: [batch(0, 0.0, 1.0)]})
    assert "more than ten times" in note


def test_where_a_smaller_ball_holds_more_it_is_told() -> None:
    def batches(*values: float) -> list[BatchScore]:
        return [BatchScore(i, 1.0, v, 3, True, 4, "converged") for i, v in enumerate(values)]

    (note,) = told({0.3: batches(1.0, 2.0), 0.1: batches(1.25, 2.0), 1.0: batches(1.0, 3.0)})
    assert note.startswith("rho 0.3: in 1 of 2 batches rho 0.1 found more, by up to 25%")
    lost = [replace(batch, value=0.0, stopped="lost") for batch in batches(1.0, 2.0)]
    assert not told({0.1: batches(1.0, 2.0), 0.3: lost})


def test_the_search_in_words() -> None:
    assert in_words("auto", 20) == "at most 13 steps of the secant ascent, and 60 of Auto-PGD in rough balls"
    assert in_words("auto", 10) == in_words("secant", 10) == "at most 10 steps of the secant ascent"
    assert in_words("apgd", 1) == "1 step of Auto-PGD"
    assert in_words("secant", 20, 3) == "at most 20 steps of the secant ascent, from each of 3 starts"
    assert in_words("of another version", 7) == "of another version, 7 steps"


# --------------------------------------------------------------------------------------------------------- in a score


def take(batches: int = 3, **options: Any) -> SharpnessResult:
    options = {"rho": 1.0, "steps": 8, "reproducibility": False, "dtype": "float64", **options}
    return score(bert(), bert_batches(batches), **options)


@pytest.mark.parametrize("ascent", ["secant", "apgd"])
def test_a_score_is_of_the_highest_and_tells_what_each_start_found(ascent: str) -> None:
    alone, several = take(ascent=ascent), take(ascent=ascent, starts=3)
    assert (alone.starts, several.starts) == (1, 3)
    for one, batch in zip(alone.per_batch, several.per_batch, strict=True):
        assert one.rises == ()
        assert len(batch.rises) == 3
        assert batch.rises[0] == one.value
        assert batch.value == max(batch.rises)
        assert batch.passes is not None
        assert one.passes is not None
        assert batch.passes > one.passes
    assert several.passes.forwards == sum(batch.passes or 0 for batch in several.per_batch)
    assert SharpnessResult.from_dict(several.to_dict()) == several


@pytest.mark.parametrize("starts", [1, 3])
@pytest.mark.parametrize("labels", ["data", "model"])
def test_a_score_is_the_same_whichever_other_radii_are_asked_for(starts: int, labels: str) -> None:
    """To the last bit; in rough balls, with random starts and random first steps."""
    how: dict[str, Any] = {"batches": 2, "starts": starts, "labels": labels, "steps": 20}
    for point in take(rho=(1.0, 0.1, 0.3), **how).curve:
        assert point.geodesic_sharpness == take(rho=point.rho, **how).geodesic_sharpness


def test_parts_and_a_second_run_have_the_same_starts() -> None:
    result = take(starts=2, per="layer", reproducibility=True)
    assert result.reproducible.ok
    alone = take(per="layer")
    assert all(many.value >= one.value * (1 - 1e-12) for many, one in zip(result.per, alone.per, strict=True))


def test_a_journal_of_other_starts_is_refused(tmp_path: Any) -> None:
    first = take(starts=2, output=tmp_path)
    again = take(starts=2, output=tmp_path)
    assert again.per_batch == first.per_batch
    with pytest.raises(UsageError, match="starts"):
        take(starts=3, output=tmp_path)


def test_the_average_case_has_none_and_there_is_at_least_one() -> None:
    with pytest.raises(UsageError, match="starts and ascent are available only for the worst case"):
        take(starts=2, average=True)
    with pytest.raises(UsageError, match="starts is 0; at least 1"):
        take(starts=0)
