"""Mixtures of experts that are multiplied in groups are seen as what they are: one matrix after the other."""

from __future__ import annotations

import pytest
import torch

from benchmarks import tiny
from hf_geosharp import score
from hf_geosharp.symmetry.find import find_symmetries
from hf_geosharp.symmetry.grouped import GROUPED, written_out
from hf_geosharp.symmetry.inputs import call, synthetic
from hf_geosharp.symmetry.trials.probe import Widened
from hf_geosharp.symmetry.verify import verify

pytestmark = pytest.mark.skipif(not GROUPED, reason="this torch has no grouped products")


@pytest.mark.parametrize("transposed", [False, True])
def test_written_out_is_the_same_product(transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(11, 8, generator=generator)
    matrices = torch.randn(4, 16, 8, generator=generator).transpose(1, 2)
    if not transposed:
        matrices = matrices.contiguous()
    ends = torch.tensor([3, 3, 9, 11], dtype=torch.int32)
    expected = GROUPED[0](rows, matrices, offs=ends)
    torch.testing.assert_close(written_out(GROUPED[0], (rows, matrices), {"offs": ends}), expected)
    with Widened():
        wide = GROUPED[0](rows.double(), matrices.double(), offs=ends)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), expected)


def test_other_functions_and_forms_are_left_alone() -> None:
    x, w, ends = torch.ones(2, 3), torch.ones(1, 3, 4), torch.tensor([2], dtype=torch.int32)
    assert written_out(torch.mm, (x, w[0]), {}) is None
    assert written_out(GROUPED[0], (x[None], w), {"offs": None}) is None
    assert written_out(GROUPED[0], (x, w), {"offs": ends, "bias": torch.ones(4)}) is None


def test_rows_after_the_last_group_are_zero() -> None:
    x, w, ends = torch.ones(3, 2), torch.ones(1, 2, 2), torch.tensor([1], dtype=torch.int32)
    assert written_out(GROUPED[0], (x, w), {"offs": ends}).tolist() == [[2, 2], [0, 0], [0, 0]]  # type: ignore[union-attr]


@pytest.mark.parametrize("type_", ["mixtral", "qwen3_moe"])
def test_hidden_units_of_experts_are_found(type_: str) -> None:
    model = tiny.build(type_, dtype=torch.float32)
    experts = [p for n, p in model.named_parameters() if n.endswith("experts.gate_up_proj")]
    if not experts:
        pytest.skip("the experts of this transformers are modules of their own")
    batch = synthetic(model)
    found = find_symmetries(model, batch)
    units = [p for p in found.pairs if p.kind == "mlp"]
    assert len(units) == sum(len(e) for e in experts)
    assert all(p.group.dim == 1 for p in units)
    proof = verify(model, found, [batch], each=True)
    assert {c.status for c in proof.claims} == {"holds"}


@pytest.mark.slow
def test_a_model_of_experts_is_scored_in_double_precision() -> None:
    """torch's own product of groups knows single and half precision only."""
    model = tiny.build("mixtral", dtype=torch.float32, _class="MixtralForCausalLM")
    batch = dict(synthetic(model))
    batch["labels"] = batch["input_ids"]
    narrow, wide = (score(model, [batch], steps=3, dtype=dtype) for dtype in ("float32", "float64"))
    assert wide.geodesic_sharpness == pytest.approx(narrow.geodesic_sharpness, rel=1e-3)
    assert call(model.double(), batch).logits.dtype == torch.float64
