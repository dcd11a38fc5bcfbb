"""Messages: what is warned of points at the line of the user's code from where the package was called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hf_geosharp
from hf_geosharp.errors import GeosharpWarning
from tests.families import batch_of, build
from tests.trainer.tiny import trainer


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
