"""Builders of tiny models, tokenizers and rows; and what loads them."""

from __future__ import annotations

import json

import numpy as np

WORDS = [
    "good",
    "bad",
    "film",
    "a",
    "the",
    "very",
    "not",
    "plot",
    "cast",
    "is",
    "and",
    "so",
    "it",
    "was",
    "dull",
    "fun",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<eos>"]
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def make_tokenizer(kind="bert"):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "gpt":  # no padding token, no special tokens around a text
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<eos>")
    if kind == "t5":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <eos>", pair="$A $B <eos>", special_tokens=[("<eos>", 5)]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<eos>", pad_token="[PAD]"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def bert_config(**changes):
    from transformers import BertConfig

    return BertConfig(**{"vocab_size": 22, "max_position_embeddings": 16, **SIZES, **changes})


def save(model, folder, processor=None):
    model.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    return folder


def load(folder, **options):
    from hf_geosharp.tasks.models import load_model

    return load_model(folder, **{"device": "cpu", **options})


def edit_config(folder, **changes):
    """Changes config.json in place; a value of None removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def sentence(rng, shortest=1, longest=9):
    return " ".join(rng.choice(WORDS, size=rng.integers(shortest, longest)))


def make_images(mode="L", count=12, classes=3):
    import datasets
    from PIL import Image

    rng = np.random.default_rng(0)
    shape = (8, 8) if mode == "L" else (8, 8, 3)
    images = [Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(count)]
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=[str(i) for i in range(classes)])
    )
    return datasets.Dataset.from_dict(
        {"image": images, "label": [i % classes for i in range(count)]}, features=features
    )
