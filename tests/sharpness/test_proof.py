"""What a score says of the symmetries that it uses, and of those that it does without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp import GeosharpWarning, SharpnessResult, find_symmetries, inspect, score
from tests.symmetry.handmade import Norm, Projected, Residual, attend, inputs

MISSED = "recognised only in part or not at all in"
NO_ATTENTION = "no attention symmetry was found"


def squares(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.square().mean((1, 2))


def quick(model: nn.Module, **options: Any) -> SharpnessResult:
    settings: dict[str, Any] = {"loss": squares, "rho": 0.05, "steps": 4, "reproducibility": False, **options}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = score(model, [inputs()], **settings)
    assert result.warnings == [str(w.message) for w in told if issubclass(w.category, GeosharpWarning)]
    return result


def bent(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(torch.tanh(q), k, v)


def altogether_bent(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(torch.tanh(q), k, torch.tanh(v))


class Weighed(Residual):
    """Its output depends on the weights of one layer's queries by itself, which a copy of that layer does not show."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.parts[0].q.weight.square().mean()


class Normed(nn.Module):
    """A norm whose gain and bias fold, before a bent attention without a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = Norm(bias=True), Projected(altogether_bent)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.norm(x))  # type: ignore[no-any-return]


def test_a_claim_that_is_refuted_while_it_is_found_is_told_by_the_score() -> None:
    result = quick(Weighed(Projected(), Projected()))
    (text,) = result.pairs.dropped
    assert text.startswith("parts.0.qk: outputs move by")
    assert f"symmetry dropped: {text}" in result.warnings


def test_a_claim_that_was_refuted_is_known_from_the_disk_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Weighed(Projected(), Projected(bent))
    monkeypatch.setenv("HF_GEOSHARP_CACHE", str(tmp_path))
    monkeypatch.setattr("hf_geosharp.symmetry.cache.key", lambda *_: "0")
    first = find_symmetries(model, inputs())
    assert [*tmp_path.iterdir()]
    assert find_symmetries(model, inputs()) == first
    assert len(first.dropped) == len(first.missed) == 1


@pytest.mark.parametrize(("cores", "places"), [(1, "1 place"), (3, "3 places")])
def test_attention_that_is_not_recognised_is_told_once(cores: int, places: str) -> None:
    result = quick(Residual(Projected(), *(Projected(bent) for _ in range(cores))))
    (text,) = result.warnings
    assert f"{MISSED} {places} (parts.1.qk: " in text
    assert "hf-geosharp inspect" in text


def test_symmetries_that_end_on_larger_inputs_are_told_by_scores_and_inspections() -> None:
    def clamped(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v.clamp(-99, 99))

    model = Residual(Projected(clamped))
    (text,) = quick(model).warnings
    assert text.startswith("2 of the symmetries hold only while activations are not much larger")
    (seen,) = inspect(model, inputs()).warnings
    # Of another example, outputs move by another amount.
    assert seen.partition(" move by ")[0] == text.partition(" move by ")[0]
    assert quick(model, symmetries="paper").warnings[0].startswith("1 of the symmetries holds only")


@pytest.mark.parametrize(("model", "options"), [(Projected(), {}), (Projected(bent), {"metric": "adaptive"})])
def test_where_nothing_is_missed_nothing_is_told(model: nn.Module, options: dict[str, Any]) -> None:
    assert quick(Residual(model), **options).warnings == []


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_what_folds_is_folded_where_there_is_no_pair(metric: str) -> None:
    def model() -> Residual:
        return Residual(Normed(), Normed())

    found = find_symmetries(model(), inputs())
    assert not found.pairs
    assert {f.kind for f in found.folds} == {"norm_gain"}
    moved = model()
    found.apply(moved, found.random_element(moved, seed=1, condition=100.0))
    stored, other = quick(model(), metric=metric), quick(moved, metric=metric)
    assert other.geodesic_sharpness == pytest.approx(stored.geodesic_sharpness, rel=1e-9)
    assert stored.metric == metric
    assert stored.pairs.folded == {"norm_gain": 2}
    (text,) = stored.warnings
    assert text.startswith(f"{NO_ATTENTION} in this model (parts.0.attention.qk: ")
    assert "apart from what is folded (2 norm_gain)" in text


def test_a_score_that_folds_nothing_depends_on_how_the_gains_are_written() -> None:
    """The control of the test above."""
    model, moved = (Residual(Normed()) for _ in range(2))
    found = find_symmetries(model, inputs())
    found.apply(moved, found.random_element(moved, seed=1, condition=100.0))
    values = [quick(m, metric="adaptive").geodesic_sharpness for m in (model, moved)]
    assert values[1] != pytest.approx(values[0], rel=1e-3)
