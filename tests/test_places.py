"""Shares by layer and module."""

from __future__ import annotations

import pytest

from hf_geosharp.places import OTHERS, share_table


def test_weights_and_biases_of_a_module_count_together() -> None:
    table = share_table(
        {"h.0.attn.qk": 0.5, "h.0.up.weight": 0.2, "h.0.up.bias": 0.1, "h.1.up.weight": 0.15, "wte": 0.05}
    )
    assert table is not None
    assert (table.layers, table.modules) == (("h.0", "h.1"), ("attn.qk", "up"))
    assert table.values == ((0.5, None), (pytest.approx(0.3), 0.15))
    assert table.outside == pytest.approx(0.05)


def test_layers_are_in_the_order_of_their_numbers_and_what_is_numbered_inside_counts_together() -> None:
    share = {f"m.layers.{layer}.experts.{e}.w.weight": 0.01 for layer in range(12) for e in range(3)}
    table = share_table(share)
    assert table is not None
    assert table.layers == tuple(f"m.layers.{layer}" for layer in range(12))
    assert table.modules == ("experts.*.w",)
    assert table.values[0] == pytest.approx([0.03] * 12)


def test_the_smallest_modules_are_one_row() -> None:
    share = {f"h.0.m{i}.weight": 2.0**-i for i in range(1, 20)}
    table = share_table(share)
    assert table is not None
    assert len(table.modules) == 8
    assert table.modules[-1] == OTHERS
    assert sum(value for row in table.values for value in row if value) + table.outside == pytest.approx(
        sum(share.values())
    )


@pytest.mark.parametrize("share", [{}, {"weight": 0.5, "bias": 0.5}, {"0": 1.0}])
def test_names_without_numbers_are_no_table(share: dict[str, float]) -> None:
    assert share_table(share) is None
