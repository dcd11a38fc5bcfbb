"""One fingerprint for what computes the same, another for what may not, none where code is foreign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_geosharp.symmetry.fingerprint import fingerprint, of_batches
from tests.families import batch_of, build


def test_the_same_weights_have_the_same_and_it_is_read_only() -> None:
    model = build("bert")
    own = fingerprint(model)
    assert own is not None
    assert own == fingerprint(model) == fingerprint(build("bert"))
    model.config._name_or_path = "elsewhere"  # type: ignore[union-attr]
    assert fingerprint(model) == own


def last_bit(model: Any) -> None:
    weight = next(iter(model.parameters())).data.view(torch.int64)
    weight.view(-1)[-1] ^= 1


def buffer(model: Any) -> None:
    next(iter(model.buffers())).add_(1)


def setting(model: Any) -> None:
    model.config.hidden_act = "relu"


def narrower(model: Any) -> None:
    model.float()


def implementation(model: Any) -> None:
    model.config._attn_implementation = "eager" if model.config._attn_implementation != "eager" else "sdpa"


def other_module(model: Any) -> None:
    model.bert.encoder.layer[0].output.LayerNorm.__class__ = type("Other", (nn.LayerNorm,), {"__module__": "torch.nn"})


def attribute(model: Any) -> None:
    model.bert.encoder.layer[0].chunk_size_feed_forward = 3


def no_longer_one(model: Any) -> None:
    """Equal weights, but no longer one parameter."""
    model.extra.weight = nn.Parameter(model.bert.embeddings.word_embeddings.weight.detach().clone())


@pytest.mark.parametrize(
    "change", [last_bit, buffer, setting, narrower, implementation, other_module, attribute, no_longer_one]
)
def test_whatever_could_make_a_difference_gives_another(change: Callable[[Any], None]) -> None:
    model: Any = build("bert")
    model.extra = nn.Linear(2, 2, bias=False)
    model.extra.weight = model.bert.embeddings.word_embeddings.weight
    before = fingerprint(model)
    with torch.no_grad():
        change(model)
    assert fingerprint(model) not in (None, before)


def hook(model: Any) -> None:
    model.bert.embeddings.register_forward_hook(lambda *_: None)


def own_forward(model: Any) -> None:
    model.bert.embeddings.forward = lambda *_a, **_k: None


def own_class(model: Any) -> None:
    model.bert.embeddings.__class__ = type(
        "Mine", (type(model.bert.embeddings),), {"__module__": "transformers_modules"}
    )


def elsewhere(model: Any) -> None:
    model.classifier.to("meta")


def test_a_method_that_was_put_into_a_librarys_class_gives_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build("bert")
    before = fingerprint(model)
    for factor in (1.0, 2.0):
        monkeypatch.setattr(type(model.bert.pooler), "forward", lambda self, x, factor=factor: factor * x[:, 0])
        assert fingerprint(model) not in (None, before)
        before = fingerprint(model)


def test_a_function_that_was_put_into_a_librarys_module_gives_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    before = fingerprint(model)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    assert fingerprint(model) not in (None, before)


def test_the_function_that_computes_attention_by_a_name_of_its_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    digests = []
    for factor in (1.0, 2.0):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "mine", lambda *args, factor=factor, **kwargs: factor)
        model: Any = build("bert")
        model.config._attn_implementation_internal = "mine"
        digests.append(fingerprint(model))
    assert digests[0] != digests[1]


@pytest.mark.parametrize("change", [hook, own_forward, own_class, elsewhere])
def test_foreign_code_and_weights_elsewhere_have_none(change: Callable[[Any], None]) -> None:
    model = build("bert")
    change(model)
    assert fingerprint(model) is None


def test_a_model_without_a_configuration_has_none() -> None:
    assert fingerprint(nn.Linear(2, 2)) is None


def test_inputs_by_their_values_names_and_order() -> None:
    batch = batch_of("bert")
    first = next(k for k, v in batch.items() if isinstance(v, torch.Tensor))
    other = {**batch, first: batch[first] + 1}
    digests = [of_batches(b) for b in ([batch], [other], [batch, other], [other, batch], [{"x": batch[first]}], [])]
    assert len(set(digests)) == len(digests)
    assert of_batches([dict(batch)]) == digests[0]
