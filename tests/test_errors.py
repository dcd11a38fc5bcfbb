"""Messages: what is warned of points at the line of the user's code from where the package was called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

import hf_geosharp
from hf_geosharp.cards import card
from hf_geosharp.errors import DataError, GeosharpWarning, UsageError
from tests.families import batch_of, build
from tests.results import many, result_of, write
from tests.trainer.tiny import bert, trainer


def test_whatever_a_score_warns_of_points_at_the_line_that_asked_for_it() -> None:
    model = build("bert", torch.bfloat16)
    batches = [{key: value[:rows] for key, value in batch_of("bert").items()} for rows in (4, 2)]
    with pytest.warns(GeosharpWarning) as told:
        hf_geosharp.score(model, batches, steps=2)
    places = {str(w.message)[:20]: w.filename for w in told if issubclass(w.category, GeosharpWarning)}
    assert set(places.values()) == {__file__}
    # From the data, from where the model is borrowed, and from the proof or the search.
    assert len(places) > 1


def test_what_is_said_in_a_training_points_at_the_line_that_trains(tmp_path: Path) -> None:
    """It pointed at transformers' handler of callbacks."""
    trained = trainer(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    hf_geosharp.GeodesicSharpnessCallback(samples=64, batch_size=4, steps=1).attach(trained)
    with pytest.warns(GeosharpWarning, match="24 rows") as told:
        trained.train()
    assert {w.filename for w in told if issubclass(w.category, GeosharpWarning)} == {__file__}


def test_what_a_metric_warns_of_points_at_the_line_that_computes() -> None:
    """Of metrics that are combined it pointed at a line of evaluate."""
    import evaluate

    batches = [{key: value[:rows] for key, value in batch_of("bert").items()} for rows in (4, 2)]
    sharpness = hf_geosharp.GeodesicSharpness(model=build("bert", torch.bfloat16), data=batches, steps=1)
    both = evaluate.combine([sharpness])
    with pytest.warns(GeosharpWarning) as told:
        both.compute(predictions=[1], references=[1])
    assert {w.filename for w in told if issubclass(w.category, GeosharpWarning)} == {__file__}


MODEL = torch.nn.Linear(2, 2)
CLASSIFIER = bert()
TEXTS = Dataset.from_dict({"text": ["good", "bad"], "label": [1, 0]})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: hf_geosharp.score_pretrained(MODEL), "model_id is of type Linear, .* call score"),
        (lambda: hf_geosharp.load_pretrained(None), "model_id is of type NoneType, .* call score"),
        (lambda: hf_geosharp.load_pretrained(""), "model_id is an empty name"),
        (lambda: hf_geosharp.inspect_pretrained(MODEL), "model_id is of type Linear, .* call inspect"),
        (lambda: hf_geosharp.inspect("demo:digits-vit"), "'demo:digits-vit', not a module; .* call inspect_pretrained"),
        (lambda: hf_geosharp.find_symmetries("demo:digits-vit"), "not a module; load it first"),
        (lambda: hf_geosharp.score("me/bert", []), "the model is 'me/bert', not a module; .* call score_pretrained"),
        (lambda: hf_geosharp.score(SimpleNamespace(model=MODEL), []), "not a module; pass what it has as its model"),
        (lambda: hf_geosharp.compare_pretrained([MODEL]), "a model is of type Linear, .*comparison.compare"),
        (lambda: hf_geosharp.compare_pretrained("a"), "at least two models, and there is one"),
        (
            lambda: hf_geosharp.compare_pretrained(["a", "b"], sample=3),
            "no option sample; the options are allow_",
        ),
        (lambda: hf_geosharp.read_results([5]), "a place is of type int"),
        (lambda: hf_geosharp.correlate([result_of("a", [1.0])], {}), "the results have no names: read_results"),
        (lambda: hf_geosharp.correlate(many(a=[1.0]), [1.0]), "the target is a list; it is a mapping"),
        (lambda: hf_geosharp.score(MODEL, [], seed=None), "seed is None; it is a whole number"),
        (
            lambda: hf_geosharp.score(CLASSIFIER, TEXTS, processor="bert-base-uncased"),
            "processor is 'bert-base-uncased'; it is what transformers.AutoTokenizer or",
        ),
        (lambda: card.merge("# Mine\n", result_of("a", [1.0]), "a"), "content is '# Mine.*; it is the bytes of a card"),
        (lambda: hf_geosharp.score(MODEL, [], output=3), "output is of type int, not a name or a path; name a folder"),
        (lambda: hf_geosharp.score(MODEL, [], damping="much"), "damping is 'much'; it is a number"),
        (lambda: hf_geosharp.score_pretrained("demo:vader-bert", label_map="x"), "label_map is 'x'; it is a mapping"),
    ],
)
def test_an_argument_of_another_kind_is_told_in_words(call: Callable[[], Any], says: str) -> None:
    """These ended in a TypeError or an AttributeError from somewhere inside."""
    with pytest.raises(UsageError, match=says):
        call()


def test_a_single_name_is_not_taken_for_its_letters(tmp_path: Path) -> None:
    file = write(tmp_path, "a", result_of("a", [1.0, 2.0]))
    assert [item.name for item in hf_geosharp.read_results(str(file))] == ["a"]
    assert [item.name for item in hf_geosharp.read_results(tmp_path / "a.json")] == ["a"]
    with pytest.raises(UsageError, match="it is one of sharpness, base_loss, adaptive,"):
        hf_geosharp.compare_pretrained(
            ["demo:digits-vit", "demo:digits-vit-twin"], rank_by="euclidean", baselines="adaptive"
        )


def test_a_target_that_is_no_number_is_told_in_words() -> None:
    target: Any = {"a": 1.0, "b": 2.0, "c": None, "d": 3.0}
    with pytest.raises(DataError, match="target is not a number for every model"):
        hf_geosharp.correlate(many(a=[1.0], b=[2.0], c=[3.0], d=[4.0]), target)
