"""Weights: all of them present and of the right shape; else a message that names what is wrong."""

from __future__ import annotations

import json
import warnings

import pytest

from hf_geosharp.errors import GeosharpWarning, ModelError
from tests.tasks.tiny import bert_config, edit_config, load, make_tokenizer, save


def test_a_folder_without_weights(bert_folder):
    (bert_folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights.*safetensors"):
        load(bert_folder)


def test_a_broken_weight_file(bert_folder):
    (bert_folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="does not load"):
        load(bert_folder)


def test_a_missing_head_is_an_error_unless_allowed(mlm_folder):
    with pytest.raises(ModelError, match=r"classifier\.weight.*allow_missing"):
        load(mlm_folder, task="text-classification")
    with pytest.warns(GeosharpWarning, match=r"classifier\.weight"):
        loaded = load(mlm_folder, task="text-classification", allow_missing=True)
    assert "classifier.weight" in loaded.identity["missing"]


def test_layers_beyond_the_config_are_told_of(tmp_path):
    """They are left out: a config that was edited, or one of another model."""
    from transformers import BertForSequenceClassification

    save(BertForSequenceClassification(bert_config(num_hidden_layers=2)), tmp_path, make_tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeosharpWarning)
        load(tmp_path)
    edit_config(tmp_path, num_hidden_layers=1)
    with pytest.warns(GeosharpWarning, match=r"16 weights that Bert.* has no place for: bert\.encoder\.layer\.1\."):
        load(tmp_path)


def test_weights_that_do_not_fit_the_config(bert_folder):
    edit_config(bert_folder, id2label={str(i): str(i) for i in range(5)}, label2id={str(i): i for i in range(5)})
    with pytest.raises(ModelError, match=r"shapes.*classifier\.bias"):
        load(bert_folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_pointers_of_git_lfs_are_named(bert_folder, name):
    """What `git clone` leaves in place of large files where Git LFS is not installed."""
    (bert_folder / "model.safetensors").unlink()
    (bert_folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    if "of" in name:
        index = {"metadata": {}, "weight_map": {"classifier.weight": name}}
        (bert_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"pointers .*\({name}\).*git lfs pull"):
        load(bert_folder)
