"""A world of processes: which of them this one is, and what they tell each other. Knows nothing of what they compute.

Accelerate joins the processes that a launcher started. Small things (results, failures, signs of life) go through the
key-value store that every such world has, so that whoever waits can see at once that another rank failed, and whether
it is still alive; tensors are summed by the world's own backend.
"""

from __future__ import annotations

import itertools
import json
import math
import numbers
import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from hf_geosharp import errors
from hf_geosharp.errors import GeosharpError, GeosharpWarning, UsageError, WorldError, first_line
from hf_geosharp.launchers import is_initialised, join, launched_size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

TIMEOUT = 1800.0
"""Seconds without a sign of life after which a rank is given up."""

_LONGEST = 1e9
"""Seconds, three decades; torch counts them in milliseconds, in as many bits as it has."""

_GRACE = 5.0
"""Seconds that a failing rank gives the others to hear of it before it ends, maybe with the store."""

_OFTEN = 0.2
"""Seconds between signs of life, and between looks for failures."""

_SMALL = 1 << 18
"""Tensors of at most this many entries are summed together: each operation has its latency."""

_worlds = itertools.count()


class World:
    """The processes of one run; by default this one alone.

    All ranks have to make the same calls of :meth:`gather`, :meth:`spread`, :meth:`deal`, :meth:`add_` and
    :meth:`together` in the same order. What fails inside :meth:`together` ends that call on all of them, wherever each
    is; the next one starts anew.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, store: Any = None, timeout: float = TIMEOUT, group: Any = None
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._group = group
        self._above: tuple[World, list[int]] | None = None
        self._joined = False
        self.report: Callable[[BaseException], None] | None = None
        """How one rank, 0 if it can, tells the user of a failure while the others wait: a launcher ends all when one
        ends."""
        self._whole, self._runs, self._running = store, itertools.count(), False
        self._start(store)

    def _start(self, store: Any) -> None:
        """Nothing has been told or counted in this store so far."""
        self._store = store
        self._gathers, self._deals, self._parts = itertools.count(), itertools.count(), itertools.count()
        self._told = self._looked = self._listened = 0.0
        self._heard: list[Any] = [None] * self.size

    @classmethod
    def find(cls, device: str = "auto", timeout: float = TIMEOUT) -> World:
        """The world that a launcher (accelerate launch, torchrun, srun, mpirun) put this process in, or one of its own.

        Without a launcher nothing is initialised. ``device`` is where the ranks compute; ``timeout`` the seconds
        without a sign of life after which a rank is given up.

        Raises:
            UsageError: a device that all processes would share, or a timeout that is none.
            WorldError: the launcher's world and the one that is found differ, or not all ranks arrive in time.
        """
        if not isinstance(timeout, numbers.Real) or not 0 < timeout <= _LONGEST:
            raise UsageError(f"timeout is {timeout!r}; it is a number of seconds above 0, and {_LONGEST:g} at most")
        launched = launched_size()
        if launched is None and not is_initialised():
            return cls(timeout=timeout)
        if launched is not None and launched > 1 and re.fullmatch(r"(?!cpu)\w+:\d+", device):
            raise UsageError(
                f"device is {device!r} for each of {launched} processes, so they would share it. "
                f"Pass {device.split(':')[0]!r}, and each uses its own."
            )
        if not is_initialised():
            if launched == 1:
                return cls(timeout=timeout)
            join(device, timeout)
            world = cls._of_torch(launched, timeout)
            world._joined = True
            return world
        return cls._of_torch(launched, timeout)

    @classmethod
    def _of_torch(cls, launched: int | None, timeout: float) -> World:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        found = dist.get_world_size() if is_initialised() else 1
        if launched is not None and launched != found:
            raise WorldError(
                f"the launcher started {launched} processes, but this one sees {found}: each would do and write "
                "everything. Either something else initialised the processes differently (on machines without a GPU "
                "Accelerate needs Accelerator(cpu=True) or ACCELERATE_USE_CPU=true), or WORLD_SIZE is left over from "
                "something else (then unset it)"
            )
        if found == 1:
            return cls(timeout=timeout)
        # All ranks find their worlds in the same order, so the number is the same for all.
        store = _within(_get_default_store(), f"hf_geosharp/{next(_worlds)}")
        return cls(dist.get_rank(), found, store, timeout)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all: prints and writes."""
        return self.rank == 0

    def part(self, group: Any) -> World:
        """The world of the ranks of one of torch's process groups, of which this one is.

        All ranks have to call, each with a group of its own or the same; a rank that fails anywhere fails here.
        """
        import torch.distributed as dist

        number = next(self._parts)
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return World(timeout=self.timeout)
        store = _within(self._store, f"part/{number}/{ranks[0]}")
        part = World(ranks.index(self.rank), len(ranks), store, self.timeout, group)
        part._above = self, ranks
        return part

    def share(self, items: Sequence[Any]) -> list[Any]:
        """Those of ``items`` that are this rank's work; every item is one rank's."""
        return list(items[self.rank :: self.size])

    def span(self, count: int) -> tuple[int, int]:
        """The contiguous part start..stop of ``count`` things that is this rank's, possibly empty."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    # ----------------------------------------------------------------------------------------------- what all do

    def gather(self, value: Any, waiting: Callable[[], None] | None = None) -> list[Any]:
        """What all ranks gave, in the order of ranks. ``waiting`` is called now and then while others are awaited.

        Raises:
            GeosharpError: another rank failed; with its message.
            WorldError: a rank shows no sign of life for ``timeout`` seconds, or the store is gone.
        """
        if self.size == 1:
            return [value]
        number = next(self._gathers)
        with self._connected():
            self._store.set(f"gather/{number}/{self.rank}", pickle.dumps(value))
            out = [pickle.loads(self._await(f"gather/{number}/{r}", r, waiting)) for r in range(self.size)]
            if number > 1:
                # Whoever came to the last gather has read all of the one before it.
                self._store.delete_key(f"gather/{number - 2}/{self.rank}")
        return out

    def broadcast(self, value: Any) -> Any:
        """What rank 0 gave."""
        return self.gather(value if self.leads else None)[0]

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.gather(None)

    def spread(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """What all tasks give, in their order, on every rank; each task is run by one rank.

        Raises:
            Exception: what a task raises, on the rank that ran it; RuntimeError on the others, unless it is one of the
                package's own.
        """
        own: list[T] = []
        error: Exception | None = None
        try:
            own += [task() for task in self.share(tasks)]
        except Exception as caught:
            error = caught
        every = self.gather((len(tasks), own, None if error is None else _told(error, self.rank)))
        if error is not None:
            raise error
        for count, _, failure in every:
            if failure is not None:
                raise _of_peer(failure, RuntimeError)
            if count != len(tasks):
                raise WorldError(
                    f"the processes do different things: one shares {count} tasks where another shares {len(tasks)}. "
                    "Their machines or their versions differ"
                )
        return [every[i % self.size][1][i // self.size] for i in range(len(tasks))]

    def deal(self, count: int) -> Deal:
        """The numbers below ``count``, each for whichever rank asks first: things that take differently long."""
        return Deal(self, count, next(self._deals))

    def sum(self, value: float) -> float:
        """The sum over all ranks, in double precision and always in the same order."""
        values = self.gather(value)
        # fsum cannot add what is not finite.
        return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)

    def add_(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over all ranks; every rank gets the same bits.

        Raises:
            WorldError: the backend failed.
        """
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist

        with self._collective("summing"):
            for tensor in (t for t in tensors if _is_large(t)):
                dist.all_reduce(tensor, group=self._group)
            for bundle in _bundles([t for t in tensors if not _is_large(t)]):
                flat = torch.cat([t.reshape(-1) for t in bundle])
                dist.all_reduce(flat, group=self._group)
                for t, total in zip(bundle, flat.split([t.numel() for t in bundle]), strict=True):
                    t.copy_(total.view(t.shape))

    def sums(self, values: Sequence[float], device: torch.device | None = None) -> list[float]:
        """The sum of each value over all ranks, by the backend: in double precision, always in the same order.

        Raises:
            WorldError: the backend failed.
        """
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        with self._collective("summing"):
            own = torch.tensor(values, dtype=torch.float64, device=device)
            every = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(every, own, group=self._group)
            return [sum(column) for column in zip(*torch.stack(every).tolist(), strict=True)]

    def exchange(self, given: Tensor, givens: Sequence[int], taken: Tensor, takens: Sequence[int]) -> None:
        """Gives each rank its part of ``given`` and fills ``taken`` with the parts that the ranks give.

        The tensors are flat; the numbers say how many entries go to, and come from, each rank, possibly none.

        Raises:
            WorldError: the backend failed.
        """
        if self.size == 1:
            taken.copy_(given)
            return
        import torch.distributed as dist

        with self._collective("exchanging"):
            dist.all_to_all_single(taken, given, list(takens), list(givens), group=self._group)

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.poll(now=True)
            words = [f"rank {r}: {_worded(w)}" for r, w in enumerate(self.heard()) if w is not None and r != self.rank]
            last = f" (last words: {'; '.join(words)})" if words else ""
            raise WorldError(f"{what} over {self.size} processes failed: {first_line(error)}{last}") from error

    # ----------------------------------------------------------------------------------------- signs of life

    def tell(self, state: Any) -> None:
        """Leaves word of how far this rank is (JSON), now and then: a sign of life too."""
        if self.size == 1 or time.monotonic() - self._told < _OFTEN:
            return
        self._told = time.monotonic()
        with self._connected():
            self._store.set(f"state/{self.rank}", json.dumps([time.time(), state]))

    def heard(self) -> list[Any]:
        """The last word of each rank; None where there is none yet."""
        if self.size > 1 and time.monotonic() - self._listened > _OFTEN:
            self._listened = time.monotonic()
            with self._connected():
                self._heard = [json.loads(sign)[1] if (sign := self._sign(r)) else None for r in range(self.size)]
        return self._heard

    def poll(self, *, now: bool = False) -> None:
        """Looks, now and then, whether another rank has failed.

        Raises:
            GeosharpError: it has; with its message.
        """
        if self._above is not None:
            self._above[0].poll(now=now)
            return
        if self.size == 1 or (not now and time.monotonic() - self._looked < _OFTEN):
            return
        self._looked = time.monotonic()
        with self._connected():
            if not self._store.check(["failed"]):
                return
            failure = json.loads(self._store.get("failed"))
        if failure["rank"] != self.rank:
            raise _of_peer(failure)

    # ------------------------------------------------------------------------------------- one for all, all for one

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside fails on all ranks if it fails on one, and only rank 0 gives warnings.

        An error that one rank has told the user of (by :attr:`report`) has ``reported`` set on all ranks. A call inside
        another one is a part of that.
        """
        if self.size == 1:
            yield
            return
        inside, self._running = self._running, True
        try:
            if not inside:
                # A failure leaves the ranks at different calls, and its traces in the store.
                self._start(_within(self._whole, f"run/{next(self._runs)}"))
            with warnings.catch_warnings():
                if not self.leads:
                    warnings.simplefilter("ignore", GeosharpWarning)
                yield
            if not inside:
                self._leave()
        except BaseException as error:
            # Whatever goes wrong in telling must not hide the error itself.
            with suppress(Exception):
                self._fail(error)
            raise
        finally:
            self._running = inside

    def _fail(self, error: BaseException) -> None:
        interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
        failure = _told(error, self.rank)
        self._store.compare_set("failed", "", json.dumps(failure))
        if interrupted:
            return
        if not self.leads:
            self._wait(["told"])
        # Or the first rank that waited in vain, for rank 0 may be long at something else: nobody tells it again then.
        if self._store.add("telling", 1) == 1:
            if self.report is not None:
                self.report(error)
            self._store.set("told", "1" if self.report is not None else "0")
        self._wait(["told"])
        if self._store.check(["told"]) and self._store.get("told") == b"1":
            error.reported = True  # type: ignore[attr-defined]
        self._store.set(f"knows/{self.rank}", "1")
        if self.leads:
            # The store may end with this process.
            self._wait([f"knows/{r}" for r in range(self.size)])

    def _leave(self) -> None:
        """Rank 0 may hold the store, so it leaves last; what fails on another one until then fails there too."""
        with self._connected():
            if self.leads:
                for rank in range(1, self.size):
                    self._await(f"left/{rank}", rank, None)
            else:
                self._store.set(f"left/{self.rank}", "1")

    def close(self) -> None:
        """Leaves the process group, if :meth:`find` joined it; for a process that ends."""
        if self._joined:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._joined = False

    def _wait(self, keys: list[str]) -> None:
        until = time.monotonic() + _GRACE
        while time.monotonic() < until and not self._store.check(keys):
            time.sleep(0.01)

    # ------------------------------------------------------------------------------------------------- the store

    def _await(self, key: str, rank: int, waiting: Callable[[], None] | None) -> bytes:
        pause, since, sign = 0.0005, time.monotonic(), b""
        while not self._store.check([key]):
            self.poll()
            if waiting is not None:
                waiting()
            if pause > 0.04 and (latest := self._sign(rank)) != sign:
                sign, since = latest, time.monotonic()
            if time.monotonic() - since > self.timeout:
                last = f"its last word: {_worded(json.loads(sign)[1])}" if sign else "it never said anything"
                raise WorldError(
                    f"rank {rank} of {self.size} shows no sign of life for {self.timeout:g} s ({last}): it hangs, was "
                    "killed, or does not take part (every process has to make the same calls)"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return bytes(self._store.get(key))

    def _sign(self, rank: int) -> bytes:
        if self._above is not None:
            world, ranks = self._above
            return world._sign(ranks[rank])
        key = f"state/{rank}"
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except GeosharpError:
            raise
        except (RuntimeError, OSError) as error:
            raise WorldError(
                f"the other processes cannot be reached any more (rank 0 or the launcher has ended?): "
                f"{first_line(error)}"
            ) from error


class Deal:
    """Things to do, each for the rank that asks first; and a word of each rank, for one that has nothing left to do."""

    def __init__(self, world: World, count: int, number: int) -> None:
        """Use :meth:`World.deal`."""
        self._world, self._count, self._prefix = world, count, f"deal/{number}"

    def __iter__(self) -> Iterator[int]:
        """This rank's, one after the other."""
        if self._world.size == 1:
            yield from range(self._count)
            return
        while (index := self._take("next")) < self._count:
            yield index

    def tell(self, word: Any) -> None:
        """Leaves word (JSON) of what this rank has got; its last word counts."""
        if self._world.size > 1:
            with self._world._connected():
                self._world._store.set(f"{self._prefix}/{self._world.rank}", json.dumps(word))

    def heard(self) -> list[Any]:
        """The last words of those ranks that have told something."""
        found = []
        with self._world._connected():
            for rank in range(self._world.size) if self._world.size > 1 else ():
                key = f"{self._prefix}/{rank}"
                if self._world._store.check([key]):
                    found.append(json.loads(self._world._store.get(key)))
        return found

    def close(self) -> None:
        """Takes back this rank's word, when no rank asks for it any more."""
        if self._world.size > 1:
            with self._world._connected():
                self._world._store.delete_key(f"{self._prefix}/{self._world.rank}")

    def first(self, what: str) -> bool:
        """Whether no rank has asked this before."""
        return self._world.size == 1 or self._take(f"first {what}") == 0

    def _take(self, key: str) -> int:
        with self._world._connected():
            return int(self._world._store.add(f"{self._prefix}/{key}", 1)) - 1


def _within(store: Any, name: str) -> Any:
    """The part of a store whose keys begin with a name."""
    import torch.distributed as dist

    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() > _SMALL and tensor.is_contiguous()


def _bundles(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of one device and dtype together."""
    bundles: dict[Any, list[Tensor]] = {}
    for t in tensors:
        bundles.setdefault((t.device, t.dtype), []).append(t)
    return list(bundles.values())


def _told(error: BaseException, rank: int) -> dict[str, Any]:
    """An error as other ranks are told of it."""
    return {"rank": rank, "kind": type(error).__name__, "message": str(error) or type(error).__name__}


def _of_peer(failure: Mapping[str, Any], otherwise: type[Exception] = WorldError) -> BaseException:
    """Another rank's error, of the same kind where that is one of the package's."""
    if failure["kind"] == "KeyboardInterrupt":
        return KeyboardInterrupt()
    kind = getattr(errors, failure["kind"], None)
    known = isinstance(kind, type) and issubclass(kind, GeosharpError)
    text = failure["message"] if known else f"{failure['kind']}: {failure['message']}"
    return (kind if known else otherwise)(f"rank {failure['rank']}: {text}")  # type: ignore[misc]


def _worded(state: Any) -> str:
    """A state that a rank told, in words."""
    return ", ".join(f"{k} {v}" for k, v in state.items()) if isinstance(state, Mapping) else str(state)
