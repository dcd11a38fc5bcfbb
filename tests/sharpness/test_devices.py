"""A model over several devices: pieces of one device belong together, and no piece mixes two.

There is one device here, so which device a tensor is on is made up; where things lie in truth does not change.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_geosharp import score
from hf_geosharp.errors import UnsupportedModelError
from hf_geosharp.sharpness import chart, loose
from tests.sharpness.tiny import bert, bert_batches


@pytest.mark.parametrize("metric", ["inv", "euclidean"])
def test_parts_of_two_devices_give_the_score_of_one(monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    def quick(model: Any) -> Any:
        return score(model, bert_batches(1), metric=metric, steps=3, dtype="float64")

    whole = quick(bert())
    model = bert()
    # By layers, as device_map does it: the first layer and the embeddings here, the rest there.
    there = {
        p.untyped_storage().data_ptr() for n, p in model.double().named_parameters() if "layer.1" in n or "cla" in n
    }
    seen: list[list[set[bool]]] = []

    class Watched(chart.Chart):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            names = [b.parameters for b in self._stacks]
            names += [[i.leaf.name for i in getattr(item, "items", (item,))] for item in self._loose]
            leaves = args[0].leaves
            seen.append([{leaves[n].tensor.untyped_storage().data_ptr() in there for n in part} for part in names])

    monkeypatch.setattr("hf_geosharp.sharpness.runner.Chart", Watched)
    for module in (chart, loose):
        monkeypatch.setattr(module, "device_of", lambda t: t.untyped_storage().data_ptr() in there)
    found = quick(model)
    assert found.geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=1e-9)
    assert found.share == pytest.approx(whole.share, rel=1e-6, abs=1e-12)
    for parts in seen:
        assert all(len(devices) == 1 for devices in parts)
        assert {True, False} == set().union(*parts)


@pytest.mark.parametrize(
    "hook", [SimpleNamespace(offload=True), SimpleNamespace(hooks=[SimpleNamespace(offload=True)])]
)
def test_a_module_that_is_offloaded_is_refused_by_name(hook: Any) -> None:
    model = bert()
    model.bert.encoder.layer[1]._hf_hook = hook
    with pytest.raises(UnsupportedModelError, match=r"bert.encoder.layer.1 is offloaded.*no gradients"):
        score(model, bert_batches(1), steps=1)


def test_hooks_without_offload_are_welcome() -> None:
    from accelerate import dispatch_model

    plain = score(bert(), bert_batches(1), steps=2).geodesic_sharpness
    model = dispatch_model(bert(), {"bert": "cpu", "dropout": "cpu", "classifier": "cpu"}, main_device="cpu")
    assert score(model, bert_batches(1), steps=2).geodesic_sharpness == plain


def test_meta_parameters_are_refused_by_name() -> None:
    model = bert()
    model.classifier.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"classifier.weight is on the meta device"):
        score(model, bert_batches(1), steps=1)


def test_no_home_is_where_a_tensor_is() -> None:
    assert torch.ones(2).to(None, torch.float64, copy=True).device == torch.device("cpu")
