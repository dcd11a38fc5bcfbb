"""Tiny modules, models and batches for the tests of a score."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.views import View

WIDTH, HEAD, CLASSES = 3, 2, 2


class TinyAttention(nn.Module):
    """One attention head and a readout: 35 parameters. Mean squared error, or cross-entropy if ``classify``."""

    def __init__(self, seed: int = 0, *, classify: bool = True) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEAD)
        self.k = nn.Linear(WIDTH, HEAD, bias=False)
        self.v = nn.Linear(WIDTH, HEAD, bias=False)
        self.o = nn.Linear(HEAD, WIDTH, bias=False)
        self.readout = nn.Linear(WIDTH, CLASSES)
        self.classify = classify
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.8)

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        weights = torch.softmax(self.q(x) @ self.k(x).mT / HEAD**0.5, dim=-1)
        y = self.readout(torch.tanh(x + self.o(weights @ self.v(x))).mean(1))
        loss = nn.functional.cross_entropy(y, labels) if self.classify else (y[:, 0] - labels).square().mean()
        return SimpleNamespace(loss=loss, logits=y)


def attention_data(seed: int = 0, n: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return {
        "x": torch.randn(n, 3, WIDTH, generator=generator, dtype=torch.float64),
        "labels": torch.randint(CLASSES, (n,), generator=generator),
    }


def _out(name: str) -> View:
    """A projection into the head, (h, i) as stored."""
    return View.pattern(name, (("n", "h"), ("i",)), {"n": 1, "h": HEAD, "i": WIDTH}, ("n",), ("h",), ("i",))


def attention_map() -> SymmetryMap:
    bias = View.pattern("q.bias", (("n", "h"),), {"n": 1, "h": HEAD}, ("n",), ("h",), ())
    back = View.pattern("o.weight", (("o",), ("n", "h")), {"n": 1, "h": HEAD, "o": WIDTH}, ("n",), ("h",), ("o",))
    return SymmetryMap(
        (
            Pair("qk", "qk", "", Group(HEAD), (_out("q.weight"), bias), (_out("k.weight"),)),
            Pair("vo", "vo", "", Group(HEAD), (_out("v.weight"),), (back,)),
        )
    )


def columns_map(g: str, h: str, copies: int = 1) -> SymmetryMap:
    """Two vectors of ``copies`` entries as that many pairs of numbers."""
    views = [View.pattern(name, (("n",),), {"n": copies}, ("n",), (), ()) for name in (g, h)]
    return SymmetryMap((Pair("gh", "unit", "", Group(1), (views[0],), (views[1],)),))


# ----------------------------------------------------------------------------------------------- models of transformers


def randomise(model: Any, seed: int = 0, scale: float = 0.4) -> Any:
    """Weights, biases and gains that leave nothing degenerate; in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(scale * noise if p.ndim > 1 else p + 0.2 * noise)
    return model.eval()


def bert(seed: int = 0, **changes: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {
        "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8,
        "max_position_embeddings": 12, "num_labels": 3, "attn_implementation": "eager",
    }  # fmt: skip
    return randomise(BertForSequenceClassification(BertConfig(**{**sizes, **changes})), seed)


def gpt2(seed: int = 0, **changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "vocab_size": 20, "n_positions": 12, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 1,
        "eos_token_id": 1, "attn_implementation": "eager",
    }  # fmt: skip
    return randomise(GPT2LMHeadModel(GPT2Config(**{**sizes, **changes})), seed)


def llama(seed: int = 0, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 20, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": False, "attn_implementation": "eager",
    }  # fmt: skip
    return randomise(LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})), seed)


def adapter() -> Any:
    """LoRA of rank 3 on queries and values."""
    from peft import LoraConfig, get_peft_model

    targets = ["query", "value"]
    model = get_peft_model(bert(), LoraConfig(task_type="SEQ_CLS", r=3, target_modules=targets))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.4 * torch.randn(p.shape, generator=generator))
    return model.eval()


def token_losses(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropies of tokens, in the precision of the logits; a language model's own loss is in single precision."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="none")


def bert_batches(count: int = 2, size: int = 6, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(3, 20, (size, 7), generator=generator),
            "attention_mask": torch.ones(size, 7, dtype=torch.long),
            "labels": torch.randint(3, (size,), generator=generator),
        }
        for _ in range(count)
    ]


def gpt2_batches(count: int = 1, size: int = 6, seed: int = 0) -> list[dict[str, Tensor]]:
    """Texts of 2 to 9 tokens, padded; only real tokens have labels."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        ids = torch.randint(3, 20, (size, 9), generator=generator)
        lengths = torch.randint(2, 10, (size, 1), generator=generator)
        mask = (torch.arange(9) < lengths).long()
        out.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return out
