"""Rewritings of the weights that are not divided out: the function stays and the score does not, as is documented."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks import tiny
from hf_geosharp import find_symmetries, score
from hf_geosharp.symmetry.fold import Gain
from hf_geosharp.symmetry.inputs import synthetic
from hf_geosharp.symmetry.parameters import put, wide_copy
from tests.sharpness.tiny import bert, bert_batches


def test_what_all_logits_have_in_common_moves_the_score_and_not_the_loss() -> None:
    model, batch = bert().double(), bert_batches(1)[0]

    def measured() -> float:
        return score(model, [batch], rho=0.3, dtype="float64", reproducibility=False).geodesic_sharpness

    before, value = model(**batch), measured()
    with torch.no_grad():
        model.classifier.weight += torch.linspace(-1, 1, model.config.hidden_size, dtype=torch.float64)
    after = model(**batch)
    assert torch.allclose(after.loss, before.loss, rtol=1e-12, atol=0)
    assert float((after.logits - before.logits).abs().max()) > 0.01
    assert abs(measured() / value - 1) > 0.01


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
