"""In evaluation mode a model runs the code that it has gradients in, and comes back in its own modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import tiny
from hf_geosharp import score
from hf_geosharp.evaluating import evaluating
from hf_geosharp.symmetry.find import find_symmetries
from hf_geosharp.symmetry.verify import verify


class Encoder(nn.Module):
    """Torch's own encoder, whose outputs at padding count: the fused path makes them 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 24)
        layer = nn.TransformerEncoderLayer(24, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(24, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0).mean(1)
        return {"logits": self.head(x), "loss": functional.cross_entropy(self.head(x), labels)}


def encoder() -> Encoder:
    model = Encoder().double()
    tiny.randomise(model, 0)
    return model.eval()


def padded() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    mask = torch.ones(6, 9, dtype=torch.long)
    for i in range(6):
        mask[i, 3 + i :] = 0
    ids = torch.randint(1, 30, (6, 9), generator=draw)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 0, 1, 2])}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"metric": "adaptive"},
    {"average": True, "metric": "adaptive"},
    {"metric": "adaptive", "ascent": "apgd"},
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_losses_with_and_without_gradients_are_of_one_code(options: dict[str, Any]) -> None:
    model, batch = encoder(), padded()
    with torch.no_grad():
        fused = float(model(**batch)["loss"])
    own = float(model(**batch)["loss"].detach())
    assert abs(fused - own) > 1e-3, "the example shows nothing"
    result = score(model, [batch], rho=0.01, steps=4, **options)
    assert result.base_loss == pytest.approx(own, rel=1e-12)
    assert result.geodesic_sharpness < 0.1 * own
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_proof_is_of_the_same_code() -> None:
    model, batch = encoder(), padded()
    found = find_symmetries(model, batch, cached=False)
    assert {p.kind for p in found.pairs} == {"qk", "vo", "mlp"}
    proof = verify(model, found, [batch], each=True)
    assert {c.status for c in proof.claims} == {"holds"}
    assert proof.deviation is not None
    assert proof.deviation < 1e-9


def test_modes_and_the_fused_path_come_back() -> None:
    model = encoder().train()
    model.head.eval()
    before = [m.training for m in model.modules()]

    def stop() -> None:
        with evaluating(model):
            assert not any(m.training for m in model.modules())
            assert not torch.backends.mha.get_fastpath_enabled()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert [m.training for m in model.modules()] == before
    assert torch.backends.mha.get_fastpath_enabled()
