"""The models that costs are measured on, with a batch each: the shipped demos, and random ones of any size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Subject = tuple[nn.Module, Batch]


def demo(name: str, samples: int = 128, count: int = 1, attention: str | None = None) -> tuple[nn.Module, list[Batch]]:
    """A demo with ``count`` batches of its training data, taken from the start again where it has too few."""
    from hf_geosharp import demos
    from hf_geosharp.scoring import load_pretrained
    from hf_geosharp.tasks.prepare import prepare

    loaded = load_pretrained(f"demo:{name}", device="cpu")
    data = str(demos.path(name) / "data")
    prepared = prepare(loaded, data=data, samples=samples * count, batch_size=samples)
    model: Any = prepared.model
    if attention is not None:
        model.set_attn_implementation(attention)
    batches = [dict(batch) for batch in prepared.batches]
    return model, [batches[i % len(batches)] for i in range(count)]


def bert(rows: int, tokens: int, device: str = "cpu", **sizes: Any) -> Subject:
    """A BERT with two classes; without sizes BERT-base."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = BertForSequenceClassification(config).eval()
    ids = torch.randint(5, config.vocab_size, (rows, tokens))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, (rows,))}


def vit(rows: int, device: str = "cpu", **sizes: Any) -> Subject:
    """A ViT with ten classes; without sizes ViT-B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_labels=10, **sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = ViTForImageClassification(config).eval()
    pixels = torch.randn(rows, config.num_channels, config.image_size, config.image_size)
    return model, {"pixel_values": pixels, "labels": torch.randint(0, 10, (rows,))}


def llama(rows: int, tokens: int, device: str = "cpu", **sizes: Any) -> Subject:
    """A Llama as a language model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    ids = torch.randint(5, config.vocab_size, (rows, tokens))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def t5(rows: int, tokens: int, **sizes: Any) -> Subject:
    """A T5, whose number and size of heads do not depend on its width."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=500, decoder_start_token_id=0, **sizes)
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.randint(5, 500, (rows, tokens))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def parameters(model: nn.Module) -> int:
    """How many numbers, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def tokens(batch: Batch) -> int:
    """How many a batch of texts has."""
    return batch["input_ids"].numel()
