"""Tiny models and data files; and no network."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile

import numpy as np
import pytest
import torch

from tests.tasks.tiny import SIZES, bert_config, make_tokenizer, save, sentence

# Read when the libraries are first imported, which fixtures and tests do.
_CACHE = tempfile.mkdtemp(prefix="geosharp-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_CACHE", os.path.join(_CACHE, "datasets"))
os.environ.setdefault("HF_HUB_CACHE", os.path.join(_CACHE, "hub"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fails every connection, whatever was imported before the environment was set."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def refuse(self, address):
        raise AssertionError(f"a test went to the network: {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def bert_folder(tmp_path):
    """A text classifier with the classes neg and pos."""
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    config = bert_config(id2label={0: "NEG", 1: "POS"}, label2id={"NEG": 0, "POS": 1})
    return save(BertForSequenceClassification(config), tmp_path / "bert", make_tokenizer())


@pytest.fixture
def gpt_folder(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=22, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=5, eos_token_id=5)
    return save(GPT2LMHeadModel(config), tmp_path / "gpt", make_tokenizer("gpt"))


@pytest.fixture
def mlm_folder(tmp_path):
    from transformers import BertForMaskedLM

    torch.manual_seed(0)
    return save(BertForMaskedLM(bert_config()), tmp_path / "mlm", make_tokenizer())


@pytest.fixture
def t5_folder(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=22, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0, eos_token_id=5
    )
    return save(T5ForConditionalGeneration(config), tmp_path / "t5", make_tokenizer("t5"))


@pytest.fixture
def vit_folder(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    config = ViTConfig(image_size=8, patch_size=4, num_channels=1, id2label={i: str(i) for i in range(3)}, **SIZES)
    processor = ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.5])
    return save(ViTForImageClassification(config), tmp_path / "vit", processor)


@pytest.fixture
def text_csv(tmp_path):
    """40 rows of text and label (neg, pos)."""
    rng = np.random.default_rng(0)
    lines = ["text,label"] + [f"{sentence(rng)},{('neg', 'pos')[i % 2]}" for i in range(40)]
    path = tmp_path / "texts.csv"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def text_file(tmp_path):
    """40 lines of text and some empty ones."""
    rng = np.random.default_rng(1)
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(sentence(rng, 2) if i % 5 else "" for i in range(50)))
    return path
