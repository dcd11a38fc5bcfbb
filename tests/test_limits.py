"""Rewritings of a whole residual stream: the function stays and the score does not, as the documents say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageClassification

from benchmarks import tiny
from hf_geosharp import demos, find_symmetries, score
from hf_geosharp.symmetry.fold import Gain
from hf_geosharp.symmetry.inputs import synthetic
from hf_geosharp.symmetry.parameters import put, wide_copy
from tests.sharpness.tiny import bert, bert_batches

ROOT = Path(__file__).resolve().parents[1]
PAGE = " ".join((ROOT / "docs" / "what-the-number-means.md").read_text(encoding="utf-8").split())


def _shift(model: nn.Module) -> None:
    """Adds the same to all coordinates that a map writes to the stream, as large as its weights vary."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if re.search(r"(o_proj|fc2|output\.dense)\.(weight|bias)$", name):
                p += torch.randn(p.shape[1:], generator=generator, dtype=torch.float64).to(p) * p.std()


@pytest.mark.slow
def test_a_shift_that_layer_norms_take_out_moves_the_score_as_far_as_it_is_said() -> None:
    folder = demos.path("digits-vit")
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    data = Dataset.from_parquet(str(folder / "data" / "train.parquet"))

    def scores() -> list[float]:
        return [
            score(
                model, data, processor=AutoImageProcessor.from_pretrained(folder), samples=256, metric=metric
            ).geodesic_sharpness
            for metric in ("inv", "mix")
        ]  # fmt: skip

    batch = synthetic(model)
    logits, before = model(**batch).logits.detach(), scores()
    _shift(model)
    assert torch.allclose(model(**batch).logits, logits, rtol=0, atol=1e-4)
    (inv, mix), after = before, scores()
    assert (
        f"`inv` of digits-vit goes from {inv:.3f} to {after[0]:.3f} and `mix` from {mix:.3f} to {after[1]:.3f}" in PAGE
    )


def test_turning_the_stream_of_a_model_with_rms_norms_moves_the_score_and_not_the_function() -> None:
    """With the norms' gains in what reads them any rotation of the stream passes through (arXiv 2401.15024)."""
    model = tiny.build("llama").double().eval()
    batch = synthetic(model, tokens=9)
    symmetries = find_symmetries(model, batch)
    weights = wide_copy(model, symmetries.parameters)
    for fold in symmetries.folds:
        if isinstance(fold, Gain):
            fold.canonicalise(weights)
    put(model, weights)

    def outputs() -> torch.Tensor:
        return model(**batch).last_hidden_state.detach()

    def measured() -> float:
        return score(
            model, [batch], loss=lambda out, _: (out.last_hidden_state**2).mean((1, 2)), rho=0.3, dtype="float64"
        ).geodesic_sharpness

    final = model.get_parameter("norm.weight")
    final.data.fill_(1)  # no linear map of this model reads it
    before, value = outputs(), measured()
    width = final.numel()
    q = torch.linalg.qr(
        torch.randn(width, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ).Q  # fmt: skip
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                # What writes to the stream is turned, what reads it turns back.
                p.copy_(q @ p if re.search(r"(o_proj|down_proj)\.weight$", name) else p @ q.T)
    assert torch.allclose(outputs(), before @ q.T, rtol=0, atol=1e-5)
    assert abs(measured() / value - 1) > 0.01


def test_the_average_case_and_not_the_worst_depends_on_words_that_no_sample_has() -> None:
    def scores(words: int, **options: object) -> float:
        model = bert(vocab_size=words)
        # The words that the samples have are the same, in a row of the same size.
        model.bert.embeddings.word_embeddings.weight.data[:20] = bert().bert.embeddings.word_embeddings.weight.data
        for name, p in bert().named_parameters():
            if "word_embeddings" not in name:
                model.get_parameter(name).data.copy_(p.data)
        options = {"metric": "adaptive", "reproducibility": False, "dtype": "float64", **options}
        return score(model.double(), bert_batches(1), **options).geodesic_sharpness  # type: ignore[arg-type]

    worst = [scores(words, rho=0.1, steps=5) for words in (20, 4000)]
    assert worst[0] == pytest.approx(worst[1], rel=1e-6)
    average = [scores(words, rho=3.0, steps=40, average=True) for words in (20, 4000)]
    assert average[0] > 2 * average[1] > 0
