"""Many processes: what they tell each other, and that a score is the same however many take it."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_geosharp import parallel, score
from hf_geosharp.errors import DataError, GeosharpWarning, UsageError, WorldError
from hf_geosharp.parallel import World
from hf_geosharp.sharpness import proof
from hf_geosharp.sharpness.progress import Progress, Track
from hf_geosharp.symmetry.map import SymmetryMap
from tests import worlds
from tests.sharpness.tiny import bert, bert_batches, gpt2, gpt2_batches
from tests.worlds import finished

HERE = "tests.test_parallel"
launch, results = partial(worlds.launch, module=HERE), partial(worlds.results, module=HERE)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_GRACE", 0.5)
    worlds.without_launcher(monkeypatch)


# --------------------------------------------------------------------------------- a world of threads around one store


def in_threads(size: int, work: Callable[[World], Any], timeout: float = 30.0) -> list[Any]:
    """What each rank returns, or the exception that it ends with."""
    store, out = dist.HashStore(), [None] * size

    def run(rank: int) -> None:
        world = World(rank, size, store, timeout)
        try:
            with world.together():
                out[rank] = work(world)
        except BaseException as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return out


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_what_all_gave_in_order(size: int) -> None:
    def work(world: World) -> Any:
        time.sleep(0.02 * ((world.rank * 3) % size))
        return [world.gather((world.rank, round)) for round in range(4)], world.broadcast(f"of {world.rank}")

    expected = ([[(rank, round) for rank in range(size)] for round in range(4)], "of 0")
    assert in_threads(size, work) == [expected] * size


def test_sums_are_the_same_on_all_ranks_whatever_comes_first() -> None:
    values = [1e16, 1.0, -1e16, 1e-3]
    assert in_threads(4, lambda world: world.sum(values[world.rank])) == [1.001] * 4
    assert all(x != x for x in in_threads(2, lambda world: world.sum(float("inf") * (1 - 2 * world.rank))))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 12])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_piece_of_work_is_one_rank_s(size: int, count: int) -> None:
    worlds = [World(rank, size) for rank in range(size)]
    assert sorted(x for w in worlds for x in w.share(range(count))) == list(range(count))
    assert [i for w in worlds for i in range(*w.span(count))] == list(range(count))
    sizes = [stop - start for start, stop in (w.span(count) for w in worlds)]
    assert max(sizes) - min(sizes) <= 1


def test_gathers_leave_nothing_behind() -> None:
    store = dist.HashStore()
    worlds = [World(rank, 2, store) for rank in range(2)]

    def work(world: World) -> None:
        for _ in range(50):
            world.gather("x" * 1000)

    threads = [threading.Thread(target=work, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.num_keys() <= 4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_task_is_run_once_and_all_ranks_get_what_it_gives(size: int) -> None:
    ran: list[tuple[int, int]] = []

    def work(world: World) -> Any:
        def task(i: int) -> int:
            ran.append((i, world.rank))
            return 10 * i

        return [world.spread([partial(task, i) for i in range(count)]) for count in (0, 1, 5)]

    assert in_threads(size, work) == [[[], [0], [0, 10, 20, 30, 40]]] * size
    assert sorted(i for i, _ in ran) == [0, 0, 1, 2, 3, 4]
    assert {rank for _, rank in ran} == set(range(size))


def test_a_task_that_fails_fails_on_all_ranks_and_they_may_go_on() -> None:
    def work(world: World) -> Any:
        def fails(error: Exception) -> None:
            raise error

        told = []
        for error in (TypeError("no double precision"), DataError("row 7 is empty")):
            try:
                world.spread([lambda: None, partial(fails, error)])
            except Exception as caught:
                told.append((type(caught), str(caught)))
        return told, world.gather(world.rank)

    zero, one = in_threads(2, work)
    assert one == ([(TypeError, "no double precision"), (DataError, "row 7 is empty")], [0, 1])
    assert zero == (
        [(RuntimeError, "rank 1: TypeError: no double precision"), (DataError, "rank 1: row 7 is empty")], [0, 1],
    )  # fmt: skip


def test_ranks_that_share_different_things_are_told_apart() -> None:
    found = in_threads(2, lambda world: world.spread([lambda: 0] * (1 + world.rank)))
    assert all(isinstance(error, WorldError) for error in found)
    assert "one shares 2 tasks where another shares 1" in str(found[0])


def test_what_is_dealt_goes_to_whoever_is_free() -> None:
    def work(world: World) -> Any:
        deal, own = world.deal(7), []
        world.barrier()
        for index in deal:
            time.sleep(0.5 if index == 0 else 0.01)
            own.append(index)
            deal.tell({"of": world.rank, "done": len(own)})
        world.barrier()
        heard, first = deal.heard(), deal.first("what comes next")
        world.barrier()
        deal.close()
        return own, heard, first, list(world.deal(2))

    ranks = in_threads(3, work)
    assert sorted(i for own, *_ in ranks for i in own) == list(range(7))
    assert next(own for own, *_ in ranks if 0 in own) == [0]
    said = [{"of": rank, "done": len(own)} for rank, (own, *_) in enumerate(ranks) if own]
    assert all(heard == said for _, heard, *_ in ranks)
    assert sorted(first for *_, first, _ in ranks) == [False, False, True]
    # Another deal is about other things.
    assert sorted(i for *_, own in ranks for i in own) == [0, 1]
    (alone,) = in_threads(1, work)
    assert alone == (list(range(7)), [], True, [0, 1])


def test_a_part_of_a_world_gathers_by_itself_and_sees_the_failures_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)

    def work(world: World) -> Any:
        part = world.part([0, 2] if world.rank % 2 == 0 else [1, 3])
        alone = world.part([world.rank])
        found = part.rank, part.size, part.gather(world.rank), alone.gather(world.rank)
        world.barrier()
        if world.rank == 1:
            raise DataError("row 7 is empty")
        if world.rank == 0:
            part.gather(None)
        return found

    zero, one, two, three = in_threads(4, work, timeout=5.0)
    assert (type(zero), str(zero)) == (DataError, "rank 1: row 7 is empty")
    assert two == (1, 2, [0, 2], [2])
    assert three == (1, 2, [1, 3], [3])
    assert type(one) is DataError


def test_one_failure_stops_all_with_its_message() -> None:
    def work(world: World) -> Any:
        if world.rank == 1:
            raise DataError("row 7 is empty")
        return world.gather(None)

    zero, one, two = in_threads(3, work)
    assert (type(one), str(one)) == (DataError, "row 7 is empty")
    for other in (zero, two):
        assert (type(other), str(other)) == (DataError, "rank 1: row 7 is empty")


def test_a_failure_is_seen_amid_work() -> None:
    def work(world: World) -> None:
        if world.rank == 0:
            raise ZeroDivisionError("odd")
        while True:
            time.sleep(0.01)
            world.poll()

    zero, one = in_threads(2, work)
    assert type(zero) is ZeroDivisionError
    assert (type(one), str(one)) == (WorldError, "rank 0: ZeroDivisionError: odd")


def test_ctrl_c_in_one_is_ctrl_c_in_all() -> None:
    def work(world: World) -> None:
        if world.rank == 1:
            raise KeyboardInterrupt
        world.gather(None)

    assert [type(e) for e in in_threads(2, work)] == [KeyboardInterrupt] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_rank_0_tells_the_user_before_the_others_end(failing: int) -> None:
    told: list[str] = []

    def work(world: World) -> None:
        world.report = lambda error: told.append(str(error))
        if world.rank == failing:
            raise DataError("broken")
        world.gather(None)

    errors = in_threads(2, work)
    assert told == ["broken" if failing == 0 else "rank 1: broken"]
    assert [error.reported for error in errors] == [True, True]


def test_a_failure_is_told_once_where_rank_0_was_long_at_something_else() -> None:
    told: list[str] = []

    def work(world: World) -> None:
        world.report = lambda error: told.append(f"{world.rank}: {error}")
        time.sleep(0.0 if world.rank else 1.0)  # longer than it is waited for
        raise DataError(f"broken on {world.rank}")

    errors = in_threads(3, work)
    assert told in ([f"{rank}: broken on {rank}"] for rank in (1, 2))
    assert [error.reported for error in errors] == [True] * 3


def test_what_fails_after_rank_0_is_done_fails_there_too() -> None:
    def work(world: World) -> None:
        time.sleep(1.0 if world.rank else 0.0)
        if world.rank:
            raise DataError("broken at the end")

    assert [str(error) for error in in_threads(2, work)] == ["rank 1: broken at the end", "broken at the end"]


def test_after_a_failure_the_next_call_starts_anew() -> None:
    """Wherever the ranks were when one failed, in calls inside others too."""

    def work(world: World) -> Any:
        found: list[Any] = []
        for number in range(4):
            try:
                with world.together():
                    world.tell({"number": number})
                    for count in range(3):
                        if (number, count, world.rank) == (1, 2, 1):
                            raise DataError("broken")
                        with world.together():
                            found.append(world.gather((number, count)))
                    found.append([*world.deal(0), *world.heard()])
            except DataError as error:
                found.append(str(error))
        return found

    def run(rank: int) -> None:
        out[rank] = work(World(rank, 2, store))

    store, out = dist.HashStore(), [None, None]
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    numbers = [*([[(n, count)] * 2 for count in range(3)] for n in (0, 2, 3))]
    told = [[{"number": n}] * 2 for n in (0, 2, 3)]
    for rank, found in enumerate(out):
        assert found is not None
        assert found[:3] == numbers[0]
        assert found[4:7] == [*[[(1, count)] * 2 for count in range(2)], "broken" if rank else "rank 1: broken"]
        assert found[7:10] == numbers[1]
        assert found[11:14] == numbers[2]
        assert [found[3], found[10], found[14]] == told


@pytest.mark.slow
def test_a_rank_without_a_sign_of_life_is_given_up_by_name() -> None:
    def work(world: World) -> None:
        if world.rank == 1:
            world.tell({"batch": 3})
            time.sleep(2.0)
            world.poll(now=True)
        world.gather(None)

    started = time.monotonic()
    zero, one = in_threads(2, work, timeout=0.7)
    assert isinstance(zero, WorldError)
    assert "rank 1 of 2 shows no sign of life for 0.7 s (its last word: batch 3)" in str(zero)
    assert "rank 0: rank 1 of 2 shows no sign of life" in str(one)
    assert time.monotonic() - started < 10


def test_a_search_for_symmetries_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank searches for all."""

    def slow(*_: Any, alive: Callable[[], None], **__: Any) -> SymmetryMap:
        for _ in range(8):
            time.sleep(0.15)
            alive()
        return SymmetryMap()

    monkeypatch.setattr(proof, "find_symmetries", slow)
    options: dict[str, Any] = {"steps": 1, "reproducibility": False}
    # Made here: threads that import a part of transformers at the same time may find half of it.
    given = [(bert(), bert_batches(2)) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = in_threads(2, lambda world: score(*given[world.rank], world=world, **options), timeout=0.7)
    assert found[0].per_batch == found[1].per_batch


@pytest.mark.slow
def test_a_slow_rank_that_tells_of_itself_is_waited_for() -> None:
    def work(world: World) -> list[int]:
        for step in range(12 if world.rank == 1 else 0):
            time.sleep(0.15)
            world.tell({"step": step})
        return world.gather(world.rank)

    assert in_threads(2, work, timeout=0.7) == [[0, 1]] * 2


def test_others_are_heard_of_while_they_work() -> None:
    seen: list[Any] = []

    def work(world: World) -> None:
        if world.rank == 1:
            world.tell({"done": 5})
            time.sleep(0.3)
        world.gather(None, waiting=lambda: seen.append(world.heard()))

    in_threads(2, work)
    assert [None, {"done": 5}] in seen


def test_what_a_rank_has_done_last_is_counted_while_it_waits() -> None:
    """A climb that settles leaves many steps out at once, and there may be no batch left."""

    def work(world: World) -> int | None:
        told: list[Progress] = []
        track = Track(told.append if world.leads else None, batches=2, total=200, world=world)
        track.say("score", step=5)
        if world.rank == 1:
            track.done = 75
        until = time.monotonic() + 30 * world.leads
        while time.monotonic() < until and not (told and told[-1].done == 75):
            track.refresh()
        world.gather(None, track.refresh)
        return told[-1].done if told else None

    assert in_threads(2, work) == [75, None]


def test_a_store_that_is_gone_is_said_in_words() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer\nstack of C++")

    with pytest.raises(WorldError, match=r"cannot be reached any more.*: Connection reset by peer$"):
        World(0, 2, Gone()).gather(1)


def test_where_tensors_cannot_be_summed_it_is_said_how_far_the_others_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer\nstack of C++")

    monkeypatch.setattr(dist, "all_reduce", fails)

    def work(world: World) -> None:
        world.tell({"batch": 3 + world.rank})
        world.barrier()
        if world.leads:
            world.add_([torch.zeros(2)])
        world.barrier()

    told = "summing over 2 processes failed: Connection closed by peer (last words: rank 1: batch 4)"
    assert [str(error) for error in in_threads(2, work)] == [told, f"rank 0: {told}"]


def test_only_rank_0_warns() -> None:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rank in range(2):
            store = dist.HashStore()
            store.set("run/0/left/1", "1")
            with World(rank, 2, store).together():
                warnings.warn("once", GeosharpWarning, stacklevel=1)
    assert len(caught) == 1


# ----------------------------------------------------------------------------------------------- finding the world


def test_without_a_launcher_nothing_is_initialised() -> None:
    world = World.find()
    assert (world.rank, world.size, world.leads) == (0, 1, True)
    assert not dist.is_initialized()
    assert world.gather(3) == [3]


def test_processes_that_each_see_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    # As Accelerate does when it is told nothing on a machine without a GPU, or was used before.
    monkeypatch.setattr(parallel, "join", lambda *_: None)
    with pytest.raises(WorldError, match="the launcher started 2 processes, but this one sees 1"):
        World.find()


def test_one_device_for_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match=r"'cuda:1' for each of 2 processes.*Pass 'cuda'"):
        World.find("cuda:1")


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 0, -1.0, 1e15, None, "60"])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(UsageError, match=r"timeout is .*; it is a number of seconds above 0"):
        World.find(timeout=timeout)


# --------------------------------------------------------------------------------------------------- real processes


CASES: dict[str, dict[str, Any]] = {
    "several radii, evidence and baselines": {"rho": [0.2, 0.1], "baselines": ["adaptive", "euclidean"]},
    "average": {"average": True, "rho": [0.1, 0.2], "steps": 4},
    "padded texts": {"text": True},
    "labels of the model": {"labels": "model", "steps": 2},
    "micro-batches": {"micro_batch": 4},
    "one batch": {"count": 1},
    "parts and a profile": {"per": "kind", "profile": True, "count": 2, "steps": 2},
    "rough balls": {"rho": 2.0, "steps": 14, "count": 2},
}
UNEVEN = ("several radii, evidence and baselines", "padded texts", "micro-batches", "one batch")
"""Those that three processes share in another way than two do."""


def scored(text: bool = False, count: int = 4, **options: Any) -> dict[str, Any]:
    model, batches = (gpt2(), gpt2_batches(count)) if text else (bert(), bert_batches(count, size=7))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    out = score(model, batches, **{"steps": 3, **options}).to_dict() | {"seconds": 0.0}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    return json.loads(json.dumps(out))  # type: ignore[no-any-return]


def all_cases(names: Sequence[str] = tuple(CASES)) -> dict[str, Any]:
    """In float32 spread by batches, in float64 by samples."""
    spread = {name: scored(**CASES[name]) for name in names}
    split = {name: scored(**CASES[name], dtype="float64", shard="samples") for name in names}
    return {"batches": spread, "samples": split}


def print_cases(*names: str) -> None:
    print(json.dumps(all_cases(names)))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return all_cases()


@pytest.mark.slow
@pytest.mark.xdist_group("what one process finds")
@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_gives_the_same(size: int, alone: dict[str, Any]) -> None:
    names = UNEVEN if size == 3 else tuple(CASES)
    ranks = results(size, "print_cases", *names)
    # Whole batches: to the last bit. Four on three ranks are uneven, one is fewer than ranks.
    for found in ranks:
        assert found["batches"] == {name: alone["batches"][name] for name in names}
    # Batches of 7, 6 and fewer rows in parts: the same on all ranks, and to 1e-6 of what one process finds.
    assert all(found["samples"] == ranks[0]["samples"] for found in ranks)
    assert all(batch["rough"] for batch in alone["batches"]["rough balls"]["per_batch"])
    for name in names:
        expected, found = alone["samples"][name], ranks[0]["samples"][name]
        # Language models take their loss in float32 whatever they are: a millionth of it is its rounding.
        floor = 1e-6 * expected["base_loss"] if name == "padded texts" else 1e-12
        for point, other in zip(found["curve"], expected["curve"], strict=True):
            assert point["geodesic_sharpness"] == pytest.approx(other["geodesic_sharpness"], rel=1e-6, abs=floor), name
        assert found["base_loss"] == pytest.approx(expected["base_loss"], rel=1e-6, abs=1e-12)
        assert found["baselines"] == pytest.approx(expected["baselines"], rel=1e-6)
        assert found["passes"] == expected["passes"]
        assert found["reproducible"]["ok"] == expected["reproducible"]["ok"]


def sum_tensors() -> None:
    world = World.find("cpu")
    generator = torch.Generator().manual_seed(world.rank)
    tensors = [torch.randn(shape, generator=generator) for shape in ((3, 4), (600, 700), (5,), ())]
    tensors.append(torch.randn(6, 5, generator=generator, dtype=torch.float64).T)
    with world.together():
        world.add_(tensors)
    print(json.dumps([t.double().tolist() for t in tensors]))


@pytest.mark.slow
def test_tensors_are_summed_alike_on_all_ranks() -> None:
    ranks = results(3, "sum_tensors")
    assert ranks[0] == ranks[1] == ranks[2]
    total = None
    for rank in range(3):
        generator = torch.Generator().manual_seed(rank)
        tensors = [torch.randn(shape, generator=generator) for shape in ((3, 4), (600, 700), (5,), ())]
        tensors.append(torch.randn(6, 5, generator=generator, dtype=torch.float64).T)
        total = tensors if total is None else [a + b for a, b in zip(total, tensors, strict=True)]
    assert total is not None
    for found, expected in zip(ranks[0], total, strict=True):
        torch.testing.assert_close(torch.tensor(found, dtype=expected.dtype), expected, rtol=1e-5, atol=1e-6)


def different(what: str) -> None:
    rank = int(os.environ["RANK"])
    model, batches, options = bert(seed=rank * (what == "weights")), bert_batches(2, seed=rank * (what == "data")), {}
    if what == "steps":
        options["steps"] = 3 + rank
    if what == "versions":
        from hf_geosharp import scoring

        scoring.versions = lambda: {"torch": f"2.{rank}"}
    if what == "failure" and rank == 1:
        batches[1]["labels"][0] = 99
    if what == "nan" and rank == 1:
        with torch.no_grad():
            next(model.parameters())[0, 0] = float("nan")
    score(model, batches, **{"steps": 3, **options})


DIFFERENCES = {
    "weights": r"the processes do not compute the same score. rank 1: weights \w+... there, \w+... on",
    "data": "rank 1: data ",
    "steps": "rank 1: settings: steps 4 there, 3 on rank 0",
    "versions": "rank 1: versions: torch 2.1 there, 2.0 on rank 0",
}


def print_refusals() -> None:
    told = {}
    for what in DIFFERENCES:
        try:
            different(what)
        except WorldError as error:
            told[what] = str(error)
    print(json.dumps(told))


@pytest.mark.slow
def test_ranks_that_differ_are_refused_by_all() -> None:
    for told in results(2, "print_refusals"):
        assert list(told) == list(DIFFERENCES)
        for what, message in DIFFERENCES.items():
            assert re.search(message, told[what]), told[what]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", "WorldError: .*rank 1: weights"),
        ("failure", "DataError: .*labels hold 99"),
        ("nan", "ModelError: .*NaN"),
    ],
)
def test_a_failure_of_one_rank_ends_all(what: str, message: str) -> None:
    started = time.monotonic()
    done = finished(launch(2, "different", what))
    assert [code for code, _, _ in done] == [1, 1]
    for _, _, err in done:
        assert re.search(message, err), err
    # Not after the 1800 s that a silent rank is waited for.
    assert time.monotonic() - started < 600


def dying(how: str) -> None:
    def progress(state: Any) -> None:
        if os.environ["RANK"] == "1" and state.stage == "score":
            if how == "dies":
                os._exit(7)
            time.sleep(3600)

    score(bert(), bert_batches(4), steps=3, timeout=5.0, progress=progress)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_dies_or_hangs_ends_the_others_with_a_message(how: str) -> None:
    processes = launch(2, "dying", how)
    try:
        _, err = processes[0].communicate(timeout=600)
        assert processes[0].returncode == 1
        assert "WorldError: rank 1 of 2 shows no sign of life for 5 s (its last word: done " in err
    finally:
        finished(processes[:1])
        processes[1].kill()
        processes[1].communicate()
