"""Loading a model: in full precision, on the device that is asked for, with its card and its processor."""

from __future__ import annotations

import json

import pytest
import torch

from hf_geosharp.errors import GeosharpWarning, UsageError
from tests.tasks.tiny import bert_config, load, make_tokenizer, save


def test_a_bf16_checkpoint_is_scored_in_float32_and_recorded(tmp_path):
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(bert_config()).to(torch.bfloat16)
    loaded = load(save(model, tmp_path / "half", make_tokenizer()))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert loaded.identity["checkpoint_dtype"] == "bfloat16"
    assert loaded.identity["dtype"] == "float32"
    assert load(tmp_path / "half", dtype="float64").model.classifier.weight.dtype == torch.float64


def test_identity_counts_tied_weights_once(mlm_folder):
    loaded = load(mlm_folder)
    assert loaded.identity["parameters"] == sum({p.data_ptr(): p.numel() for p in loaded.model.parameters()}.values())
    assert json.dumps(loaded.identity)


def test_the_card_is_read(bert_folder):
    assert load(bert_folder).card == {}
    (bert_folder / "README.md").write_text("---\ndatasets:\n- glue\n---\n# Model\n")
    assert load(bert_folder).card == {"datasets": ["glue"]}
    (bert_folder / "README.md").write_text("---\na: [\n---\n# Model\n")
    with pytest.warns(GeosharpWarning, match="model card"):
        assert load(bert_folder).card == {}


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"device": "tpu9"}, "tpu9"),
        # torch knows these names: of a backend that it was built without, and of one that computes nothing.
        ({"device": "hpu"}, "on device 'hpu' here"),
        ({"device": "meta"}, "on device 'meta' here"),
    ],
)
def test_wrong_arguments(bert_folder, options, culprit):
    with pytest.raises(UsageError, match=culprit):
        load(bert_folder, **options)


def test_a_model_without_tokenizer_loads_and_says_so(tmp_path):
    from transformers import BertForSequenceClassification

    loaded = load(save(BertForSequenceClassification(bert_config()), tmp_path / "bare"))
    assert loaded.processor is None
    assert loaded.processor_error
