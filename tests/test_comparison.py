"""Rankings: paired differences against SciPy and hand-worked cases, what is refused, runs on disk."""

from __future__ import annotations

import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from hf_geosharp import comparison, members
from hf_geosharp.checkpoints import find_checkpoints, read_history
from hf_geosharp.comparable import Named, check_comparable, named, read_results
from hf_geosharp.comparison import RESOLUTION, Comparison, compare, compare_pretrained
from hf_geosharp.errors import DataError, GeosharpError, GeosharpWarning, ModelError, UnsupportedModelError, UsageError
from hf_geosharp.members import find_members, folder_names
from hf_geosharp.sharpness.result import CurvePoint
from hf_geosharp.tasks.hub import Source
from tests.results import DATA, many, result_of, write

# ------------------------------------------------------------------------------------------------------------- ranking


def test_differences_are_the_paired_t_intervals_of_scipy() -> None:
    rng = np.random.default_rng(0)
    hard = rng.uniform(1, 5, 8)  # what all models find hard
    a, b = hard + rng.normal(0, 0.05, 8), hard + 0.2 + rng.normal(0, 0.05, 8)
    (step,) = compare(many(a=a.tolist(), b=b.tolist())).next
    theirs = stats.ttest_rel(b, a)
    low, high = theirs.confidence_interval(0.95)
    assert step.interval95 == pytest.approx((low, high), rel=1e-9)
    assert step.mean == pytest.approx(float(np.mean(b - a)))
    assert (step.lower, step.higher, step.batches, step.apart) == ("a", "b", 8, True)
    # Unpaired, these could not be told apart.
    assert stats.ttest_ind(a, b).pvalue > 0.5


def test_the_ranking_by_hand() -> None:
    found = compare(many(c=[3.0, 3.2, 3.4], a=[1.0, 1.2, 1.4], b=[1.1, 1.3, 1.2]))
    assert [(r.name, r.rank, r.best_rank, r.worst_rank) for r in found.ranking] == [
        ("a", 1, 1, 2),
        ("b", 2, 1, 2),
        ("c", 3, 3, 3),
    ]
    assert [(d.lower, d.higher, d.apart) for d in found.next] == [("a", "b", False), ("b", "c", True)]
    assert len(found.differences) == 3


def test_a_difference_below_what_the_search_resolves_tells_nothing_apart() -> None:
    # In every batch the second is higher by the same 0.5 %: the interval excludes 0, the search does not know it.
    values = [1.0, 2.0, 3.0]
    (step,) = compare(many(a=values, b=[v * 1.005 for v in values])).next
    assert step.interval95 is not None
    assert step.interval95[0] > -0.01
    assert step.apart is False
    (step,) = compare(many(a=values, b=[v + 0.05 for v in values])).next
    assert step.apart is True
    # A share of the larger of both, as where a score is held against a run of its own again.
    for size, apart in ((100.4, False), (100.6, True)):
        (step,) = compare(many(a=[99.4, 99.5, 99.6], b=[size, size + 0.1, size + 0.2])).next
        assert step.apart is apart


def test_the_resolution_is_what_a_score_itself_tolerates() -> None:
    from hf_geosharp.sharpness.reproducibility import AGREEMENT

    assert RESOLUTION == AGREEMENT


def test_a_result_that_is_not_reproducible_is_told_apart_only_beyond_its_spread() -> None:
    shaky = result_of("shaky", [1.3, 1.31, 1.32], ok=False)  # by half
    found = compare([Named("a", result_of("a", [1.0, 1.01, 1.02])), Named("shaky", shaky)])
    assert found.next[0].apart is False
    assert any("not reproducible" in note and "shaky" in note for note in found.notes)


def test_one_batch_gives_no_interval_and_no_verdict() -> None:
    found = compare(many(a=[1.0], b=[2.0]))
    (step,) = found.next
    assert (step.interval95, step.apart) == (None, None)
    assert Comparison.from_dict(json.loads(found.to_json())) == found


def test_other_figures() -> None:
    a = Named("a", result_of("a", [1.0, 2.0], [0.9, 0.8], baselines={"adaptive": 3.0}))
    b = Named("b", result_of("b", [2.0, 3.0], [0.1, 0.2], baselines={"adaptive": 1.0}))
    by_loss = compare([a, b], rank_by="base_loss")
    assert [r.name for r in by_loss.ranking] == ["b", "a"]
    assert by_loss.next[0].mean == pytest.approx(0.7)
    by_baseline = compare([a, b], rank_by="adaptive")
    assert [(r.name, r.value) for r in by_baseline.ranking] == [("b", 1.0), ("a", 3.0)]
    assert by_baseline.next[0].apart is None
    with pytest.raises(UsageError, match=r"euclidean.*sharpness, base_loss, adaptive"):
        compare([a, b], rank_by="euclidean")


def test_equal_models_are_named() -> None:
    found = compare(many(a=[1.0, 2.0], b=[1.0, 2.0], c=[5.0, 6.0]))
    assert any("a, b are equal in every batch" in note for note in found.notes)
    assert found.next[0].apart is False


def test_json_and_csv_round_trip() -> None:
    found = compare(many(a=[1.0, 1.5], b=[2.0, 2.75]))
    assert Comparison.from_dict(json.loads(found.to_json())) == found
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["name"] for row in rows] == ["a", "b"]
    assert float(rows[0]["next_difference"]) == 1.125
    assert rows[1]["next"] == ""
    with pytest.raises(DataError, match="schema"):
        Comparison.from_dict({"schema": 2, "kind": "comparison"})
    with pytest.raises(DataError, match="no comparison"):
        Comparison.from_dict({"schema": 1, "kind": "comparison", "ranking": [{}]})


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rho": 0.2}, "rho 0.2 here, 0.1 in a"),
        ({"metric": "mix"}, "metric mix here, inv in a"),
        ({"seed": 3}, "seed 3 here, 0 in a"),
        ({"steps": 5}, "steps 5 here, 20 in a"),
        ({"data": {**DATA, "split": "test"}}, "data: split test here, train in a"),
        ({"data": {**DATA, "fingerprint": "f"}}, "data: fingerprint f here"),
        ({"data": {**DATA, "labels": "model"}}, "labels model here, data in a"),
        ({"data": {**DATA, "labels": "regression"}}, "labels regression here, data in a"),
        ({"data": {**DATA, "loss": "my.loss"}}, "data: loss my.loss here"),
        ({"model": {"id": "c", "task": "masked-lm", "dtype": "float32"}}, "task masked-lm here"),
    ],
)
def test_what_was_not_taken_alike_is_refused_by_name_or_marked(changes: dict[str, Any], said: str) -> None:
    items = [*many(a=[1.0, 2.0], b=[2.0, 3.5]), Named("c", result_of("c", [3.0, 4.0], **changes))]
    with pytest.raises(UsageError, match="--force") as caught:
        compare(items)
    assert f"c: {said}" in str(caught.value)
    found = compare(items, force=True)
    assert [text for text in found.forced if said in text]
    assert json.loads(found.to_json())["forced"]
    assert said in found.to_csv()


def test_other_radii_of_the_same_runs_do_not_matter() -> None:
    first, second = many(a=[1.0, 2.0], b=[2.0, 3.5])
    points = (CurvePoint(0.03, 1.0, None, None, None), *second.result.curve, CurvePoint(0.2, 9.0, None, None, None))
    assert not compare([first, replace(second, result=replace(second.result, curve=points))]).forced


def test_the_odd_one_is_named_wherever_it_stands() -> None:
    items = [Named("odd", result_of("odd", [1.0], rho=0.5)), *many(a=[1.0], b=[2.0])]
    (text,) = check_comparable(items, force=True)
    assert text == "odd: rho 0.5 here, 0.1 in a"


def test_forced_results_of_other_batches_are_not_paired() -> None:
    other = Named("c", result_of("c", [3.0, 4.0], data={**DATA, "split": "test"}))
    found = compare([*many(a=[1.0, 2.0]), other], force=True)
    assert (found.next[0].mean, found.next[0].interval95, found.next[0].apart) == (2.0, None, None)


def test_a_path_written_in_another_way_is_the_same_data() -> None:
    other = Named("c", result_of("c", [3.0, 4.0], data={**DATA, "id": "./reviews.csv"}))
    assert compare([*many(a=[1.0, 2.0]), other]).forced == ()


def test_what_follows_from_the_tokenizer_is_a_note() -> None:
    short = Named("c", result_of("c", [3.0, 4.0], data={**DATA, "max_length": 16}))
    found = compare([*many(a=[1.0, 2.0]), short])
    assert found.forced == ()
    assert any("max_length" in note for note in found.notes)


def test_weights_that_are_random_are_a_note() -> None:
    lacking = result_of("c", [3.0, 4.0])
    lacking = replace(lacking, model={**lacking.model, "missing": ["classifier.weight"]})
    found = compare([*many(a=[1.0, 2.0]), Named("c", lacking)])
    assert [note for note in found.notes if "random numbers instead: c" in note]


def test_too_few_twice_and_nan() -> None:
    with pytest.raises(UsageError, match="at least two"):
        compare(many(a=[1.0]))
    with pytest.raises(UsageError, match="twice"):
        compare([Named("a", result_of("a", [1.0])), Named("a", result_of("a", [2.0]))])
    broken = replace(result_of("b", [1.0]), base_loss=float("nan"))
    with pytest.raises(DataError, match=r"b holds .* NaN"):
        compare([*many(a=[1.0]), Named("b", broken)])


# --------------------------------------------------------------------------------------------------------------- files


def test_results_from_files_and_folders(tmp_path: Path) -> None:
    one = write(tmp_path, "one", result_of("runs/x", [1.0, 2.0]))
    folder = tmp_path / "out"
    for name in ("y", "z"):
        (folder / name).mkdir(parents=True)
        write(folder / name, "result", result_of(f"runs/{name}", [1.0, 3.0]))
    held = read_results([one, folder])
    assert [item.name for item in held] == ["x", "y", "z"]
    assert "runs/x" in held[0].aliases
    with pytest.raises(DataError, match="2 times"):
        read_results([one, one])
    with pytest.raises(DataError, match="no file or folder"):
        read_results([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no result"):
        read_results([tmp_path / "empty"])
    (tmp_path / "nan.json").write_text(one.read_text().replace('"base_loss": 0.5', '"base_loss": NaN'))
    with pytest.raises(DataError, match="NaN"):
        read_results([tmp_path / "nan.json"])


@pytest.mark.parametrize("odd", ["\x1b[31mred", "a\x00b", "half \ud800"])
def test_what_a_terminal_or_a_page_could_take_amiss_is_no_result(tmp_path: Path, odd: str) -> None:
    for place, changes in enumerate(({"model": {"id": odd}}, {"warnings": [odd]}, {"baselines": {odd: 1.0}})):
        file = tmp_path / f"{place}.json"
        file.write_text(json.dumps(result_of("m", [1.0, 2.0], **changes).to_dict()))
        with pytest.raises(DataError, match=r"holds a character that is not allowed in texts: '"):
            read_results([file])


def test_names_tell_results_apart() -> None:
    def names(*items: Named) -> list[str]:
        return [item.name for item in named(items)]

    hub = {"task": "text-classification", "dtype": "float32"}
    one = result_of("", [1.0], model={**hub, "id": "me/bert", "revision": "a" * 40})
    two = result_of("", [1.0], model={**hub, "id": "me/bert", "revision": "b" * 40})
    assert names(Named("me/bert", one), Named("me/bert", two)) == [f"me/bert ({'a' * 12})", f"me/bert ({'b' * 12})"]
    three = result_of("", [1.0], model={**hub, "id": "me/other", "revision": "b" * 40})
    assert names(Named("me/bert", one), Named("me/other", three)) == ["me/bert", "me/other"]
    same = result_of("BertModel", [1.0])
    assert names(Named("BertModel", same, "x.json"), Named("BertModel", same, "d/result.json")) == [
        "BertModel (x.json)",
        "BertModel (d)",
    ]


def test_the_history_that_reaches_furthest_is_read(tmp_path: Path) -> None:
    def state(folder: Path, *records: dict[str, Any]) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": list(records)}))

    early = [{"step": 5, "loss": 2.0}, {"step": 10, "eval_loss": 1.5, "eval_accuracy": 0.3}]
    state(tmp_path / "checkpoint-10", *early)
    state(
        tmp_path / "checkpoint-20", *early, {"step": 15, "loss": float("nan")}, {"step": 20, "loss": 1.0},
        {"step": 20, "train_loss": 9.0, "loss_scale": 4.0},
    )  # fmt: skip
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text("{")
    checkpoints = find_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in checkpoints] == [9, 10, 20]
    history = read_history(tmp_path, checkpoints)
    assert history.losses == {"loss": ((5, 2.0), (20, 1.0)), "eval_loss": ((10, 1.5),)}
    assert history.at(12) == {"loss": 2.0, "eval_loss": 1.5}
    assert history.at(1) == {}
    assert [note.split()[0] for note in history.notes] == [str(tmp_path / "checkpoint-9" / "trainer_state.json"), "1"]


# -------------------------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tiny classifiers as checkpoints of a run, with broken ones between them, and their data."""
    import torch
    from transformers import BertForSequenceClassification

    from tests.tasks import tiny

    root = tmp_path_factory.mktemp("compare")
    rng = np.random.default_rng(0)
    rows = "".join(f"{tiny.sentence(rng)},{int(rng.integers(2))}\n" for _ in range(24))
    (root / "rows.csv").write_text("text,label\n" + rows)
    run = root / "run"
    for step in (10, 20, 30, 40):
        torch.manual_seed(step)
        model = BertForSequenceClassification(tiny.bert_config(num_labels=2))
        tiny.save(model, run / f"checkpoint-{step}", tiny.make_tokenizer())
    (run / "checkpoint-20" / "config.json").unlink()
    weights = run / "checkpoint-30" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    log = [{"step": 10, "loss": 0.7}, {"step": 40, "loss": 0.6, "eval_loss": 0.65}]
    (run / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    return {"root": root, "run": run, "data": root / "rows.csv"}


def options(world: dict[str, Path], **changes: Any) -> dict[str, Any]:
    return {"data": str(world["data"]), "samples": 16, "batch_size": 8, "steps": 2, "device": "cpu", **changes}


@pytest.mark.slow
def test_a_run_of_checkpoints_with_broken_ones(world: dict[str, Path], tmp_path: Path) -> None:
    from hf_geosharp.scoring import score_pretrained

    run = str(world["run"])
    with pytest.warns(GeosharpWarning, match="skipped"):
        found = compare_pretrained([run], output=tmp_path, **options(world))
    by_step = sorted(found.ranking, key=lambda held: held.step or 0)
    assert [(held.name, held.step) for held in by_step] == [("checkpoint-10", 10), ("checkpoint-40", 40)]
    assert [Path(skipped.name).name for skipped in found.skipped] == ["checkpoint-20", "checkpoint-30"]
    assert "config.json" in found.skipped[0].reason
    assert any("2 of 4 checkpoints skipped" in note for note in found.notes)
    assert [held.losses for held in by_step] == [{"loss": 0.7}, {"loss": 0.6, "eval_loss": 0.65}]
    alone = score_pretrained(str(world["run"] / "checkpoint-40"), **options(world))
    assert by_step[1].sharpness == alone.geodesic_sharpness
    assert Comparison.from_dict(json.loads(found.to_json())) == found
    # The results are there, they compare without the models, and the same call reads them.
    assert [item.name for item in read_results([tmp_path])] == ["checkpoint-10", "checkpoint-40"]
    files = compare_pretrained([str(tmp_path)])
    assert [held.value for held in files.ranking] == [held.value for held in found.ranking]
    before = {path: path.read_bytes() for path in tmp_path.glob("*/journal-0.jsonl")}
    with pytest.warns(GeosharpWarning, match="skipped"):
        again = compare_pretrained([run], output=tmp_path, **options(world))
    assert again == found
    assert {path: path.read_bytes() for path in tmp_path.glob("*/journal-0.jsonl")} == before
    with pytest.raises(UsageError, match="steps 2 there, 3 here"):
        compare_pretrained([run], output=tmp_path, **options(world, steps=3))


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _nan(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"] = torch.full_like(weights["classifier.weight"], float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _config(text: str) -> Any:
    return lambda folder: (folder / "config.json").write_text(text)


BROKEN = (
    (_no_weights, "safetensors"),
    (_nan, "NaN"),
    (_config("{"), "config.json cannot be read"),
    (_config("[]"), "config.json cannot be read"),
    (_config("{}"), "names no architecture"),
    (_config('{"architectures": ["BertModel"], "model_type": "bert"}'), "none of the tasks"),
    (_config('{"architectures": ["BertForSequenceClassification"], "model_type": "nonsense"}'), "nonsense"),
    (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b""), "does not load"),
)


@pytest.mark.slow
def test_checkpoints_broken_in_any_way_are_skipped(world: dict[str, Path], tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-40"):
        shutil.copytree(world["run"] / name, tmp_path / name)
    for step, (spoil, _) in enumerate(BROKEN, start=11):
        shutil.copytree(world["run"] / "checkpoint-10", tmp_path / f"checkpoint-{step}")
        spoil(tmp_path / f"checkpoint-{step}")
    with pytest.warns(GeosharpWarning, match="skipped"):
        found = compare_pretrained([str(tmp_path)], **options(world, steps=1))
    assert sorted(held.step or 0 for held in found.ranking) == [10, 40]
    for step, (skipped, (_, reason)) in enumerate(zip(found.skipped, BROKEN, strict=True), start=11):
        assert Path(skipped.name).name == f"checkpoint-{step}"
        assert reason in skipped.reason


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on_where_it_was(world: dict[str, Path], tmp_path: Path) -> None:
    models = [str(world["run"] / name) for name in ("checkpoint-10", "checkpoint-40")]
    unbroken = compare_pretrained(models, **options(world))
    counts: list[tuple[int, int]] = []

    def stop(state: Any) -> None:
        counts.append((state.done, state.total))
        if state.stage == "score" and state.batch == 2 and 2 * state.done > state.total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare_pretrained(models, output=tmp_path, progress=stop, **options(world))
    # Progress counts over both models.
    assert counts == sorted(counts)
    assert len({total for _, total in counts}) == 1
    assert [path.parent.name for path in tmp_path.glob("*/result.json")] == [
        path.parent.name for path in tmp_path.glob("*checkpoint-10/result.json")
    ]
    assert len(list(tmp_path.glob("*/journal-0.jsonl"))) == 2
    assert compare_pretrained(models, output=tmp_path, **options(world)) == unbroken


def test_a_model_of_no_task_is_refused_before_any_is_scored(world: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(world["run"] / "checkpoint-10", tmp_path / "base")
    _config('{"architectures": ["BertModel"], "model_type": "bert"}')(tmp_path / "base")
    told: list[str] = []
    models = [str(world["run"] / "checkpoint-40"), str(tmp_path / "base")]
    with pytest.raises(UnsupportedModelError, match="BertModel, which does none of the tasks"):
        compare_pretrained(models, told=told.append, **options(world))
    _config("{}")(tmp_path / "base")
    with pytest.raises(UsageError, match="names no architecture"):
        compare_pretrained(models, told=told.append, **options(world))
    assert told == []


def test_a_folder_that_is_a_model_with_checkpoints(world: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(world["run"] / "checkpoint-40", tmp_path / "run")
    for name in ("checkpoint-10", "checkpoint-40"):
        shutil.copytree(world["run"] / name, tmp_path / "run" / name)
    run = str(tmp_path / "run")
    assert [member.step for member in find_members([run]).members] == [10, 40]
    both = find_members([run, str(world["run"] / "checkpoint-10")])
    assert [member.step for member in both.members] == [None, None]
    assert "give the folder alone" in both.notes[0]


def test_revisions() -> None:
    found = find_members(["me/bert@v1", "me/bert@v2", "me/other", "demo:digits-vit"], "main")
    assert [(member.place, member.revision) for member in found.members] == [
        ("me/bert", "v1"),
        ("me/bert", "v2"),
        ("me/other", "main"),
        ("demo:digits-vit", None),
    ]
    assert folder_names(found.members) == ["me--bert@v1", "me--bert@v2", "me--other@main", "demo--digits-vit"]
    clash = find_members(["me/bert", "me--bert"]).members
    assert len(set(folder_names(clash))) == 2


def test_a_figure_that_no_score_will_have_is_told_at_once(world: dict[str, Path]) -> None:
    told: list[str] = []
    with pytest.raises(UsageError, match="rank_by is 'adaptive'"):
        compare_pretrained([str(world["run"])], rank_by="adaptive", told=told.append, **options(world))
    assert told == []


def test_results_that_do_not_go_together_are_told_before_a_model_is_scored(
    world: dict[str, Path], tmp_path: Path
) -> None:
    told: list[str] = []
    files = [str(write(tmp_path, f"r{seed}", result_of(f"r{seed}", [1.0, 2.0], seed=seed))) for seed in (0, 1)]
    models = [str(world["run"] / "checkpoint-10"), *files]
    with pytest.raises(UsageError, match="seed 1 here, 0 in r0"):
        compare_pretrained(models, told=told.append, **options(world))
    with pytest.raises(UsageError, match="the result of r0 has no 'adaptive'"):
        compare_pretrained(models[:2], rank_by="adaptive", baselines=["adaptive"], told=told.append, **options(world))
    alike = {"steps": 20, "batch_size": 32, "ascent": "secant"}
    for changes, said in (
        ({"batch_size": 8}, ": batch_size 32 in r0, 8 here"),
        ({"seed": 7}, ": seed 0 in r0, 7 here"),
        ({"starts": 2}, ": starts 1 in r0, 2 here"),
        ({"rho": 0.2}, ": rho 0.1 in r0, 0.2 here"),
        ({"average": True, "ascent": "auto"}, ": mode worst in r0, average here"),
        ({"metric": "mix", "rho": 0.1}, ": metric inv in r0, mix here"),
        ({"metric": "euclidean"}, ": metric inv in r0, euclidean here; geodesic second in r0, first here; symmetries"),
        ({"geodesic": "exact"}, ": geodesic second in r0, exact here"),
        ({"symmetries": "paper"}, ": symmetries full in r0, paper here"),
        ({"ascent": "apgd"}, ": ascent secant in r0, apgd here"),
        ({"labels": "model"}, ": labels data in r0, model here"),
        ({"dtype": "float64"}, ": dtype float32 in r0, float64 here"),
        ({"max_length": 7}, ": max_length missing in r0, 7 here"),
        ({}, ": data: id reviews.csv in r0, .*; data: fingerprint 0123456789abcdef in r0, .*; data: rows 1000 in r0"),
    ):
        with pytest.raises(UsageError, match=f"would not be comparable .*{said}"):
            compare_pretrained(models[:2], told=told.append, **options(world, **{**alike, **changes}))
    assert told == []


class ReachedError(Exception):
    """A score would have been taken."""


def scored(*_: Any) -> Any:
    raise ReachedError


def test_a_result_that_will_be_comparable_is_not_refused_beforehand(
    world: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known before a score is what the score says afterwards, whichever way it is taken."""
    from hf_geosharp.scoring import score_pretrained

    monkeypatch.setattr(comparison, "_score", scored)
    first, second = (str(world["run"] / f"checkpoint-{step}") for step in (10, 40))
    for number, changes in enumerate(
        (
            {},
            {"metric": "mix", "rho": [0.002, 0.01], "geodesic": "exact", "symmetries": "attention", "ascent": "apgd"},
            {"metric": "adaptive", "seed": 3, "starts": 2, "max_length": 6, "dtype": "float64"},
            {"average": True, "labels": "model", "samples": 17},
        )
    ):
        asked = options(world, **changes)
        file = write(tmp_path, f"r{number}", score_pretrained(first, **asked))
        with pytest.raises(ReachedError):
            compare_pretrained([second, str(file)], **asked)
        with pytest.raises(UsageError, match=r"results: data: samples 16 in .*checkpoint-10, 8 here"):
            compare_pretrained([second, str(file)], **{**asked, "samples": 9})


def classifier(folder: Path, card: str = "", **config: Any) -> str:
    from transformers import BertForSequenceClassification

    from tests.tasks import tiny

    tiny.save(BertForSequenceClassification(tiny.bert_config(num_labels=2, **config)), folder, tiny.make_tokenizer())
    (folder / "README.md").write_text(f"---\n{card}\n---\n" if card else "")
    return str(folder)


def test_what_a_model_cannot_be_scored_on_is_told_before_another_is_scored(
    world: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first model was scored it was told that the second one's card names no data, say."""
    monkeypatch.setattr(comparison, "_score", scored)
    plain = classifier(tmp_path / "plain", f"datasets: {world['data']}")
    silent = classifier(tmp_path / "silent")
    named = classifier(tmp_path / "named", id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    asked = options(world)
    for models, changes, said in (
        ([plain, silent], {"data": None}, rf"^{silent}: No data: the model card names none"),
        ([plain, silent], {"columns": {"text": "body"}}, rf"^{plain}: The data have no column 'body'"),
        ([named, plain], {"label_map": {"0": "bad", "1": "good"}}, rf"^{plain}: The label map sends '0' to 'bad'"),
    ):
        with pytest.raises(GeosharpError, match=said):
            compare_pretrained(models, **{**asked, **changes})
    with pytest.raises(ReachedError):
        compare_pretrained([plain, silent], **asked)


def test_models_whose_cards_name_other_data_are_told_before_one_is_scored(
    world: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_score", scored)
    (tmp_path / "other.csv").write_text(world["data"].read_text() + "one more,1\n")
    models = [classifier(tmp_path / name, f"datasets: {data}") for name, data in
              (("a", world["data"]), ("b", world["data"]), ("c", tmp_path / "other.csv"))]  # fmt: skip
    asked = options(world, data=None)
    with pytest.raises(UsageError, match=r"of different data: data: id .*rows.csv of .*/a, .*other.csv of .*/c"):
        compare_pretrained([models[0], models[2]], **asked)
    for names, force in ((models[:2], False), (models[1:], True)):
        with pytest.raises(ReachedError):
            compare_pretrained(names, force=force, **asked)


def test_columns_that_a_result_was_not_taken_with_are_told_before_a_model_is_scored(
    world: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_geosharp.scoring import score_pretrained

    monkeypatch.setattr(comparison, "_score", scored)
    rows = [line.split(",") for line in world["data"].read_text().splitlines()[1:]]
    (tmp_path / "two.csv").write_text("text,title,label\n" + "".join(f"{a},{a} {a},{b}\n" for a, b in rows))
    first, second = (str(world["run"] / f"checkpoint-{step}") for step in (10, 40))
    asked = options(world, data=str(tmp_path / "two.csv"))
    file = str(write(tmp_path, "r", score_pretrained(first, **asked)))
    with pytest.raises(ReachedError):
        compare_pretrained([second, file], **asked)
    with pytest.raises(UsageError, match=r"of different data: data: columns: text text in .*, title of .*-40"):
        compare_pretrained([second, file], **asked, columns={"text": "title"})


def test_a_result_without_a_task_has_its_data_looked_at_too(world: dict[str, Path]) -> None:
    """Of a model of no known task; it ended in 'There is no task'."""
    result = result_of("r", [1.0, 2.0], model={"id": "r", "task": None})
    given = {**options(world), "data_config": None, "split": None}
    found = comparison._differing_data(result, given, None, ("in r", "here"))
    assert any(text.startswith("data: fingerprint 0123456789abcdef in r") for text in found)


def test_a_model_without_symmetries_may_be_compared_with_another(
    world: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for inv, they are scored as adaptive; whether the next one is, only its proof tells."""
    monkeypatch.setattr(comparison, "_differing_data", lambda *_: [])
    monkeypatch.setattr(comparison, "_score", scored)
    result = result_of("r", [1.0, 2.0], metric="adaptive", geodesic="first", symmetries="none", ascent="auto")
    models = [str(world["run"] / "checkpoint-10"), str(write(tmp_path, "r", result))]
    asked = options(world, steps=20, batch_size=32)
    with pytest.raises(ReachedError):
        compare_pretrained(models, **asked)
    with pytest.raises(UsageError, match="metric adaptive in r, euclidean here"):
        compare_pretrained(models, **{**asked, "metric": "euclidean"})


def test_a_broken_model_that_was_named_ends_the_comparison(world: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"checkpoint-20 is not a model: the folder has no config.json"):
        compare_pretrained([str(world["run"] / "checkpoint-10"), str(world["run"] / "checkpoint-20")], **options(world))


def test_a_run_with_fewer_than_two_left_says_why(world: dict[str, Path], tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-20", "checkpoint-30"):
        shutil.copytree(world["run"] / name, tmp_path / "run" / name)
    with (
        pytest.warns(GeosharpWarning),
        pytest.raises(ModelError, match=r"fewer than two of 3(.|\n)*checkpoint-20(.|\n)*checkpoint-30"),
    ):
        compare_pretrained([str(tmp_path / "run")], **options(world))


def test_models_of_different_tasks_are_refused_before_any_is_scored(world: dict[str, Path]) -> None:
    told: list[str] = []
    with pytest.raises(UsageError, match="different tasks"):
        compare_pretrained([str(world["run"] / "checkpoint-10"), "demo:digits-vit"], told=told.append, **options(world))
    assert told == []


def test_names_that_are_no_comparison(world: dict[str, Path]) -> None:
    one = str(world["run"] / "checkpoint-10")
    with pytest.raises(UsageError, match="at least two models"):
        compare_pretrained([one], **options(world))
    with pytest.raises(UsageError, match="given twice"):
        compare_pretrained([one, one], **options(world))
    with pytest.raises(UsageError, match="given twice"):
        compare_pretrained([one, str(world["run"])], **options(world))
    with pytest.raises(ModelError, match="no folder"):
        compare_pretrained([one, str(world["root"] / "none")], **options(world))


@pytest.mark.slow
def test_a_model_against_a_result_of_other_settings(world: dict[str, Path], tmp_path: Path) -> None:
    held = write(tmp_path, "held", result_of("other", [1.0, 2.0], batch_size=8))
    one = str(world["run"] / "checkpoint-10")
    with pytest.raises(UsageError, match="steps 20 in other, 2 here"):
        compare_pretrained([str(held), one], **options(world))
    found = compare_pretrained([str(held), one], force=True, **options(world))
    assert found.forced
    assert found.next[0].apart is None


@pytest.mark.slow
def test_the_classes_may_have_other_numbers(world: dict[str, Path], tmp_path: Path) -> None:
    """Two models of one function whose classes are numbered the other way round have the same score by names."""
    import datasets
    import torch
    from transformers import BertForSequenceClassification

    from tests.tasks import tiny

    torch.manual_seed(0)
    config = tiny.bert_config(num_labels=2, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    model = BertForSequenceClassification(config)
    tiny.save(model, tmp_path / "a", tiny.make_tokenizer())
    with torch.no_grad():
        model.classifier.weight.copy_(model.classifier.weight.flip(0))
        model.classifier.bias.copy_(model.classifier.bias.flip(0))
    model.config.id2label, model.config.label2id = {0: "good", 1: "bad"}, {"good": 0, "bad": 1}
    tiny.save(model, tmp_path / "b", tiny.make_tokenizer())
    rows = datasets.load_dataset("csv", data_files=str(world["data"]), split="train")
    rows.cast_column("label", datasets.ClassLabel(names=["bad", "good"])).save_to_disk(tmp_path / "rows")
    found = compare_pretrained(
        [str(tmp_path / "a"), str(tmp_path / "b")], **options(world, data=str(tmp_path / "rows"), dtype="float64")
    )
    a, b = found.ranking
    assert a.value == pytest.approx(b.value, rel=1e-6)
    assert a.base_loss == pytest.approx(b.base_loss, rel=1e-9)
    assert found.next[0].apart is False


def test_adapters_that_are_out_of_place_are_told_before_anything_is_scored(
    world: dict[str, Path], tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "x", "task_type": "CAUSAL_LM"}')
    first = str(world["run"] / "checkpoint-10")
    told: list[str] = []
    for task in ("auto", "text-classification"):
        for models in ([first, str(adapter)], [str(adapter), first]):
            with pytest.raises(UnsupportedModelError, match="adapter is an adapter"):
                compare_pretrained(models, told=told.append, **options(world, task=task))
            with pytest.raises(UsageError, match="checkpoint-10 is not an adapter"):
                compare_pretrained(models, told=told.append, **options(world, task=task, params="lora"))
    assert told == []


def test_the_task_of_an_adapter_is_left_to_loading_unless_it_names_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where it is on the Hub, as its base's configuration is."""
    held = tmp_path / "adapter_config.json"
    held.write_text('{"base_model_name_or_path": "me/base"}')
    source = Source("me/adapter")
    monkeypatch.setattr("hf_geosharp.tasks.hub.find_source", lambda *_: source)
    for module in ("hub", "adapters", "config"):
        monkeypatch.setattr(
            f"hf_geosharp.tasks.{module}.fetch", lambda _, name: held if held.exists() and name == held.name else None
        )
    found = members.find_members(["me/adapter"]).members
    other = many(c=[1.0, 2.0])
    assert members.check_members(found, other, params="lora") == {}
    held.write_text('{"base_model_name_or_path": "me/base", "task_type": "CAUSAL_LM"}')
    with pytest.raises(UsageError, match="causal-lm: me/adapter"):
        members.check_members(found, other, params="lora")
    held.unlink()
    with pytest.raises(ModelError, match=r"me/adapter is not a model: the repository has no config\.json"):
        members.check_members(found)


def test_a_folder_that_is_an_adapter_is_a_model(tmp_path: Path) -> None:
    """Also where results, or checkpoints, are in it."""
    for name in ("adapter_config.json", "result.json", "checkpoint-3/adapter_config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert not members.holds_results(str(tmp_path))
    found = find_members([str(tmp_path), "me/other"])
    assert [member.step for member in found.members] == [None, None]
    assert "give the folder alone" in found.notes[0]


def test_a_length_that_was_chosen_is_a_setting() -> None:
    plain = result_of("a", [1.0, 2.0])
    chosen = replace(plain, data={**plain.data, "max_length": 6, "max_length_chosen": True})
    default = replace(plain, data={**plain.data, "max_length": 64})
    with pytest.raises(UsageError, match="max_length"):
        check_comparable([Named("a", default), Named("b", chosen)])
    other = replace(plain, data={**plain.data, "max_length": 48})
    assert check_comparable([Named("a", default), Named("b", other)]) == []
