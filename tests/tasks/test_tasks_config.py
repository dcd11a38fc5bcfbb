"""config.json: what is no model, what cannot be scored, and the task that a config names."""

from __future__ import annotations

import pytest

from hf_geosharp.errors import ModelError, UnsupportedModelError, UsageError
from tests.tasks.tiny import edit_config, load


def test_a_folder_that_is_not_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path)
    with pytest.raises(ModelError, match="no folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load(tmp_path)
    with pytest.raises(ModelError, match="is a file"):
        load(tmp_path / "config.json")


def test_quantised_checkpoints(bert_folder):
    edit_config(bert_folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match=r"quantised \(gptq\)"):
        load(bert_folder)


def test_adapters(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="Merge the adapter"):
        load(tmp_path)


def test_no_architecture(bert_folder):
    edit_config(bert_folder, architectures=None)
    with pytest.raises(UsageError, match="--task"):
        load(bert_folder)


def test_an_architecture_of_no_task(bert_folder):
    edit_config(bert_folder, architectures=["BertForQuestionAnswering"])
    with pytest.raises(ModelError, match=r"BertForQuestionAnswering.*causal-lm"):
        load(bert_folder)


def test_code_of_the_repository_is_not_run(bert_folder):
    edit_config(
        bert_folder,
        model_type="mine",
        auto_map={"AutoConfig": "mine.Config", "AutoModelForSequenceClassification": "mine.Model"},
        architectures=["Mine"],
    )
    (bert_folder / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load(bert_folder)


def test_an_unknown_model_type(bert_folder):
    edit_config(bert_folder, model_type="mine")
    with pytest.raises(ModelError, match="mine"):
        load(bert_folder)
