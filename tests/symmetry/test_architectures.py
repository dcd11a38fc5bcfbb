"""Families of transformers against a table worked out by hand, and finding against models it has not been tried on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import tiny
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.inputs import synthetic
from hf_geosharp.symmetry.verify import Verified, verify
from tests.symmetry.table import TABLE, Row, unknown

FAST = {
    "bert", "deberta-v2 own", "roformer", "modernbert", "xlnet", "bart", "t5", "whisper", "gpt2", "gpt_neox", "codegen",
    "falcon 40b", "llama", "cohere normed", "cohere2", "phi normed", "qwen3", "hunyuan_v1_dense", "nanochat", "gpt_oss",
    "bitnet", "deepseek_v3", "dinov3_vit", "swin", "sam_vision_model", "gemma3n_text",
}  # fmt: skip
"""Varied families that are run every time; the others are slow together."""

LENGTHS = (19, 23)
"""Tokens to find with and to prove on: more than twice a head."""


def _rows() -> Iterator[object]:
    for row in TABLE:
        marks = () if str(row) in FAST else (pytest.mark.slow,)
        yield pytest.param(row, marks=marks, id=str(row).replace(" ", "-"))


def examined(row: Row) -> tuple[SymmetryMap, Verified]:
    if reason := unknown(row):
        pytest.skip(reason)
    model = tiny.build(row.type, **row.attributes)
    try:
        batches = [synthetic(model, seed=s, tokens=n) for s, n in enumerate(LENGTHS)]
    except ValueError:  # some of its code is for single precision only
        model.float()
        batches = [synthetic(model, seed=s, tokens=n) for s, n in enumerate(LENGTHS)]
    found = find_symmetries(model, batches[0])
    return found, verify(model, found, batches)


MISSED = {"olmo clipped", "qwen3_next", "bailing_hybrid", "mamba", "jamba", "bamba", "granitemoehybrid", "reformer"}
"""Rows in which something that looks like attention is not claimed as a whole: clipped, or without a softmax."""


def dimensions(symmetries: SymmetryMap) -> tuple[int, int]:
    kinds = [("qk", "qk_norm"), ("vo", "vo_norm")]
    return tuple(sum(s.dimension for s in (*symmetries.pairs, *symmetries.scales) if s.kind in k) for k in kinds)  # type: ignore[return-value]


@pytest.mark.parametrize("row", [*_rows()])
def test_dimensions_are_those_worked_out_by_hand_and_every_claim_is_proved(row: Row) -> None:
    found, proof = examined(row)
    assert proof.map.dropped == found.dropped
    assert dimensions(proof.map) == (row.qk, row.vo)
    assert sum(f.dimension for f in proof.map.folds if f.kind == "qk_mean") == row.means
    assert bool(found.limited) is (row.type == "dbrx")  # which cuts off queries, keys and values
    assert bool(found.missed) is (str(row) in MISSED)
    assert set(found.missed) <= set(found.unrecognised)


def test_the_readme_says_how_many_there_are() -> None:
    text = " ".join((Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8").split())
    assert f"In all {len(TABLE)} families and variants whose groups were worked out by hand" in text
