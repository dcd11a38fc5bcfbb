"""The suite of architectures: how much of a type counts as found."""

from __future__ import annotations

import pytest

from benchmarks.architectures import status_of

QK, VO = {"qk": {"GL(8)": 4}}, {"vo": {"GL(8)": 4}}
NAMED = ("layers.0.self_attn.qk: no symmetry of the templates holds",)
STATE = ("layers.0.mamba: multiplies what its linear maps write without a softmax",)


@pytest.mark.parametrize(
    ("attentions", "have", "groups", "unrecognised", "status"),
    [
        (2, {"qk": 2, "vo": 2}, QK | VO, (), "found"),
        (2, {"qk": 1, "vo": 2}, QK | VO, NAMED, "partly"),
        (2, {"qk": 0, "vo": 0}, {}, NAMED, "nothing"),
        (0, {"qk": 0, "vo": 0}, {"mlp": {"GL(1)": 48}}, STATE, "no attention"),
        (0, {"qk": 0, "vo": 0}, {}, NAMED, "nothing"),
        (0, {"qk": 0, "vo": 0}, {"qk_norm": {"GL(1)": 8}} | VO, (), "found"),
        (0, {"qk": 0, "vo": 0}, VO, (), "partly"),
        (0, {"qk": 0, "vo": 0}, QK | VO, NAMED, "partly"),
    ],
)
def test_the_status_says_of_how_much_attention_both_sides_were_found(
    attentions: int, have: dict[str, int], groups: dict[str, dict[str, int]], unrecognised: tuple[str, ...], status: str
) -> None:
    assert status_of(attentions, have, groups, unrecognised) == status
