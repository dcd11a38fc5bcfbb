"""A score of compiled passes is that of the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from hf_geosharp import score
from hf_geosharp.errors import ModelError
from hf_geosharp.sharpness.compiled import compiled
from tests.sharpness.tiny import gpt2, gpt2_batches


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured and differentiated as by default; their kernels are those of torch: a compiler takes long."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def test_the_score_is_that_of_the_models_own_code(quick: None) -> None:
    model, batches = gpt2(), gpt2_batches(2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options: dict[str, Any] = {"rho": [0.1, 0.05], "steps": 3}
    own, faster = (score(model, batches, compile=how, **options) for how in (False, True))
    assert faster.geodesic_sharpness == pytest.approx(own.geodesic_sharpness, rel=1e-4)
    assert [b.base_loss for b in faster.per_batch] == pytest.approx([b.base_loss for b in own.per_batch], rel=1e-5)
    assert faster.share == pytest.approx(own.share, rel=1e-3)
    assert faster.model["compiled"] is True
    assert "compiled" not in own.model
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_cannot_be_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import Unsupported

    def failing(model: Any) -> Any:
        def run(**inputs: Any) -> Any:
            raise Unsupported("no kernel for this")

        return run

    monkeypatch.setattr(torch, "compile", failing)
    with pytest.raises(ModelError, match=r"cannot be compiled here \(Unsupported: no kernel.*leave out compile"):
        compiled(gpt2())(**gpt2_batches()[0])
    with pytest.raises(ModelError, match="leave out compile"):
        score(gpt2(), gpt2_batches(), compile=True)
