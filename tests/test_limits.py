"""Rewritings of the weights that are not divided out: the function stays and the score does not, as is documented."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageClassification, T5Config, T5ForConditionalGeneration

from benchmarks import tiny
from hf_geosharp import demos, find_symmetries, score
from hf_geosharp.symmetry.fold import Gain
from hf_geosharp.symmetry.inputs import synthetic
from hf_geosharp.symmetry.parameters import put, wide_copy
from tests.sharpness.tiny import bert, bert_batches, randomise
from tests.versions import TRANSFORMERS

ROOT = Path(__file__).resolve().parents[1]
PAGE = " ".join((ROOT / "docs" / "what-the-number-means.md").read_text(encoding="utf-8").split())


def _written(model: nn.Module) -> None:
    """Adds the same to all coordinates that a map writes to the stream, as large as its weights vary."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if re.search(r"(o_proj|fc2|output\.dense)\.(weight|bias)$", name):
                p += torch.randn(p.shape[1:], generator=generator, dtype=torch.float64).to(p) * p.std()


def _read(model: nn.Module) -> None:
    """Adds the same, over the gain of the layer norm that it reads, to each row of a map, as large as that varies."""
    generator = torch.Generator().manual_seed(0)
    readers = {"before": r"(query|key|value|[qkv]_proj)$", "after": r"(fc1|intermediate\.dense)$", "": r"classifier$"}
    modules = dict(model.named_modules())
    with torch.no_grad():
        for path, norm in modules.items():
            found = re.fullmatch(r"(.*)layernorm_?(before|after|)", path)
            if found is None:
                continue
            scope, which = found.groups()
            for name, linear in modules.items():
                if name.startswith(scope if which else "") and re.search(readers[which], name):
                    weight = linear.weight
                    added = torch.randn(len(weight), 1, generator=generator).to(weight) * weight.std() / norm.weight
                    weight += added
                    linear.bias -= added @ norm.bias


@pytest.mark.slow
@pytest.mark.parametrize("rewrite", [_written, _read])
def test_means_that_layer_norms_take_out_move_the_score_as_far_as_it_is_said(
    rewrite: Callable[[nn.Module], None],
) -> None:
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
    rewrite(model)
    assert torch.allclose(model(**batch).logits, logits, rtol=0, atol=1e-4)
    (inv, mix), after = before, scores()
    assert (
        f"`inv` of digits-vit goes from {inv:.3f} to {after[0]:.3f} and `mix` from {mix:.3f} to {after[1]:.3f}" in PAGE
    )


@pytest.mark.parametrize("kind", ["relative biases", "embeddings", "biases of a norm before the residual"])
def test_constants_that_cancel_move_the_score_and_not_the_function(kind: str) -> None:
    batch = bert_batches(1)[0]
    if kind == "relative biases":
        sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 6, "num_layers": 1, "num_heads": 2}
        model = randomise(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))).double()
        batch = {"input_ids": batch["input_ids"], "labels": batch["input_ids"][:, :4].clone()}
    else:
        model = bert().double()

    def measured() -> float:
        return score(model, [batch], rho=0.3, dtype="float64", reproducibility=False).geodesic_sharpness

    before, value = model(**batch).logits.detach(), measured()
    with torch.no_grad():
        if kind == "relative biases":
            for name, p in model.named_parameters():
                if "relative_attention_bias" in name:
                    p += 5
        elif kind == "biases of a norm before the residual":
            layer = model.bert.encoder.layer[0].attention
            by = torch.linspace(-1, 1, model.config.hidden_size, dtype=torch.float64)
            model.bert.embeddings.LayerNorm.bias += by
            for linear in (layer.self.query, layer.self.key, layer.self.value):
                linear.bias -= linear.weight @ by
            layer.output.dense.bias -= by
        else:
            by = torch.linspace(-1, 1, model.config.hidden_size, dtype=torch.float64)
            model.bert.embeddings.word_embeddings.weight += by
            model.bert.embeddings.position_embeddings.weight -= by
    # Softmaxes of T5 were single precision before.
    rounding = 1e-6 if kind == "relative biases" and TRANSFORMERS < (5, 0) else 1e-12
    assert torch.allclose(model(**batch).logits, before, rtol=0, atol=rounding)
    assert abs(measured() / value - 1) > 0.01


def test_a_vector_added_to_all_rows_of_a_router_moves_the_score_and_not_the_function() -> None:
    model = tiny.build("mixtral", dtype=torch.float32).eval()  # grouped products are of single precision
    batch = synthetic(model, tokens=9)

    def measured() -> float:
        return score(
            model, [batch], loss=lambda out, _: (out.last_hidden_state**2).mean((1, 2)), rho=0.3
        ).geodesic_sharpness  # fmt: skip

    before, value = model(**batch).last_hidden_state.detach(), measured()
    routers = [p for n, p in model.named_parameters() if n.endswith("gate.weight")]
    assert len(routers) == 2
    with torch.no_grad():
        for p in routers:
            p += 1.0
    assert torch.allclose(model(**batch).last_hidden_state, before, rtol=0, atol=1e-5)
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
