"""Nine tiny families of transformers as data: how to build one, what to feed it, and which symmetries it has.

The symmetries were worked out by hand from each architecture's equations; nothing here asks the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

LAYERS = 2
VOCABULARY = 50
WIDTH = 32
SAMPLES = 6
LABELS = 3

Batch = dict[str, Tensor]


def _text(seed: int, *, tokens: int = 11, padding: int = 0) -> Batch:
    """Token ids without the special ones, the last row padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (SAMPLES, tokens), generator=generator)
    mask = torch.ones_like(ids)
    ids[-1, -3:], mask[-1, -3:] = padding, 0
    return {"input_ids": ids, "attention_mask": mask}


def _classes(seed: int) -> Tensor:
    return torch.randint(0, LABELS, (SAMPLES,), generator=torch.Generator().manual_seed(seed + 1))


def text_classification(seed: int) -> Batch:
    return {**_text(seed, padding=1), "labels": _classes(seed)}


def image_classification(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(SAMPLES, 3, 12, 12, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": _classes(seed)}


def causal_lm(seed: int) -> Batch:
    batch = _text(seed)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def seq2seq(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed + 1)
    return {**_text(seed), "labels": torch.randint(3, VOCABULARY, (SAMPLES, 7), generator=generator)}


@dataclass(frozen=True)
class Family:
    """One architecture with a head to score.

    Attributes:
        attentions: attention modules, each with one query/key and one value/output pair.
        heads, head_dim: key heads of each, and their dimension.
        rotary: query/key keeps one complex number for each rotary frequency, instead of GL(head_dim).
        key_bias, value_bias: both drop out of the function (no rotary embedding; an output bias to fold into).
        gains: end of the names of the modules of the norms that only linear maps read -> how many there are.
        casts: something in the stock forward pass runs in float32 in a float64 model.
        last: how many outputs read the last layer norm, and share no weights; None where norms take out no mean.
        constants: dimensions of what is added that nothing sees, or that something else can hold.
        units: (group, copies) of the hidden units of each MLP that scale: gated ones by any number, behind a ReLU by
            positive ones.
    """

    name: str
    config: Callable[[], Any]
    model: str
    batch: Callable[[int], Batch]
    attentions: int
    heads: int
    head_dim: int
    rotary: bool
    key_bias: bool
    value_bias: bool
    gains: Mapping[str, int]
    casts: bool
    units: tuple[tuple[str, int], ...] = ()
    last: int | None = None
    constants: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def qk_group(self) -> str:
        return "GL(1,C)" if self.rotary else f"GL({self.head_dim})"

    @property
    def qk_copies(self) -> int:
        return self.heads * self.head_dim // 2 if self.rotary else self.heads

    @property
    def qk_dimension(self) -> int:
        """Real dimension of the group of one attention module's queries and keys."""
        return self.heads * self.head_dim if self.rotary else self.heads * self.head_dim**2

    @property
    def vo_dimension(self) -> int:
        return self.heads * self.head_dim**2

    @property
    def means(self) -> int:
        """Of what reads each layer norm, queries, keys, values and hidden units, and of what is written to a stream."""
        if self.last is None:
            return 0
        read, written = 3 * WIDTH + 40, (WIDTH + 1) + (40 + 1)
        return LAYERS * (read + written) + self.last

    def make(self, config: Any = None) -> nn.Module:
        return getattr(transformers, self.model)(self.config() if config is None else config).eval()  # type: ignore[no-any-return]


_COMMON = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}


def _bert() -> Any:
    return transformers.BertConfig(**_COMMON, num_labels=LABELS)


def _roberta() -> Any:
    return transformers.RobertaConfig(**{**_COMMON, "max_position_embeddings": 34}, num_labels=LABELS)


def _distilbert() -> Any:
    return transformers.DistilBertConfig(
        dim=WIDTH, n_layers=LAYERS, n_heads=4, hidden_dim=40, vocab_size=VOCABULARY, max_position_embeddings=32,
        num_labels=LABELS,
    )  # fmt: skip


def _vit() -> Any:
    return transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=40, image_size=12,
        patch_size=4, num_labels=LABELS,
    )  # fmt: skip


def _gpt2() -> Any:
    return transformers.GPT2Config(
        n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_inner=40, n_positions=32, vocab_size=VOCABULARY,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def _llama() -> Any:
    return transformers.LlamaConfig(**_GROUPED)


def _mistral() -> Any:
    return transformers.MistralConfig(**_GROUPED, sliding_window=6)


def _qwen2() -> Any:
    return transformers.Qwen2Config(**_GROUPED)


def _t5() -> Any:
    return transformers.T5Config(
        d_model=WIDTH, d_kv=6, num_heads=4, num_layers=LAYERS, d_ff=40, vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    )  # fmt: skip


def _added(rows: int, parameters: int = 1, norms: int = 0) -> int:
    """Of so many rows of parameters that are added to one stream, and of norms whose output is the residual.

    Each row has a mean. Of the parameters all but one can be held by others, but for that; of norms all of the bias.
    """
    return rows + (parameters - 1) * (WIDTH - 1) + norms * WIDTH


_ROTARY = {"input_layernorm": LAYERS, "post_attention_layernorm": LAYERS, "model.norm": 1}

FAMILIES: tuple[Family, ...] = (
    Family("bert", _bert, "BertForSequenceClassification", text_classification, LAYERS, 4, 8,
           rotary=False, key_bias=True, value_bias=True, gains={"1.output.LayerNorm": 1}, casts=False, last=WIDTH,
           constants=_added(VOCABULARY + 32 + 2, 3, 2 * LAYERS)),
    Family("roberta", _roberta, "RobertaForSequenceClassification", text_classification, LAYERS, 4, 8,
           rotary=False, key_bias=True, value_bias=True, gains={"1.output.LayerNorm": 1}, casts=False, last=WIDTH,
           constants=_added(VOCABULARY + 34 + 2, 3, 2 * LAYERS)),
    Family("distilbert", _distilbert, "DistilBertForSequenceClassification", text_classification, LAYERS, 4, 8,
           rotary=False, key_bias=True, value_bias=True, gains={"1.output_layer_norm": 1}, casts=False,
           units=(("GL(1)+", WIDTH),), last=WIDTH,  # of the classifier
           constants=_added(VOCABULARY + 32, 2, 2 * LAYERS)),
    Family("vit", _vit, "ViTForImageClassification", image_classification, LAYERS, 4, 8,
           rotary=False, key_bias=True, value_bias=True,
           gains={"layernorm_before": LAYERS, "layernorm_after": LAYERS, "vit.layernorm": 1}, casts=False, last=LABELS,
           constants=_added(1 + 10 + (3 * 4 * 4 + 1), 3)),  # token, positions, inputs of a patch
    Family("gpt2", _gpt2, "GPT2LMHeadModel", causal_lm, LAYERS, 4, 8,
           rotary=False, key_bias=True, value_bias=True, gains={"ln_1": LAYERS, "ln_2": LAYERS}, casts=True, last=0,
           constants=_added(32)),  # the output layer has the words
    Family("llama", _llama, "LlamaForCausalLM", causal_lm, LAYERS, 2, 8,
           rotary=True, key_bias=False, value_bias=False, gains=_ROTARY, casts=True,
           units=LAYERS * (("GL(1)", 40),)),
    Family("mistral", _mistral, "MistralForCausalLM", causal_lm, LAYERS, 2, 8,
           rotary=True, key_bias=False, value_bias=False, gains=_ROTARY, casts=True,
           units=LAYERS * (("GL(1)", 40),)),
    Family("qwen2", _qwen2, "Qwen2ForCausalLM", causal_lm, LAYERS, 2, 8,
           rotary=True, key_bias=False, value_bias=False, gains=_ROTARY, casts=True,
           units=LAYERS * (("GL(1)", 40),)),
    Family("t5", _t5, "T5ForConditionalGeneration", seq2seq, 3 * LAYERS, 4, 6,
           rotary=False, key_bias=False, value_bias=False,
           gains={"layer.0.layer_norm": 2 * LAYERS, "layer.1.layer_norm": 2 * LAYERS, "layer.2.layer_norm": LAYERS,
                  "encoder.final_layer_norm": 1},
           casts=True, units=2 * LAYERS * (("GL(1)+", 40),), constants=_added(2 * 4)),  # one for each head
)  # fmt: skip

BY_NAME = {f.name: f for f in FAMILIES}

each_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


def randomise(model: nn.Module, seed: int) -> None:
    """Every parameter random: attention not flat, norm weights not one, biases not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if p.ndim > 1:
                p.copy_(noise / p.shape[-1] ** 0.5)
            else:
                p.copy_((1.0 if float(p.mean()) > 0.5 else 0.0) + 0.3 * noise)


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A model of the family in eval mode, every parameter random; the same function in every dtype, to rounding."""
    model = BY_NAME[name].make().to(dtype)
    randomise(model, seed)
    return model


def batch_of(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
    """A batch with labels, in the model's dtype."""
    batch = BY_NAME[name].batch(seed)
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def identical(model: nn.Module, before: Mapping[str, Tensor]) -> bool:
    """Whether a model has these parameters and buffers, bit for bit."""
    now = state(model)
    return now.keys() == before.keys() and all(torch.equal(now[n], t) for n, t in before.items())
