"""Correlations against SciPy and hand-worked cases, the targets, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from hf_geosharp import correlation, demos
from hf_geosharp.comparable import Named
from hf_geosharp.correlation import Correlation, correlate, match, read_target
from hf_geosharp.errors import DataError, GeosharpError, UsageError
from tests.results import many, result_of

ALL = ("Kendall tau-b", "Spearman rho", "Pearson r")


def zoo(values: list[float]) -> list[Named]:
    return many(**{f"m{i}": [v, v] for i, v in enumerate(values)})


def target(values: list[float]) -> dict[str, float]:
    return {f"m{i}": v for i, v in enumerate(values)}


def statistics(found: Correlation) -> dict[str, correlation.Statistic]:
    return {held.name: held for held in found.statistics}


@pytest.mark.parametrize("form", ["Kendall tau-b", "Spearman rho", "Pearson r"])
def test_many_at_once_are_those_of_scipy_one_by_one(form: str) -> None:
    rng = np.random.default_rng(1)
    # Ties, and rows that are constant.
    x, y = rng.integers(0, 4, (60, 6)).astype(float), rng.integers(0, 3, (60, 6)).astype(float)
    x[0] = 2.0
    ours = correlation._FORMS[form](x, y, axis=-1)
    for one, a, b in zip(ours, x, y, strict=True):
        if len(set(a)) == 1 or len(set(b)) == 1:
            assert np.isnan(one)
        else:
            assert one == pytest.approx(correlation._VALUES[form](a, b), abs=1e-12)


def test_kendall_by_hand_with_ties() -> None:
    found = correlate(zoo([1, 2, 2, 4]), target([1, 3, 2, 2]), resamples=99)
    # Of six pairs five differ in x, five in y, four in both; of these three agree and one does not.
    assert statistics(found)["Kendall tau-b"].value == pytest.approx((3 - 1) / 5)
    assert found.ties == {"figure": 1, "target": 1}


def test_the_p_value_of_few_models_is_exact() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 3.0, 2.0, 5.0, 4.0]
    found = statistics(correlate(zoo(x), target(y)))
    kendall = found["Kendall tau-b"]
    assert kendall.exact
    assert kendall.p_value == pytest.approx(stats.kendalltau(x, y, method="exact").pvalue)
    # Pearson by enumeration, two-sided as twice the smaller tail.
    all_of = [np.corrcoef(x, p)[0, 1] for p in itertools.permutations(y)]
    own = np.corrcoef(x, y)[0, 1]
    tails = [np.mean([r >= own - 1e-12 for r in all_of]), np.mean([r <= own + 1e-12 for r in all_of])]
    assert found["Pearson r"].p_value == pytest.approx(min(1.0, 2 * min(tails)))


def test_the_p_value_of_many_models_is_close_to_the_exact_one_and_seeded() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=12)
    y = 0.5 * x + rng.normal(size=12)
    first, second = (correlate(zoo(x.tolist()), target(y.tolist()), seed=5) for _ in range(2))
    assert first == second
    kendall = statistics(first)["Kendall tau-b"]
    assert not kendall.exact
    exact = stats.kendalltau(x, y, method="exact").pvalue
    # Five standard errors of 9999 draws, on both sides of the doubled tail.
    assert abs(kendall.p_value - exact) < 10 * np.sqrt(exact / 2 / 9999) + 2e-4


@pytest.mark.slow
def test_the_interval_is_the_percentile_bootstrap_of_scipy() -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=25)
    y = x + rng.normal(size=25)
    ours = statistics(correlate(zoo(x.tolist()), target(y.tolist())))["Pearson r"].interval95
    theirs = stats.bootstrap(
        (x, y), lambda a, b: stats.pearsonr(a, b).statistic, paired=True, vectorized=False, method="percentile",
        n_resamples=2000, random_state=0,
    ).confidence_interval  # fmt: skip
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.03)


@pytest.mark.parametrize(("models", "has"), [(7, False), (8, True)])
def test_few_models_have_no_intervals_which_would_be_too_narrow(models: int, has: bool) -> None:
    found = correlate(zoo([float(i) for i in range(models)]), target([float(i % 5) for i in range(models)]))
    assert all((held.interval95 is not None) is has for held in found.statistics)
    assert any("no intervals: of fewer than 8 models" in note for note in found.notes) is not has


@pytest.mark.slow
def test_the_intervals_of_eight_models_without_a_relation_mostly_have_zero_in_them() -> None:
    """At the fewest models that have some: within twice the nominal 5 % for ranks."""
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(300):
        x, y = rng.normal(size=(2, 8))
        low, high = correlation._statistic("Kendall tau-b", x, y, 0, 999).interval95 or (0.0, 0.0)
        missed += not low <= 0 <= high
    assert missed <= 30


@pytest.mark.slow
def test_what_the_intervals_of_eight_related_models_cover() -> None:
    """Measured: 293 (Kendall), 290 (Spearman) and 265 (Pearson) of 300, as the document says."""
    rng = np.random.default_rng(1)
    true = {"Kendall tau-b": 2 / np.pi * np.arcsin(0.8), "Spearman rho": 6 / np.pi * np.arcsin(0.4), "Pearson r": 0.8}
    held = dict.fromkeys(true, 0)
    for _ in range(300):
        x, noise = rng.normal(size=(2, 8))
        for form, value in true.items():
            low, high = correlation._statistic(form, x, 0.8 * x + 0.6 * noise, 0, 999).interval95 or (-1.0, 1.0)
            held[form] += low <= value <= high
    assert held["Kendall tau-b"] >= 276
    assert held["Spearman rho"] >= 276
    assert 252 <= held["Pearson r"] < 285, held


@pytest.mark.parametrize("form", ALL)
def test_where_one_or_two_models_alone_differ_there_is_no_interval(form: str) -> None:
    """Samples without them have no correlation. The interval of the others held a true 0 in 34 to 89 of 100 cases."""
    rng = np.random.default_rng(0)
    for models in (8, 20):
        x = rng.normal(size=models)
        for few, has in ((1, False), (2, False), (3, True)):
            y = (np.arange(models) < few).astype(float)
            for pair in ((x, y), (y, x)):
                assert (correlation._statistic(form, *pair, 0, 4999).interval95 is not None) is has


def test_a_perfect_order_of_many_has_no_interval_that_claims_certainty() -> None:
    """Every resample of it is perfect too: [1, 1] covers nothing but 1, which the truth need not be."""
    values = [float(i) for i in range(9)]
    for power, without in ((3, ALL[:2]), (1, ALL)):
        found = correlate(zoo([1 + v for v in values]), target([-(v**power) for v in values]), resamples=999)
        assert [held.name for held in found.statistics if held.interval95 is None] == list(without)
        (note,) = [text for text in found.notes if "no interval for" in text]
        assert f"no interval for {', '.join(without)}: " in note
        assert all(-1 <= bound <= 1 for held in found.statistics for bound in held.interval95 or ())


@pytest.mark.parametrize("scale", [1e-200, 1e-310, 1e200])
def test_numbers_of_any_size_correlate_as_they_would_in_other_units(scale: float) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 8))
    # What is that small is not stored exactly, so both sides are taken as they are stored.
    small = x * scale
    every = math.factorial(len(x))  # orders: p-values have no chance in them
    for form in ALL:
        expected = correlation._statistic(form, small / scale, y, 0, every)
        for pair in ((small, y), (y, small)):
            found = correlation._statistic(form, *pair, 0, every)
            assert found.value == pytest.approx(expected.value, abs=1e-9)
            assert found.p_value == pytest.approx(expected.p_value, abs=1e-9)
            assert found.interval95 == pytest.approx(expected.interval95, abs=1e-6)


def test_a_perfect_order() -> None:
    found = correlate(zoo([1, 2, 3, 4]), target([10, 20, 30, 40]))
    assert {name: held.value for name, held in statistics(found).items()} == pytest.approx(
        {"Kendall tau-b": 1, "Spearman rho": 1, "Pearson r": 1}
    )
    # Two of 24 orders are that extreme.
    assert statistics(found)["Kendall tau-b"].p_value == pytest.approx(2 / 24)
    assert Correlation.from_dict(json.loads(found.to_json())) == found


def test_identical_models_are_named() -> None:
    found = correlate(zoo([1, 1, 3, 4]), target([1, 2, 3, 4]), resamples=99)
    assert any("m0, m1 are equal in every batch" in note for note in found.notes)


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 4 models, and there are 3"):
        correlate(zoo([1, 2, 3]), target([1, 2, 3]))
    with pytest.raises(DataError, match="target is 1 for all 4 models"):
        correlate(zoo([1, 2, 3, 4]), target([1, 1, 1, 1]))
    with pytest.raises(DataError, match="sharpness is 2 for all 4 models"):
        correlate(zoo([2, 2, 2, 2]), target([1, 2, 3, 4]))
    with pytest.raises(DataError, match="m1 is NaN"):
        correlate(zoo([1, 2, 3, 4]), target([1, float("nan"), 1, 2]))
    with pytest.raises(DataError, match=r"no value for m3. It has mx, which no result is of"):
        correlate(zoo([1, 2, 3, 4]), {"m0": 1, "m1": 2, "m2": 3, "mx": 4})
    with pytest.raises(UsageError, match="twice"):
        correlate([*zoo([1, 2, 3, 4]), zoo([1])[0]], target([1, 2, 3, 4]))
    broken = Named("m3", result_of("m3", [float("inf"), 1.0]))
    with pytest.raises(DataError, match="NaN or infinite"):
        correlate([*zoo([1, 2, 3]), broken], target([1, 2, 3, 4]))


def test_other_settings_are_refused_or_marked() -> None:
    items = [*zoo([1, 2, 3]), Named("m3", result_of("m3", [4.0, 4.0], rho=0.5))]
    with pytest.raises(UsageError, match=r"m3: rho 0\.5 here"):
        correlate(items, target([1, 2, 3, 4]))
    found = correlate(items, target([1, 2, 3, 4]), force=True, resamples=99)
    assert found.forced == ("m3: rho 0.5 here, 0.1 in m0",)
    assert json.loads(found.to_json())["forced"]


def test_unknown_models_of_a_target_are_noted() -> None:
    found = correlate(zoo([1, 2, 3, 4]), {**target([1, 2, 3, 4]), "else": 5}, resamples=99)
    assert any("else" in note for note in found.notes)


def test_models_are_found_by_other_names() -> None:
    items = [Named("a", result_of("x/a", [1.0]), aliases=("x/a", "same")), Named("b", result_of("x/b", [1.0]))]
    assert match(items, {"x/a": 1, "b": 2}) == ([1, 2], [])
    with pytest.raises(DataError, match="are both a"):
        match(items, {"x/a": 1, "a": 3, "b": 2})
    items[1] = Named("b", items[1].result, aliases=("same",))
    with pytest.raises(DataError, match="may be any of a, b"):
        match(items, {"same": 1})


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(GeosharpError, match="pip install scipy"):
        correlate(zoo([1, 2, 3, 4]), target([1, 2, 3, 4]))


# ------------------------------------------------------------------------------------------------------------- targets


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "gap.csv"
    path.write_text('\ufeffmodel, value ,other\na, 1.5 ,2\n"b,c",-1e-3,3\n', encoding="utf-8")
    assert read_target(path, []) == ({"a": 1.5, "b,c": -0.001}, "gap")
    (tmp_path / "twice.csv").write_text("model,x,y,y\na,1,2,3\n")
    assert read_target(tmp_path / "twice.csv", [], column="x") == ({"a": 1.0}, "x")
    assert read_target(path, [], column="other") == ({"a": 2.0, "b,c": 3.0}, "other")
    (tmp_path / "t.tsv").write_text("model\taccuracy\na\t1\n")
    assert read_target(tmp_path / "t.tsv", []) == ({"a": 1.0}, "accuracy")


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("name,value\na,1\n", None, "no column 'model'; its columns are name, value"),
        ("model,x,y\na,1,2\n", None, "Pass column (--target-column); its columns are model, x, y"),
        ("model,x\na,1\n", "z", "no column 'z'"),
        ("model,x\na,\n", None, "line 2: x of a is '', which is not a number"),
        ("model,x\na,1\na,2\n", None, "line 3: a is there twice"),
        ("model,x\n,1\n", None, "line 2: no model"),
        ("model,x\na\n", None, "x of a is ''"),
        ("model,x\na,1,5\n", None, "line 2: more cells than columns"),
        ("model,x\n", None, "has no rows"),
        ("", None, "its columns are none"),
        ("model,x,x\na,1,2\n", None, "has the column 'x' more than once"),
        ("model,x,value,value\na,1,2,3\n", None, "has the column 'value' more than once"),
        ("model,model,x\na,b,1\n", None, "has the column 'model' more than once"),
        pytest.param(f"model,x\n{'a' * 200_000},1\n", None, "is not a table: field larger than", id="a huge cell"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, column: str | None, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_target(path, [], column=column)
    assert said in str(caught.value)


def test_no_table(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_target(tmp_path / "none.csv", [])
    with pytest.raises(UsageError, match="model-index:METRIC"):
        read_target("accuracy", [])
    with pytest.raises(UsageError, match="name a metric"):
        read_target("model-index:", [])
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        read_target(tmp_path / "t.csv", [])


CARD = """---
model-index:
- name: m
  results:
  - task: {{type: text-classification}}
    dataset: {{type: imdb, name: IMDB}}
    metrics:
    - {{type: accuracy, value: {value}, name: Accuracy}}
  - task: {{type: text-classification}}
    dataset: {{type: sst2, name: SST-2}}
    metrics:
    - {{type: accuracy, value: 0.5}}
    - {{type: f1, value: {value}}}
---
text
"""


def cards(tmp_path: Path, *values: object) -> list[Named]:
    items = []
    for i, value in enumerate(values):
        folder = tmp_path / f"m{i}"
        folder.mkdir()
        (folder / "README.md").write_text(CARD.format(value=value))
        items.append(Named(f"m{i}", result_of(str(folder), [1.0])))
    return items


def test_targets_of_model_cards(tmp_path: Path) -> None:
    items = cards(tmp_path, 0.75, 0.875)
    assert read_target("model-index:f1", items) == ({"m0": 0.75, "m1": 0.875}, "f1")
    assert read_target("model-index:Accuracy@imdb", items)[0] == {"m0": 0.75, "m1": 0.875}
    with pytest.raises(DataError, match=r"several values of accuracy.*@DATASET"):
        read_target("model-index:accuracy", items)
    with pytest.raises(DataError, match="m0, m1 have no bleu"):
        read_target("model-index:bleu", items)
    with pytest.raises(UsageError, match="--target-column"):
        read_target("model-index:f1", items, column="x")


def test_a_card_of_several_models_is_read_for_the_one_that_was_scored(tmp_path: Path) -> None:
    """The value of any model in it was taken, where only one had the metric."""
    index = """- name: other
  results:
  - task: {type: text-classification}
    dataset: {type: imdb, name: IMDB}
    metrics:
    - {type: f1, value: 0.1}
    - {type: bleu, value: 0.2}
"""
    items = cards(tmp_path, 0.75, 0.875)
    for item in items:
        readme = tmp_path / item.name / "README.md"
        own = readme.read_text().replace("- name: m\n", f"- name: {item.name.upper()}\n")
        readme.write_text(own.replace("model-index:\n", f"model-index:\n{index}"))
    assert read_target("model-index:f1", items)[0] == {"m0": 0.75, "m1": 0.875}
    with pytest.raises(DataError, match="m0, m1 have no bleu"):
        read_target("model-index:bleu", items)
    readme = tmp_path / "m1" / "README.md"
    readme.write_text(readme.read_text().replace("- name: M1\n", "- name: third\n"))
    with pytest.raises(DataError, match=r"card of m1 has the values of several models \(other, third\), .* called m1"):
        read_target("model-index:f1", items)
    # One result without a data set, and the metric is not missing but cannot be looked up.
    readme.write_text("---\nmodel-index:\n- name: x\n  results:\n  - metrics:\n    - {type: f1, value: 1}\n---\n")
    with pytest.raises(DataError, match="card of m1 cannot be read: KeyError: 'task'"):
        read_target("model-index:f1", items)


def test_the_card_of_another_model_of_that_name_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's name may be that of a model on the Hub, and a model in memory has the name of its base."""
    monkeypatch.setattr("hf_geosharp.tasks.hub.fetch", lambda *_: pytest.fail("something was fetched"))
    local = result_of("me/bert", [1.0])
    with pytest.raises(DataError, match="was scored in the folder me/bert, which is not here"):
        read_target("model-index:f1", [Named("a", local)])
    memory = replace(local, model={"id": "me/bert", "task": "text-classification"})
    with pytest.raises(DataError, match=r"was scored in memory, .* \(me/bert\)"):
        read_target("model-index:f1", [Named("a", memory)])


def test_cards_without_a_number(tmp_path: Path) -> None:
    items = cards(tmp_path, 0.75, "high")
    with pytest.raises(DataError, match="m1: f1 is 'high'"):
        read_target("model-index:f1", items)
    for value in ("[0.5, 0.6]", "{a: 1}"):
        (tmp_path / "m1" / "README.md").write_text(CARD.format(value=value))
        with pytest.raises(DataError, match=r"m1: f1 is .*, which is not a number"):
            read_target("model-index:f1", items)
        with pytest.raises(DataError, match=r"several values of accuracy: IMDB .*; SST-2 0\.5"):
            read_target("model-index:accuracy", items[1:])
    (tmp_path / "m1" / "README.md").write_text("---\na: [\n---\n")
    with pytest.raises(DataError, match="card of m1 cannot be read: ParserError"):
        read_target("model-index:f1", items)
    (tmp_path / "m0" / "README.md").unlink()
    with pytest.raises(DataError, match="cards of m0 have no f1"):
        read_target("model-index:f1", items[:1])
    with pytest.raises(DataError, match="cards of a have no f1"):  # a demo is always here
        read_target("model-index:f1", [Named("a", result_of(f"{demos.PREFIX}digits-vit", [1.0]))])
