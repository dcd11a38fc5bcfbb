"""Jobs over ranks: each is done once, by whoever is free, and an idle rank does what will be wanted next."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from hf_geosharp.errors import ModelError
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.jobs import REPRODUCIBILITY, SCORE, Ahead, Job, Ledger, Outcome
from hf_geosharp.sharpness.result import BatchScore
from tests.test_parallel import in_threads

BATCHES = 6


def outcome(job: Job) -> Outcome:
    value = float(job.batch) if job.stage == SCORE else -1.0
    return Outcome(job, 1.0, ((0.1, BatchScore(job.batch, 1.0, value, 3, True)),))


WORST = Ahead(REPRODUCIBILITY, 0.1, (BATCHES - 1) / BATCHES)


class Work:
    """Counts who does what; the batch ``slow`` is done last, whoever has it."""

    def __init__(self, slow: int, fails: bool = False) -> None:
        self.slow, self.fails = slow, fails
        self.done: list[tuple[Job, int]] = []
        self.rest = threading.Semaphore(0)

    def __call__(self, world: World) -> list[Outcome]:
        ledger = Ledger(world, None)

        def do(job: Job) -> Outcome:
            self.done.append((job, world.rank))
            if job == Job(SCORE, self.slow):
                # Until the others have done all there is, and the second run of the worst so far.
                while len(self.done) < BATCHES + 1:
                    time.sleep(0.01)
            if job.stage == REPRODUCIBILITY and self.fails:
                raise ModelError("not finite")
            return outcome(job)

        found = ledger.run([Job(SCORE, i) for i in range(BATCHES)], do, ahead=WORST)
        again = [Job(REPRODUCIBILITY, BATCHES - 1)]
        assert ledger.known(again) == []
        return found + ledger.run(again, do)


EXPECTED = [outcome(Job(SCORE, i)) for i in range(BATCHES)] + [outcome(Job(REPRODUCIBILITY, BATCHES - 1))]


@pytest.mark.parametrize("size", [2, 3])
def test_an_idle_rank_runs_the_worst_batch_again_while_another_is_at_work(size: int) -> None:
    work = Work(slow=2)
    assert in_threads(size, work) == [EXPECTED] * size
    ran = [job for job, _ in work.done]
    assert len(ran) == len(set(ran)) == BATCHES + 1
    rank = dict(work.done)
    assert rank[Job(REPRODUCIBILITY, 5)] != rank[Job(SCORE, 2)]


def test_what_was_done_too_early_is_as_if_it_had_not_been() -> None:
    work = Work(slow=5)
    assert in_threads(2, work) == [EXPECTED] * 2
    again = [job.batch for job, _ in work.done if job.stage == REPRODUCIBILITY]
    assert sorted(again) == [4, 5]


def test_a_failure_of_what_may_not_be_needed_counts_where_it_is_needed() -> None:
    found: list[Any] = in_threads(2, Work(slow=5, fails=True))
    assert all(isinstance(error, ModelError) for error in found)
    assert "not finite" in str(found[0])


def test_one_process_does_everything_in_order() -> None:
    jobs: list[Job] = []

    def do(job: Job) -> Outcome:
        jobs.append(job)
        return outcome(job)

    ledger = Ledger(World(), None)
    wanted = [Job(SCORE, i) for i in range(BATCHES)]
    assert ledger.run(wanted, do, ahead=WORST) == EXPECTED[:-1]
    assert jobs == wanted
