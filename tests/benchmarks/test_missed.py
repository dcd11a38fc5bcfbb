"""The count of what is missed: null spaces of derivatives are those that matrices have, and a type agrees."""

from __future__ import annotations

import pytest
import torch

from benchmarks.missed import examine, null_space, page


def test_a_null_space_has_its_dimension_and_its_place() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    rows[:, 5] = rows[:, 4]  # adding to one what is taken off the other is not felt
    rows[:10] *= 1e-6  # sums of outputs may be small
    found = null_space({"a": rows[:, :4], "b": rows[:, 4:]})
    assert found.dimension == 1
    assert found.where == {"b": 1.0}
    assert found.nothing < 1e-12 < 1e-3 < found.something


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bert", "gpt_neox"])
def test_a_type_of_which_nothing_is_missed_agrees(model_type: str) -> None:
    """With norms whose output is the residual, and with two biases that are added to one stream."""
    record = examine(model_type)
    assert record["status"] == "all found"
    assert record["not_felt"] == record["found"] > 0
    assert "1 of them ran: 1 agree" in " ".join(page([record]).split())


def test_what_cannot_be_built_says_why() -> None:
    record = examine("no such type")
    assert record["status"] == "does not run so small"
    assert "no such type" in record["reason"]
