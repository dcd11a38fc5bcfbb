"""Long runs: what is on disk after a kill, at a full disk, and for another run; and that continuing changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp import SharpnessResult, score, scoring
from hf_geosharp.errors import DataError, GeosharpError, GeosharpWarning, ModelError, UsageError
from hf_geosharp.sharpness.identity import loss_name
from hf_geosharp.sharpness.jobs import Job, Outcome
from hf_geosharp.sharpness.journal import Journal, differences, digest, digest_batches, write_result
from hf_geosharp.sharpness.result import BatchScore, Passes
from tests.sharpness.tiny import bert, bert_batches

HEADER = {"settings": {"steps": 3, "rho": (0.1,)}, "weights": "a" * 64}
BATCHES = 3


class Small(nn.Module):
    """Eight parameters. Its loss is not finite where the input is not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 2), nn.Linear(2, 1, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.outer(torch.tanh(self.inner(x))) - x[:, :1]).square().mean()}


def points(*bad: int, count: int = BATCHES, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    batches = [{"x": torch.randn(4, 2, generator=generator)} for _ in range(count)]
    for index in bad:
        batches[index]["x"][0, 0] = float("nan")
    return batches


def run(folder: Path | None = None, **changes: Any) -> SharpnessResult:
    options = {"metric": "adaptive", "steps": 3, "rho": (0.1, 0.2), "baselines": ["euclidean"], "output": folder}
    model, data = changes.pop("model", None) or Small(), changes.pop("data", None) or points()
    return score(model, data, **{**options, **changes})


def timeless(result: SharpnessResult) -> SharpnessResult:
    return dataclasses.replace(result, seconds=0.0)


@pytest.fixture(scope="module")
def unbroken() -> SharpnessResult:
    return timeless(run())


class Killed(BaseException):
    """Not an Exception: nothing may catch it."""


def killed_after(lines: int, folder: Path, **changes: Any) -> None:
    """A run that is gone once so many batches are in the journal."""

    def progress(state: Any) -> None:
        if folder.exists() and sum(len(p.read_bytes().splitlines()) - 1 for p in folder.glob("*.jsonl")) >= lines:
            raise Killed

    with pytest.raises(Killed):
        run(folder, progress=progress, **changes)


def lines_of(folder: Path, rank: int = 0) -> list[Any]:
    return [json.loads(line) for line in (folder / f"journal-{rank}.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------- a run goes on


def test_a_run_leaves_a_line_for_each_batch_and_the_result(tmp_path: Path, unbroken: SharpnessResult) -> None:
    result = run(tmp_path / "new" / "folder")
    assert timeless(result) == unbroken
    header, *lines = lines_of(tmp_path / "new" / "folder")
    assert (header["format"], header["schema"], header["settings"]["steps"]) == ("hf-geosharp journal", 1, 3)
    stages = [(line["job"]["stage"], line["job"]["batch"]) for line in lines]
    worst = max(unbroken.per_batch, key=lambda b: b.value).index
    assert stages == [
        ("score", 0), ("score", 1), ("score", 2), ("reproducibility", worst),
        ("baseline", 0), ("baseline", 1), ("baseline", 2),
    ]  # fmt: skip
    assert SharpnessResult.from_dict(json.loads((tmp_path / "new/folder/result.json").read_text())) == result


@pytest.mark.parametrize("lines", [0, 1, 2, 4])
def test_a_killed_run_continues_and_gives_what_an_unbroken_one_gives(
    tmp_path: Path, lines: int, unbroken: SharpnessResult
) -> None:
    killed_after(lines, tmp_path)
    assert len(lines_of(tmp_path)) == 1 + lines
    told: list[Any] = []
    result = run(tmp_path, progress=told.append)
    assert timeless(result) == unbroken
    assert len(lines_of(tmp_path)) == 1 + BATCHES + 1 + BATCHES
    scoring_steps = [state for state in told if state.stage == "score"]
    assert {state.batch for state in scoring_steps} == set(range(lines + 1, BATCHES + 1))
    if scoring_steps:
        assert scoring_steps[0].done >= lines * 2 * 4 - lines


def test_a_finished_run_is_not_taken_again(tmp_path: Path, unbroken: SharpnessResult) -> None:
    run(tmp_path)
    told: list[Any] = []
    again = run(tmp_path, progress=told.append)
    assert timeless(again) == unbroken
    assert {state.stage for state in told} == {"verify"}
    # What it took counts all the same.
    assert again.seconds > sum(line["seconds"] for line in lines_of(tmp_path)[1:])


@pytest.mark.parametrize("torn", [b'{"job": {"stage": "sc', b"\0" * 40, b"\0" * 40 + b"\n", b"{}{}\n"])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes, unbroken: SharpnessResult) -> None:
    killed_after(2, tmp_path)
    journal = tmp_path / "journal-0.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + torn)
    assert timeless(run(tmp_path)) == unbroken
    assert journal.read_bytes().startswith(whole)
    assert len(lines_of(tmp_path)) == 1 + BATCHES + 1 + BATCHES


@pytest.mark.parametrize("left", [0, 20])
def test_a_torn_header_is_a_journal_that_has_not_begun(tmp_path: Path, left: int, unbroken: SharpnessResult) -> None:
    killed_after(0, tmp_path)
    journal = tmp_path / "journal-0.jsonl"
    journal.write_bytes(journal.read_bytes()[:left])
    assert timeless(run(tmp_path)) == unbroken


def test_files_of_more_ranks_than_now_are_read(tmp_path: Path, unbroken: SharpnessResult) -> None:
    """As after a run on three processes, of which each had finished one batch."""
    run(tmp_path)
    header, *lines = (tmp_path / "journal-0.jsonl").read_text().splitlines(keepends=True)
    for rank in range(3):
        (tmp_path / f"journal-{rank}.jsonl").write_text(header + lines[rank])
    told: list[Any] = []
    assert timeless(run(tmp_path, progress=told.append)) == unbroken
    assert "score" not in {state.stage for state in told}


@pytest.mark.slow
def test_a_killed_run_of_a_transformer_continues_too(tmp_path: Path) -> None:
    def transformer(folder: Path | None, **changes: Any) -> SharpnessResult:
        options = {"metric": "inv", "baselines": ["adaptive"], "model": bert(), "data": bert_batches(2)}
        return run(folder, **options, **changes)

    def progress(state: Any) -> None:
        if state.stage == "score" and state.batch == 2:
            raise Killed

    with pytest.raises(Killed):
        transformer(tmp_path, progress=progress)
    assert len(lines_of(tmp_path)) == 2
    assert timeless(transformer(tmp_path)) == timeless(transformer(None))


def test_how_it_is_computed_may_change_on_the_way(tmp_path: Path, unbroken: SharpnessResult) -> None:
    killed_after(1, tmp_path)
    result = run(tmp_path, micro_batch=2)
    assert result.geodesic_sharpness == pytest.approx(unbroken.geodesic_sharpness, rel=1e-4)
    assert result.per_batch[0] == unbroken.per_batch[0]


def test_a_default_that_is_written_out_is_the_same_run(tmp_path: Path) -> None:
    first = run(tmp_path, rho=None, geodesic=None)
    again = run(tmp_path, rho=first.rho, geodesic=first.geodesic)
    assert again.per_batch == first.per_batch
    with pytest.raises(UsageError, match="another run: settings: rho"):
        run(tmp_path, rho=2 * first.rho)


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from tests.sharpness.test_journal import run
run(Path(sys.argv[1]))
print("done")
"""


@pytest.mark.slow
def test_sigkill(tmp_path: Path, unbroken: SharpnessResult) -> None:
    journal = tmp_path / "journal-0.jsonl"
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=Path(__file__).parents[2])
    until = time.monotonic() + 120
    while time.monotonic() < until and not (journal.exists() and journal.read_bytes().count(b"\n") > 1):
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert 1 <= len(lines_of(tmp_path)) - 1 < BATCHES + 1 + BATCHES
    assert timeless(run(tmp_path)) == unbroken


# --------------------------------------------------------------------------------------------------- refused journals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda: {"steps": 4}, r"settings: steps 3 there, 4 here"),
        (lambda: {"rho": 0.1}, r"settings: rho \[0.1, 0.2\] there, \[0.1\] here"),
        (lambda: {"metric": "euclidean"}, r"metric adaptive there, euclidean here"),
        (lambda: {"model": Small(seed=1)}, r"weights \w{12}\.\.\. there, \w{12}\.\.\. here"),
        (lambda: {"data": points(seed=1)}, r"data \w{12}"),
        (lambda: {"data": points(count=BATCHES + 1)}, r"batches 3 there, 4 here"),
        (lambda: {"dtype": "float64"}, r"dtype float32 there, float64 here"),
        (lambda: {"loss": lambda outputs, batch: outputs["loss"]}, r"loss missing there, .*lambda"),
    ],
)
def test_a_journal_of_another_run_is_refused_with_what_differs(
    tmp_path: Path, changes: Callable[[], dict[str, Any]], message: str
) -> None:
    killed_after(1, tmp_path)
    before = (tmp_path / "journal-0.jsonl").read_bytes()
    with pytest.raises(UsageError, match=rf"journal-0.jsonl belongs to another run: .*{message}.*another folder"):
        run(tmp_path, **changes())
    assert (tmp_path / "journal-0.jsonl").read_bytes() == before


def test_a_journal_of_other_versions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(1, tmp_path)
    monkeypatch.setattr(scoring, "versions", lambda: {"torch": "0.1"})
    with pytest.raises(UsageError, match=r"versions: torch .* there, 0.1 here"):
        run(tmp_path)


def test_two_losses_of_one_name_are_told_apart(tmp_path: Path) -> None:
    def one() -> Any:
        def loss(outputs: Any, batch: Any) -> Tensor:
            return outputs["loss"]

        return loss

    def other() -> Any:
        def loss(outputs: Any, batch: Any) -> Tensor:
            return 2 * outputs["loss"]

        return loss

    killed_after(1, tmp_path, loss=one())
    with pytest.raises(UsageError, match="loss "):
        run(tmp_path, loss=other())


def squared(outputs: Any, batch: Any, scale: float) -> Tensor:
    return scale * outputs["loss"] ** 2


def rooted(outputs: Any, batch: Any, scale: float) -> Tensor:
    loss: Tensor = scale * outputs["loss"].sqrt()
    return loss


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        loss: Tensor = self.scale * outputs["loss"]
        return loss


def captured(scale: float) -> Callable[[Any, Any], Tensor]:
    return lambda outputs, batch: scale * outputs["loss"]


ONE, OTHER = (lambda o, b: o["loss"] + 1.0), (lambda o, b: o["loss"] + 2.0)


def weighed(outputs: Any, batch: Any, w: Tensor) -> Tensor:
    return w.sum() * outputs["loss"]


class Holder:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        return outputs["loss"]  # type: ignore[no-any-return]


def smoothed(value: float) -> Any:
    return Holder(nn.CrossEntropyLoss(label_smoothing=value))


LOSSES: dict[str, tuple[Any, Any]] = {
    "tensors of a partial": (
        partial(weighed, w=torch.tensor([1.0, 1.0])),
        partial(weighed, w=torch.tensor([1.0, 5.0])),
    ),
    "modules that an object holds": (smoothed(0.0), smoothed(0.1)),
    "weights of a module": (
        Holder(nn.CrossEntropyLoss(torch.ones(2))),
        Holder(nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]))),
    ),
    "objects in an object": (Holder(SimpleNamespace(a=1)), Holder(SimpleNamespace(a=2))),
    "functions in a partial": (partial(squared, scale=1.0), partial(rooted, scale=1.0)),
    "arguments of a partial": (partial(squared, scale=1.0), partial(squared, scale=2.0)),
    "what an object holds": (Scaled(1.0), Scaled(2.0)),
    "what a function has captured": (captured(1.0), captured(2.0)),
    "two on one line": (ONE, OTHER),
}


@pytest.mark.parametrize("case", LOSSES)
def test_losses_are_told_apart_by_what_they_compute(case: str, tmp_path: Path) -> None:
    one, other = LOSSES[case]
    assert loss_name(one) == loss_name(copy.copy(one))
    assert loss_name(one) != loss_name(other)
    run(tmp_path, loss=one)
    with pytest.raises(UsageError, match="another run: loss"):
        run(tmp_path, loss=other)


def keyed(outputs: Any, batch: Any, by: Any) -> Tensor:
    return outputs["loss"]  # type: ignore[no-any-return]


def test_a_loss_is_the_same_in_another_process() -> None:
    """Where what it holds has no order, and keys that are objects."""
    code = (
        "from functools import partial; from hf_geosharp.sharpness.identity import loss_name;"
        "from tests.sharpness.test_journal import Holder, keyed;"
        "print(loss_name(partial(keyed, by={keyed: 1, len: 2, Holder(3): {'a', 'b', 'c', 'd'}})))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True, cwd=Path(__file__).parents[2],
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1


def hooked(model: nn.Module) -> None:
    model.classifier.register_forward_hook(lambda module, args, output: 10 * output)


def swapped(model: nn.Module) -> None:
    model.bert.encoder.layer[0].intermediate.intermediate_act_fn = nn.ReLU()


def regressing(model: nn.Module) -> None:
    model.config.problem_type = "regression"


@pytest.mark.parametrize(("change", "what"), [(hooked, "code"), (swapped, "code"), (regressing, "problem")])
def test_a_journal_of_another_function_with_the_same_weights_is_refused(
    change: Callable[[Any], None], what: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"steps": 2, "metric": "adaptive", "reproducibility": False, "output": tmp_path}
    model = bert(num_labels=3)
    batches = [{**batch, "labels": torch.rand(6, 3)} for batch in bert_batches(1)]
    first = score(model, batches, **options)
    # The first pass has written down what the labels are.
    assert model.config.problem_type == "multi_label_classification"
    assert score(model, batches, **options).per_batch == first.per_batch
    change(model)
    with pytest.raises(UsageError, match=f"another run: {what}"):
        score(model, batches, **options)


def test_a_line_that_is_damaged_in_the_middle_is_named(tmp_path: Path) -> None:
    killed_after(2, tmp_path)
    journal = tmp_path / "journal-0.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + b"rubbish\n" + lines[2])
    with pytest.raises(DataError, match=r"line 2 of .*journal-0.jsonl is damaged"):
        run(tmp_path)


def test_a_line_of_another_shape_is_refused(tmp_path: Path) -> None:
    killed_after(1, tmp_path)
    with (tmp_path / "journal-0.jsonl").open("a") as file:
        file.write('{"job": {"stage": "score", "batch": 1}}\n')
    with pytest.raises(DataError, match="a line that does not fit"):
        run(tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal-0.jsonl").write_text('{"mine": true}\n')
    with pytest.raises(UsageError, match="is not a journal of hf-geosharp"):
        run(tmp_path)


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(GeosharpError, match="output: cannot make the folder") as caught:
            run(folder)
        assert caught.value.exit_code == 1


def test_two_runs_do_not_write_one_journal(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    first = Journal(tmp_path, HEADER)
    first.start()
    with pytest.raises(UsageError, match=r"another run is writing .*journal-0.jsonl"):
        Journal(tmp_path, HEADER).start()
    first.close()
    Journal(tmp_path, HEADER).start()


# -------------------------------------------------------------------------------------------------------- a full disk


FULL = """
import resource, sys
from hf_geosharp.errors import GeosharpError
from hf_geosharp.sharpness.journal import Journal
journal = Journal(sys.argv[1], {"weights": "x"})
journal.start()
# As on a full disk a write ends in the middle of a line.
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for number in range(100):
    try:
        journal.append({"number": number, "text": "y" * 100})
    except GeosharpError as error:
        print(number, error)
        break
"""


def test_a_full_disk_is_an_error_and_leaves_the_journal_whole(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    written, message = done.stdout.split(" ", 1)
    assert "output: cannot write" in message
    assert "run the same command again to continue" in message
    journal = tmp_path / "journal-0.jsonl"
    assert journal.read_bytes().endswith(b"\n")
    assert [line["number"] for line in lines_of(tmp_path)[1:]] == list(range(int(written)))
    assert 0 < int(written) < 9


def test_a_disk_that_fills_during_a_run_lets_it_continue_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbroken: SharpnessResult
) -> None:
    from hf_geosharp.sharpness import journal

    write, count = journal._write_all, 0

    def full(file: int, data: bytes) -> None:
        nonlocal count
        count += 1
        if count > 2:
            write(file, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write(file, data)

    model = Small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    monkeypatch.setattr(journal, "_write_all", full)
    with pytest.raises(GeosharpError, match=r"No space left on device\. All batches finished before are kept"):
        run(tmp_path, model=model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert len(lines_of(tmp_path)) == 2
    monkeypatch.undo()
    assert timeless(run(tmp_path)) == unbroken


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_result(tmp_path, "old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(GeosharpError, match=r"cannot write .*result.json: No space left"):
        write_result(tmp_path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    assert (tmp_path / "result.json").read_text() == "old"


# ------------------------------------------------------------------------------------------------- batches that are NaN


def adaptive(*bad: int, **changes: Any) -> SharpnessResult:
    return run(changes.pop("output", None), data=points(*bad, count=4), **{"rho": 0.1, **changes})


def test_a_nan_batch_stops_by_default_and_is_named() -> None:
    with pytest.raises(ModelError, match=r"batch 2: the loss before any step is nan"):
        adaptive(2)


@pytest.mark.parametrize("average", [False, True])
def test_a_nan_batch_can_be_skipped_named_and_counted(average: bool) -> None:
    with pytest.warns(GeosharpWarning, match=r"2 of 4 batches were skipped.*: 1, 3"):
        result = adaptive(1, 3, on_nan="skip", average=average, steps=4)
    whole = adaptive(average=average, steps=4)
    kept = [whole.per_batch[i] for i in (0, 2)]
    assert result.per_batch == kept
    assert result.geodesic_sharpness == sum(b.value for b in kept) / 2
    assert (result.samples, result.data["skipped_batches"]) == (8, [1, 3])
    assert result.base_loss == pytest.approx(sum(b.base_loss for b in kept) / 2)
    assert any("batch 3: the loss before any step is nan" in w and "skipped" in w for w in result.warnings)
    assert "skipped_batches" not in whole.data


def test_nothing_but_nan_is_an_error() -> None:
    with pytest.raises(ModelError, match="no batch has a score: batch 0"):
        adaptive(0, 1, 2, 3, on_nan="skip")


@pytest.mark.filterwarnings("ignore::hf_geosharp.errors.GeosharpWarning")
def test_a_skipped_batch_in_a_journal_stays_skipped_only_where_it_is_wanted(tmp_path: Path) -> None:
    first = adaptive(1, on_nan="skip", output=tmp_path)
    assert timeless(adaptive(1, on_nan="skip", output=tmp_path)) == timeless(first)
    with pytest.raises(ModelError, match="batch 1: the loss before any step"):
        adaptive(1, output=tmp_path)


@pytest.mark.filterwarnings("ignore::hf_geosharp.errors.GeosharpWarning")
def test_a_batch_that_an_earlier_run_skipped_counts_as_done(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": points(1, count=4), "on_nan": "skip", "baselines": ()}
    killed_after(3, tmp_path, **options)
    told: list[Any] = []
    run(tmp_path, progress=told.append, **options)
    assert told[-1].done == told[-1].total


# ---------------------------------------------------------------------------------------------------------- the pieces


def test_an_outcome_comes_back_from_its_line_bit_for_bit() -> None:
    outcome = Outcome(
        Job("baseline", 7, "adaptive"), 1 / 3,
        ((0.1, BatchScore(7, 1 / 3, 1e-300, 3, False)), (0.2, BatchScore(7, 1 / 3, 2 / 7, 3, True))),
        Passes(8, 6), {"a.b": 0.1 + 0.2}, ("a note",), None, 1.5,
    )  # fmt: skip
    assert Outcome.from_line(json.loads(json.dumps(outcome.to_line()))) == outcome
    skipped = Outcome(Job("score", 0), skipped="nan")
    assert Outcome.from_line(json.loads(json.dumps(skipped.to_line()))) == skipped


def test_differences_are_told_in_words() -> None:
    assert differences(HEADER, HEADER) == []
    other = {"settings": {"steps": 4, "rho": (0.1,)}, "weights": "b" * 64, "more": None}
    assert differences(HEADER, other) == [
        "settings: steps 3 there, 4 here",
        f"weights {'a' * 12}... there, {'b' * 12}... here",
    ]


def test_digests_tell_contents_names_shapes_and_dtypes_apart() -> None:
    x = torch.arange(6.0)
    variants = [
        ("x", x), ("y", x), ("x", x.view(2, 3)), ("x", x.double()), ("x", x.to(torch.bfloat16)), ("x", x.flip(0)),
        ("x", x.view(2, 3).T), ("x", torch.tensor(1.0)), ("x", torch.empty(0)), ("x", x.bool()),
    ]  # fmt: skip
    assert len({digest([v]) for v in variants}) == len(variants)
    assert digest([("x", x.view(2, 3).T)]) == digest([("x", x.view(2, 3).T.contiguous())])
    assert digest([("x", nn.Parameter(x))]) == digest([("x", x)])


def test_digests_of_batches_leave_out_what_they_are_told() -> None:
    batch = {"b": torch.ones(2), "a": torch.zeros(2), "_target": torch.ones(1), "note": "text"}
    assert digest_batches([batch], ["_target"]) == digest_batches([{"a": batch["a"], "b": batch["b"]}])
    assert digest_batches([batch]) != digest_batches([batch], ["_target"])
    assert digest_batches([batch, batch]) != digest_batches([batch])
