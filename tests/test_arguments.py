"""Arguments of another kind than is wanted: told by name, in words, by every public call, before anything is done."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hf_geosharp
from hf_geosharp import GeodesicSharpness, GeodesicSharpnessCallback, GeosharpError, find_symmetries
from hf_geosharp.arguments import check, whole
from hf_geosharp.cards import card
from hf_geosharp.comparison import Comparison, compare
from hf_geosharp.errors import UsageError
from hf_geosharp.scoring import make_twin
from hf_geosharp.sharpness.settings import radii_of
from hf_geosharp.symmetry.layouts import register_layout
from hf_geosharp.symmetry.map import Element
from tests.cards.results import make_result
from tests.results import many
from tests.sharpness.tiny import bert, bert_batches

MODEL, RESULTS = bert(), many(a=[1.0, 2.0], b=[2.0, 3.0], c=[1.0, 3.0], d=[4.0, 2.0])
DEMO = {"model_id": "demo:digits-vit", "device": "cpu"}
SYMMETRIES = find_symmetries(MODEL)

CALLS: dict[str, Callable[..., Any]] = {
    "score": partial(hf_geosharp.score, model=MODEL, data=bert_batches(1), steps=1),
    "score_pretrained": partial(hf_geosharp.score_pretrained, **DEMO),
    "load_pretrained": partial(hf_geosharp.load_pretrained, **DEMO),
    "inspect": partial(hf_geosharp.inspect, model=MODEL),
    "inspect_pretrained": partial(hf_geosharp.inspect_pretrained, **DEMO),
    "find_symmetries": partial(find_symmetries, model=MODEL),
    "compare_pretrained": partial(hf_geosharp.compare_pretrained, models=["demo:digits-vit", "demo:digits-vit-twin"]),
    "compare": partial(compare, results=RESULTS),
    "correlate": partial(hf_geosharp.correlate, results=RESULTS, target={"a": 1.0, "b": 2.0, "c": 3.0, "d": 1.5}),
    "read_results": hf_geosharp.read_results,
    "read_layouts": hf_geosharp.read_layouts,
    "register_layout": register_layout,
    "make_twin": partial(make_twin, model=MODEL),
    "GeodesicSharpnessCallback": GeodesicSharpnessCallback,
    "attach": GeodesicSharpnessCallback().attach,
    "random_element": partial(SYMMETRIES.random_element, weights=MODEL),
    "inverse": SYMMETRIES.inverse,
    "apply": partial(SYMMETRIES.apply, model=MODEL, element=Element({})),
    "Columns": hf_geosharp.Columns,
    "Named": partial(hf_geosharp.Named, name="a", result=RESULTS[0].result),
    "Layout": partial(
        hf_geosharp.Layout, name="a", paths=dict.fromkeys("qkvo", "q"), patterns=dict.fromkeys("qkvo", "(n h)")
    ),
    "SharpnessResult.from_dict": hf_geosharp.SharpnessResult.from_dict,
    "Inspection.from_dict": hf_geosharp.Inspection.from_dict,
    "Comparison.from_dict": Comparison.from_dict,
    "merge": partial(card.merge, content=b"", result=make_result(), model="me/x"),
    "remove": card.remove,
}

ELSEWHERE = {
    ("score", "max_length"), ("score_pretrained", "max_length"),  # of data that have no texts, which is told first
    ("score_pretrained", "columns"), ("random_element", "weights"), ("compare_pretrained", "options"),
    ("GeodesicSharpnessCallback", "data"),  # anything may hold batches; told when a training begins
    ("Named", "source"), ("Named", "run"), ("Named", "step"), ("Named", "aliases"),  # made by the package
}  # fmt: skip

EACH = [
    (name, argument)
    for name, call in CALLS.items()
    for argument in inspect.signature(call).parameters
    if (name, argument) not in ELSEWHERE
]


SAID = {
    "baselines": "baseline", "places": "a place", "models": "a model", "rank_by": "", "by": "",
    "data": "", "device": "no device", "task": "no task",
}  # fmt: skip
"""What else than its name an argument is told by."""

NO_KIND = {
    ("find_symmetries", "inputs"), ("score_pretrained", "label_map"), ("Layout", "select"),
}  # fmt: skip
"""Mappings that are right as such: the model itself, the data or the search tell that they do not fit."""


@pytest.mark.parametrize(("name", "argument"), EACH)
def test_another_kind_is_told_by_name_with_what_was_given(name: str, argument: str) -> None:
    with pytest.raises(GeosharpError) as told:
        CALLS[name](**{argument: object()})
    (line,) = str(told.value).splitlines()
    assert SAID.get(argument, argument) in line
    assert "object" in line


@pytest.mark.parametrize(("name", "argument"), EACH)
@pytest.mark.parametrize(
    "wrong", [["x", object()], {"x": object()}, math.nan, b"x"], ids=["list", "dict", "nan", "bytes"]
)
def test_no_kind_ends_in_an_error_of_the_code_inside(name: str, argument: str, wrong: Any) -> None:
    if (isinstance(wrong, dict) and (name, argument) in NO_KIND) or (argument, wrong) == ("content", b"x"):
        return
    with pytest.raises(GeosharpError):
        CALLS[name](**{argument: wrong})


@pytest.mark.parametrize("config", [["x"], 3, len])
def test_the_metric_of_evaluate_tells_too(config: Any) -> None:
    with pytest.raises(UsageError, match=r"config_name is .*; it is a text, or None"):
        GeodesicSharpness(config)
    with pytest.raises(UsageError, match=r"model_id is of type .*, not a name or a path"):
        GeodesicSharpness().compute(model_id=config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average": "False"}, "average is 'False'; it is True or False"),
        ({"verify": None}, "verify is None; it is True or False"),
        ({"reproducibility": "no"}, "reproducibility is 'no'"),
        ({"rho": "12"}, "rho is '12'; it is a number or a sequence of numbers"),
        ({"rho": b"12"}, "rho is b'12'"),
        ({"steps": True}, "steps is True; it is a whole number"),
        ({"timeout": 0}, "timeout is 0; it is a positive number of seconds"),
        ({"timeout": math.nan}, "timeout is nan"),
        ({"world": []}, r"world is \[\]; it is a World, or None"),
        ({"processor": "bert-base-cased"}, "processor is 'bert-base-cased'; it is what transformers.AutoTokenizer or"),
        ({"progress": True}, "progress is True; it is a function, or None"),
        ({"layouts": "mine.json"}, "layouts is 'mine.json'; it holds what read_layouts makes"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_passed_for_something_else_is_refused(options: dict[str, Any], message: str) -> None:
    """All of these were taken without a word: a text is true, and its characters are numbers."""
    with pytest.raises(UsageError, match=message):
        CALLS["score"](**options)


def test_an_element_of_no_finite_size_is_refused() -> None:
    """Its powers were NaN, and so were the weights that it moved."""
    for condition in (-1, 0, math.nan, math.inf):
        with pytest.raises(UsageError, match=r"condition is .*; it is positive and finite"):
            make_twin(bert(), condition=condition)


def test_numbers_and_flags_of_other_libraries_are_what_they_are() -> None:
    check(average=np.bool_(True), verify=np.True_, cached=1, prove=0, output=Path("p"), timeout=math.inf, token=True)
    assert whole("steps", np.int64(3)) == 3
    assert radii_of(np.float32(0.5)) == (0.5,)
