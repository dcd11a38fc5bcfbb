"""Messages: what is warned of points at the line of the user's code from where the package was called."""

from __future__ import annotations

import pytest
import torch

import hf_geosharp
from hf_geosharp.errors import GeosharpWarning
from tests.families import batch_of, build


def test_whatever_a_score_warns_of_points_at_the_line_that_asked_for_it() -> None:
    model = build("bert", torch.bfloat16)
    batches = [{key: value[:rows] for key, value in batch_of("bert").items()} for rows in (4, 2)]
    with pytest.warns(GeosharpWarning) as told:
        hf_geosharp.score(model, batches, steps=2)
    places = {str(w.message)[:20]: w.filename for w in told if issubclass(w.category, GeosharpWarning)}
    assert set(places.values()) == {__file__}
    # From the data, from where the model is borrowed, and from the proof or the search.
    assert len(places) > 1
