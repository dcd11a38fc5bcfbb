"""The public score of whole transformers against one that is written out by hand, with another optimiser.

Measured: the maxima of both agree to 3e-4, the point that is reported lies on the sphere to 5e-15 and is horizontal to
1e-14, and limits of small radii are within their next order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp import score
from hf_geosharp.sharpness.result import SharpnessResult
from tests.oracles import whole_models as by_hand
from tests.sharpness.tiny import adapter, bert, bert_batches, gpt2, gpt2_batches, llama, token_losses

Batch = dict[str, Tensor]


def losses(outputs: Any, batch: Batch) -> Tensor:
    """Cross-entropies of samples or tokens, in the precision of the logits."""
    if batch["labels"].ndim == 2:
        return token_losses(outputs, batch)
    return nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="none")


Case = tuple[Callable[[], Any], Batch, Callable[[by_hand.Flat, Any], by_hand.Layout]]
CASES: dict[str, Case] = {
    "bert": (bert, bert_batches(1)[0], by_hand.bert),
    "gpt2": (gpt2, gpt2_batches(1)[0], by_hand.gpt2),
    "llama": (llama, gpt2_batches(1)[0], by_hand.llama),
    "lora": (adapter, bert_batches(1)[0], by_hand.lora),
}


def both(
    name: str, metric: str, loss: Callable[[Any], Tensor] | None = None
) -> tuple[Any, Batch, by_hand.Reference, dict[str, Any]]:
    """Model, batch, reference, and how the same is asked of the package."""
    make, batch, layout = CASES[name]
    model = make().double()
    own = copy.deepcopy(model)
    loss = loss or (lambda outputs: losses(outputs, batch).mean())
    reference = by_hand.Reference(own, batch, loss, layout(by_hand.Flat(own), own.config), metric)
    options = {
        "metric": metric,
        "geodesic": "second",
        "dtype": "float64",
        "params": "lora" if name == "lora" else "all",
    }
    return model, batch, reference, options


@pytest.mark.parametrize(
    ("name", "metric", "rho"),
    [
        ("bert", "inv", 0.1), ("gpt2", "mix", 0.05), ("llama", "inv", 0.1), ("lora", "mix", 0.1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("bert", "mix", 0.1), ("gpt2", "inv", 0.3), ("llama", "mix", 0.1), ("lora", "inv", 0.3))
        ),
    ],
)  # fmt: skip
def test_the_score_is_the_maximum_by_hand(name: str, metric: str, rho: float) -> None:
    model, batch, reference, options = both(name, metric)
    found = score(model, [batch], loss=losses, rho=rho, starts=2, reproducibility=False, **options)
    assert found.base_loss == pytest.approx(reference.base, rel=1e-12)
    # What an adapter sits on stays; elsewhere what is fixed is a direction that is divided out.
    still = sum(map(len, map(torch.flatten, reference.layout.fixed))) if name == "lora" else 0
    assert found.pairs.symmetry_dim + reference.dimension == len(reference.layout.theta) - still
    maximum = reference.maximum(rho)
    # The optimiser stops within 1e-6 of a maximum.
    assert 0.995 * maximum <= found.geodesic_sharpness <= maximum * (1 + 1e-6)


@pytest.mark.parametrize(("metric", "rho"), [("inv", 0.2), ("mix", 0.05)])
@pytest.mark.parametrize("name", CASES)
def test_the_point_of_the_score_lies_on_the_sphere_and_has_the_loss_that_is_reported(
    name: str, metric: str, rho: float
) -> None:
    model, batch, reference, options = both(name, metric)
    seen: list[tuple[float, Tensor]] = []

    def watched(outputs: Any, part: Batch) -> Tensor:
        """The loss, which looks at the weights that it is of."""
        found = losses(outputs, part)
        if len(part["labels"]) == len(batch["labels"]):
            weights = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
            seen.append((float(found.mean()), weights))
        return found

    result: SharpnessResult = score(model, [batch], loss=watched, rho=rho, reproducibility=False, **options)
    reported = result.base_loss + result.geodesic_sharpness
    value, end = min(seen, key=lambda point: abs(point[0] - reported))
    assert value == pytest.approx(reported, rel=1e-14)
    assert float(reference.value(end)) == pytest.approx(reported, rel=1e-14)
    # The base point is the same function in a gauge of its own: the one of these that is nearest.
    same = [weights for loss, weights in seen if abs(loss - result.base_loss) < 1e-12]
    start = min(same, key=lambda weights: float((weights - end).norm()))
    length, tilt, off = reference.held_against(start, end)
    assert off < 1e-13
    assert length == pytest.approx(rho, rel=1e-12)
    assert length <= rho
    assert tilt < 1e-12 * rho


@pytest.mark.parametrize(("name", "metric"), [("bert", "inv"), ("gpt2", "mix")])
def test_at_small_radii_the_score_is_the_slope(name: str, metric: str) -> None:
    model, batch, reference, options = both(name, metric)
    rho = 1e-5
    found = score(model, [batch], loss=losses, rho=rho, reproducibility=False, **options).geodesic_sharpness
    assert found / rho == pytest.approx(reference.slope(), rel=1e-3)


@pytest.mark.parametrize(("metric", "rho"), [("inv", 1e-3), ("mix", 3e-4)])
def test_at_small_radii_around_a_minimum_the_score_is_half_the_curvature(metric: str, rho: float) -> None:
    """Of the divergence from the model's own output; the third order is left, of which ``starts`` takes the sign."""
    make, batch, _ = CASES["bert"]
    own = make().double()(**batch).logits.detach().log_softmax(-1)

    def divergence(outputs: Any) -> Tensor:
        return (own.exp() * (own - outputs.logits.log_softmax(-1))).sum(-1).mean()

    model, batch, reference, options = both("bert", metric, divergence)
    found = score(model, [batch], labels="model", rho=rho, starts=2, steps=40, reproducibility=False, **options)
    assert abs(found.base_loss) < 1e-15
    assert found.geodesic_sharpness / rho**2 == pytest.approx(reference.curvature() / 2, rel=1e-2)


@pytest.mark.parametrize(("name", "metric", "rho"), [("lora", "inv", 1.0), ("bert", "mix", 2.0)])
def test_the_average_is_the_mean_by_hand(name: str, metric: str, rho: float) -> None:
    model, batch, reference, options = both(name, metric)
    mean, error = reference.average(rho, 250)
    # Batches draw for themselves, so equal ones tell the error.
    found = score(model, [batch] * 8, loss=losses, rho=rho, average=True, steps=60, **options)
    assert found.stderr is not None
    assert abs(found.geodesic_sharpness - mean) < 4 * (error**2 + found.stderr**2) ** 0.5
    assert abs(mean) > 5 * error
