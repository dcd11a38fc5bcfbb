"""The balls of a score as jobs: which rank does which, and what each gave, from this run or from a journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_geosharp.errors import DataError, ModelError, UsageError
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.journal import Journal
from hf_geosharp.sharpness.result import BatchScore, Passes, Profile

SCORE, PART, REPRODUCIBILITY, BASELINE = "score", "part", "reproducibility", "baseline"


@dataclass(frozen=True)
class Job:
    """One batch under one geometry, at all its radii. ``metric`` tells the baselines apart, ``part`` what may move."""

    stage: str
    batch: int
    metric: str = ""
    part: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a job gave.

    ``base`` is the loss at the model's own weights, ``scores`` one score for each radius, ascending. ``share`` is
    where the perturbation at the first radius lies (given only where it may matter), ``profile`` what lies on the way
    to it (only where it was asked for). ``single`` says whether its losses were numbers of single precision as the
    model gave them. ``skipped`` says why the batch has no score; then nothing else is there.
    """

    job: Job
    base: float = 0.0
    scores: tuple[tuple[float, BatchScore], ...] = ()
    passes: Passes = field(default_factory=lambda: Passes(0, 0))
    share: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skipped: str | None = None
    seconds: float = 0.0
    profile: Profile | None = None
    single: bool = False

    def at(self, rho: float) -> BatchScore:
        """The score at one radius."""
        return dict(self.scores)[rho]

    def to_line(self) -> dict[str, Any]:
        """As it stands in a journal."""
        return {**asdict(self), "scores": [[rho, asdict(score)] for rho, score in self.scores]}

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> Outcome:
        """The inverse of :meth:`to_line`, bit for bit.

        Raises:
            DataError: it is something else.
        """
        try:
            profile = line.get("profile")
            return cls(
                **{
                    **line,
                    "job": Job(**line["job"]),
                    "scores": tuple((float(rho), BatchScore.from_dict(score)) for rho, score in line["scores"]),
                    "passes": Passes(**line["passes"]),
                    "notes": tuple(line["notes"]),
                    "profile": None if profile is None else Profile.from_dict(profile),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"output: the journal has a line that does not fit ({type(error).__name__}: {error}); choose another "
                "folder, or delete the journal"
            ) from error


@dataclass(frozen=True)
class Ahead:
    """What a rank without work may do of what comes next: another run of the batch that rose most, as far as is known.

    ``stage`` is that of the other run, ``rho`` the radius that counts, ``share`` how many of the batches have to be
    done before, of all.
    """

    stage: str
    rho: float
    share: float


class Ledger:
    """Spreads jobs over ranks and knows what is done already.

    With ``whole`` every rank does every job (a part of each batch), otherwise each job is one rank's.
    """

    def __init__(self, world: World, journal: Journal | None, *, whole: bool = False) -> None:
        self.world, self.whole = world, whole
        # Where every rank has the same outcomes one of them is enough to write them.
        self._journal = journal if not whole or world.leads else None
        self.seconds = 0.0
        """What earlier runs took: each file is of one rank, and ranks work side by side."""
        self._done: dict[Job, Outcome] = {}
        self._read: set[Job] = set()
        mine = [[Outcome.from_line(line) for line in lines] for lines in journal.files] if journal else []
        # Machines need not share a disk: what one rank finds is there for all.
        for files in world.gather(mine):
            for outcomes in files:
                self.seconds = max(self.seconds, sum(o.seconds for o in outcomes))
                for outcome in outcomes:
                    self._done.setdefault(outcome.job, outcome)
                    self._read.add(outcome.job)
        if self._journal is not None:
            self._journal.start()

    def forget_skipped(self) -> None:
        """Skipped batches are to be looked at again."""
        self._done = {job: outcome for job, outcome in self._done.items() if outcome.skipped is None}

    def known(self, jobs: Iterable[Job]) -> list[Outcome]:
        """The outcomes of those jobs that an earlier run has done."""
        return [self._done[job] for job in jobs if job in self._done and job in self._read]

    def run(
        self,
        jobs: Sequence[Job],
        do: Callable[[Job], Outcome],
        waiting: Callable[[], None] | None = None,
        ahead: Ahead | None = None,
    ) -> list[Outcome]:
        """The outcomes of all jobs, in their order, on every rank.

        Jobs take differently long, so each goes to the rank that is free. A rank for which none is left may do
        something ``ahead``. If that turns out not to be needed, it is as if it had not been.
        """
        pending = [job for job in jobs if job not in self._done]
        # Where a batch is everyone's, everyone takes all in one order.
        deal = World().deal(len(pending)) if self.whole else self.world.deal(len(pending))
        found: list[Outcome] = []
        for index in deal:
            found.append(self._take(pending[index], do))
            if ahead is not None:
                deal.tell([len(found), *_highest(found, ahead.rho)])
        if ahead is not None and self.world.size > 1 and not self.whole:
            known = [self._done[job] for job in jobs if job in self._done]
            words = [[len(known), *_highest(known, ahead.rho)], *deal.heard()]
            batch = max((value, batch) for _, value, batch in words)[1]
            early = Job(ahead.stage, batch)
            enough = sum(count for count, _, _ in words) >= ahead.share * len(jobs)
            if batch >= 0 and enough and early not in self._done and deal.first(str(early)):
                found += self._early(early, do)
        for outcomes in self.world.gather(found, waiting):
            self._done.update({outcome.job: outcome for outcome in outcomes})
        deal.close()
        return [self._done[job] for job in jobs]

    def _take(self, job: Job, do: Callable[[Job], Outcome]) -> Outcome:
        outcome = do(job)
        if self._journal is not None:
            self._journal.append(outcome.to_line())
        return outcome

    def _early(self, job: Job, do: Callable[[Job], Outcome]) -> list[Outcome]:
        """A job that may not be needed: where it fails, it is to fail when it is."""
        try:
            return [self._take(job, do)]
        except (DataError, ModelError, UsageError):
            return []


def _highest(outcomes: Sequence[Outcome], rho: float) -> tuple[float, int]:
    """The value of the batch that rose most, and its number; -1 for none."""
    return max(((o.at(rho).value, o.job.batch) for o in outcomes if o.scores), default=(-1.0, -1))
