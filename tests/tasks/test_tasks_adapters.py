"""An adapter on its base: loaded as that is stored, scored by its name; else a message that says what is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from hf_geosharp import score_pretrained
from hf_geosharp.errors import ModelError, UsageError
from hf_geosharp.scoring import load_pretrained
from tests.tasks.tiny import load, make_tokenizer


@pytest.fixture
def adapter_folder(bert_folder, tmp_path):
    """An adapter on the classifier, whose checkpoint is in half precision; and the model with it."""
    from transformers import AutoModelForSequenceClassification

    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    base = AutoModelForSequenceClassification.from_pretrained(bert_folder, dtype=torch.bfloat16)
    base.save_pretrained(bert_folder)
    config = peft.LoraConfig(
        r=2, target_modules=["query", "value"], task_type="SEQ_CLS", init_lora_weights=False
    )  # fmt: skip
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", adapted


def test_an_adapter_is_loaded_on_its_base_as_that_is_stored(adapter_folder, bert_folder):
    folder, adapted = adapter_folder
    loaded = load(folder, params="lora")
    there = dict(adapted.named_parameters())
    here = dict(loaded.model.named_parameters())
    assert set(here) == set(there)
    assert all(torch.equal(here[name], there[name]) for name in there)
    assert {p.dtype for name, p in here.items() if "lora" not in name and "classifier" not in name} == {torch.bfloat16}
    assert not loaded.model.training
    assert loaded.processor is not None
    assert loaded.task.name == "text-classification"
    expected = {"id": str(folder), "base": str(bert_folder), "class": "BertForSequenceClassification"}
    assert {name: loaded.identity[name] for name in expected} == expected
    assert loaded.identity["dtype"] == "bfloat16"


@pytest.mark.filterwarnings("ignore:the adapter's base stays in bfloat16")
def test_an_adapter_is_scored_by_its_name(adapter_folder, text_csv):
    folder, _ = adapter_folder
    how = {"data": str(text_csv), "device": "cpu", "steps": 3, "samples": 8, "batch_size": 8}
    result = score_pretrained(str(folder), params="lora", **how)
    assert (result.params, result.model["id"], result.model["task"]) == ("lora", str(folder), "text-classification")
    assert set(result.pairs.by_kind) == {"lora GL(2)"}
    assert all("lora" in name or "classifier" in name for name in result.share)
    loaded = load_pretrained(str(folder), params="lora", device="cpu")
    del how["device"]
    assert score_pretrained(loaded, params="lora", **how).geodesic_sharpness == result.geodesic_sharpness


def test_an_adapter_brings_its_tokenizer_along(adapter_folder):
    """A Trainer saves the one that it trained with beside the adapter; without one it is that of the base."""
    folder, _ = adapter_folder
    base = load(folder, params="lora").processor
    own = make_tokenizer()
    own.add_tokens(["filmmaker"])
    own.save_pretrained(folder)
    found = load(folder, params="lora").processor
    assert len(found) == len(base) + 1
    assert found("filmmaker")["input_ids"] == own("filmmaker")["input_ids"] != base("filmmaker")["input_ids"]


def test_an_adapter_brings_its_classifier_along(mlm_folder, tmp_path):
    from transformers import AutoModelForSequenceClassification

    peft = pytest.importorskip("peft")
    base = AutoModelForSequenceClassification.from_pretrained(mlm_folder)
    config = {"r": 1, "target_modules": ["query"], "task_type": "SEQ_CLS"}
    both = peft.LoraConfig(**config, modules_to_save=["pooler", "classifier"])
    peft.get_peft_model(base, both).save_pretrained(tmp_path / "both")
    loaded = load(tmp_path / "both", params="lora")
    saved = dict(loaded.model.named_parameters())["base_model.model.classifier.modules_to_save.default.weight"]
    assert torch.equal(saved, dict(base.named_parameters())["classifier.modules_to_save.default.weight"])
    # What neither of the two has would be random numbers.
    base = AutoModelForSequenceClassification.from_pretrained(mlm_folder)
    peft.get_peft_model(base, peft.LoraConfig(**config)).save_pretrained(tmp_path / "without")
    with pytest.raises(ModelError, match=r"lacks 2 of the weights .* bert\.pooler\.dense\.bias"):
        load(tmp_path / "without", params="lora")


def test_what_is_no_adapter_or_none_that_fits(bert_folder, adapter_folder, tmp_path):
    folder, _ = adapter_folder
    with pytest.raises(UsageError, match="is not an adapter: the folder has no adapter_config"):
        load(bert_folder, params="lora")
    with pytest.raises(UsageError, match="stays as it is stored"):
        load(folder, params="lora", dtype="float64")
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    for base, error, message in (
        (None, ModelError, "does not name the model"),
        (str(tmp_path / "nowhere"), ModelError, "There is no folder"),
    ):
        path.write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(error, match=message):
            load(folder, params="lora")
    path.write_text(json.dumps(config | {"target_modules": ["nothing"]}))
    with pytest.raises(ModelError, match="does not fit its base"):
        load(folder, params="lora")
