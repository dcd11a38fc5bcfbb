"""Scores of a LoRA adapter alone: what it sits on stays as it is stored, in whatever precision."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp import score
from hf_geosharp.errors import GeosharpWarning, ModelError, UnsupportedModelError, UsageError
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.objective import own_loss
from hf_geosharp.sharpness.selection import movable
from tests.families import identical, state
from tests.sharpness.tiny import bert, bert_batches

peft = pytest.importorskip("peft")

SHORT: dict[str, Any] = {"steps": 5, "reproducibility": False}
HALF = "ignore:half-precision weights are scored"


def adapted(dtype: torch.dtype = torch.float64, *, seed: int = 0, **config: Any) -> Any:
    """A BERT of two layers with an adapter of rank 2 on queries and values, moved off its initial zeros."""
    model = bert(seed).to(dtype)
    config = {"r": 2, "target_modules": ["query", "value"], **config}
    model = peft.get_peft_model(model, peft.LoraConfig(**config), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.4 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def test_an_adapter_that_does_nothing_is_not_called_all_parameters() -> None:
    model = adapted()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.zero_()
    with pytest.warns(GeosharpWarning, match="no attention symmetry") as told:
        found = score(model, bert_batches(1), params="lora", steps=2, reproducibility=False)
    (text,) = {str(w.message) for w in told if "no attention symmetry" in str(w.message)}
    assert "what may move" in text
    assert "all parameters" not in text
    assert found.metric == "adaptive"


def lora_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if "lora_" in name}


def only_adapter(model: Any) -> Any:
    """A copy whose other parameters are buffers, which no score knows as weights."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and not p.requires_grad:
                del module._parameters[name]
                module.register_buffer(name, p.detach().clone())
    return twin


@pytest.mark.parametrize("metric", ["inv", "mix", "adaptive"])
@pytest.mark.slow
def test_an_adapter_scores_as_a_model_that_has_no_other_weights(metric: str) -> None:
    model, batches = adapted(), bert_batches(2)
    before = state(model)
    flags = [p.requires_grad for p in model.parameters()]
    result = score(model, batches, params="lora", metric=metric, **SHORT)
    alone = score(only_adapter(model), batches, metric=metric, **SHORT)
    assert result.params == "lora"
    assert result.metric == metric
    assert result.geodesic_sharpness == pytest.approx(alone.geodesic_sharpness, rel=1e-9)
    assert result.geodesic_sharpness > 0
    if metric != "adaptive":
        assert result.pairs.by_kind == {"lora GL(2)": 4}
        assert result.pairs.dropped == []
    assert identical(model, before)
    assert flags == [p.requires_grad for p in model.parameters()]


def test_it_is_invariant_under_the_adapters_own_group() -> None:
    model, batches = adapted(), bert_batches(1)
    result = score(model, batches, params="lora", **SHORT)
    plain = result.geodesic_sharpness
    assert result.ascent == "auto"
    assert not any("rounds" in warning for warning in result.warnings)  # the base is not in half precision
    a = torch.tensor([[2.0, 1.0], [0.0, 0.5]], dtype=torch.float64)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "lora_A") and "default" in module.lora_A:
                first, second = module.lora_A["default"].weight, module.lora_B["default"].weight
                first.copy_(a @ first)
                second.copy_(second @ torch.linalg.inv(a))
    assert score(model, batches, params="lora", **SHORT).geodesic_sharpness == pytest.approx(plain, rel=1e-6)


@pytest.mark.filterwarnings(HALF)
@pytest.mark.parametrize("narrow", ["base", "both"])
def test_a_base_in_half_precision_stays_so_while_it_is_scored(narrow: str) -> None:
    model = adapted(torch.bfloat16)
    if narrow == "base":
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data = p.data.float()
    before, seen = state(model), []

    def loss(outputs: Any, batch: Any) -> Tensor:
        seen.append({n: p.dtype for n, p in model.named_parameters()})
        return own_loss(outputs, batch)

    result = score(model, bert_batches(2), params="lora", loss=loss, **SHORT)
    assert result.geodesic_sharpness > 0
    assert result.pairs.by_kind == {"lora GL(2)": 4}
    names = lora_names(model)
    for dtypes in seen:
        assert all(dtype == (torch.float32 if n in names else torch.bfloat16) for n, dtype in dtypes.items())
    assert identical(model, before)
    assert any("bfloat16" in warning for warning in result.warnings)
    assert result.ascent == "secant"  # whose steps rounding does not make rough


def test_the_state_of_a_score_is_that_of_the_adapter() -> None:
    model = adapted(torch.float32)
    names = lora_names(model)
    with borrow(model, None, movable(model, "lora")) as borrowed:
        assert set(borrowed.leaves) == set(borrowed.originals) == names
        assert {n for n, p in model.named_parameters() if p.requires_grad} == names
    result = score(model, bert_batches(1), params="lora", symmetries="paper", **SHORT)
    assert set(result.share) <= names


class Quantised(nn.Module):
    """A linear map with whole numbers of eight bits and a scale for each row, made wide where it is used."""

    def __init__(self, linear: nn.Linear, *, as_buffer: bool = True) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        whole = (linear.weight.detach() / scale).round().to(torch.int8)
        if as_buffer:
            self.register_buffer("weight", whole)
        else:
            self.weight = nn.Parameter(whole, requires_grad=False)
        self.register_buffer("scale", scale.float())
        self.register_buffer("bias", linear.bias.detach().clone().float())

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() * self.scale
        return nn.functional.linear(x.float(), weight, self.bias).to(x.dtype)


def quantised(*, as_buffer: bool = True) -> Any:
    """The same model with a quantised base, as a quantiser of transformers leaves it."""
    model = adapted(torch.float32)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and "lora" not in name and name not in ("default", "classifier"):
                setattr(module, name, Quantised(child, as_buffer=as_buffer))
    model.base_model.model.is_quantized = True
    model.base_model.model.hf_quantizer = SimpleNamespace()
    return model


@pytest.mark.parametrize("as_buffer", [True, False])
def test_a_quantised_base_is_scored_where_only_the_adapter_moves(as_buffer: bool) -> None:
    model = quantised(as_buffer=as_buffer)
    before = state(model)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    with pytest.raises(UnsupportedModelError, match="quantised"):
        score(model, bert_batches(1), **SHORT)
    result = score(model, bert_batches(2), params="lora", **SHORT)
    assert result.geodesic_sharpness > 0
    assert result.pairs.by_kind == {"lora GL(2)": 4}
    assert identical(model, before)
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())


def test_modules_that_are_trained_beside_the_matrices_belong_to_the_adapter() -> None:
    names = movable(adapted(modules_to_save=["classifier"]), "lora")
    assert names is not None
    assert {name.split(".")[-1] for name in names if "classifier" in name} == {"weight", "bias"}
    assert not any("original_module" in name or "base_layer" in name for name in names)


@pytest.mark.filterwarnings(HALF)
def test_modules_that_are_trained_beside_the_matrices_compute_wide_on_a_narrow_base() -> None:
    model, batches = adapted(torch.bfloat16, modules_to_save=["classifier"]), bert_batches(1)
    before = state(model)
    result = score(model, batches, params="lora", **SHORT)
    assert result.geodesic_sharpness > 0
    assert any("classifier.modules_to_save" in name for name, share in result.share.items() if share > 0)
    assert identical(model, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_embedding_beside_the_matrices_needs_a_wide_base() -> None:
    with pytest.raises(UsageError, match="is an embedding that is trained beside the adapter, on a base in"):
        score(adapted(torch.bfloat16, modules_to_save=["word_embeddings"]), bert_batches(1), params="lora", **SHORT)


@pytest.mark.filterwarnings(HALF)
@pytest.mark.parametrize(("bias", "where"), [("lora_only", "base_layer: its bias"), ("all", ": its bias is trained")])
def test_biases_trained_beside_the_matrices_need_a_wide_base(bias: str, where: str) -> None:
    """No layer computes with a weight in half precision and a bias in single precision."""
    model = adapted(torch.bfloat16, bias=bias)
    if not any(name.endswith("bias") for name in movable(model, "lora") or ()):
        pytest.skip("this PEFT does not count them to the adapter")
    before = state(model)
    with pytest.raises(UsageError, match=f"{where}.*stays in torch.bfloat16.*load the base in float32"):
        score(model, bert_batches(1), params="lora", **SHORT)
    assert identical(model, before)
    assert score(adapted(bias=bias), bert_batches(1), params="lora", **SHORT).geodesic_sharpness > 0


def test_of_several_adapters_the_active_one_moves() -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=1, target_modules=["query"]))
    assert movable(model, "lora") == {n for n in lora_names(model) if ".default." in n}
    model.set_adapter("other")
    assert movable(model, "lora") == {n for n in lora_names(model) if ".other." in n}


def test_everything_may_move_by_default() -> None:
    assert movable(adapted(), "all") is None


def test_what_has_no_adapter_to_score() -> None:
    with pytest.raises(UsageError, match="this BertForSequenceClassification has no adapter: load it with PEFT"):
        score(bert(), bert_batches(1), params="lora", **SHORT)
    merged = adapted()
    merged.merge_adapter()
    with pytest.raises(UsageError, match="merged into the weights: call unmerge_adapter"):
        score(merged, bert_batches(1), params="lora", **SHORT)
    with adapted().disable_adapter():
        pass
    off = adapted()
    off.base_model.disable_adapter_layers()
    with pytest.raises(UsageError, match="no adapter of the model is active"):
        score(off, bert_batches(1), params="lora", **SHORT)


def test_nan_in_the_base_is_refused_too() -> None:
    model = adapted()
    with torch.no_grad():
        next(iter(model.parameters())).fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN or infinite entries"):
        score(model, bert_batches(1), params="lora", **SHORT)


def test_a_journal_belongs_to_what_may_move_and_to_what_it_sits_on(tmp_path: Path) -> None:
    model, batches = adapted(), bert_batches(1)
    score(model, batches, params="lora", output=tmp_path, **SHORT)
    with pytest.raises(UsageError, match="params lora there, all here"):
        score(model, batches, output=tmp_path, **SHORT)
    with torch.no_grad():
        model.base_model.model.classifier.bias.add_(1.0)
    with pytest.raises(UsageError, match="weights"):
        score(model, batches, params="lora", output=tmp_path, **SHORT)


def test_parts_and_labels_of_the_model_work_on_an_adapter() -> None:
    result = score(adapted(), bert_batches(1), params="lora", per="layer", labels="model", **SHORT)
    assert [part.layer for part in result.per] == [0, 1]
    assert all(0 < part.value <= 1.05 * result.geodesic_sharpness for part in result.per)


def test_micro_batches_of_an_adapted_language_model_are_weighted_by_its_own_tokens() -> None:
    """By the tokens that are predicted: the wrapper's class alone does not say that labels are shifted."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)).double().eval()
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.4)
    ids = torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for row, length in enumerate((2, 8, 3, 5)):
        labels[row, length:] = -100
    batches = [{"input_ids": ids, "labels": labels}]
    whole, one = (score(model, batches, micro_batch=size, **SHORT) for size in (None, 1))
    assert one.base_loss == pytest.approx(whole.base_loss, rel=1e-6)  # its loss is in float32
    assert one.geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=1e-3)


def two_adapters() -> Any:
    """a on queries, b on values; a is active."""
    model = adapted(target_modules=["query"])
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["value"]))
    model.double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B.second" in name:
                p.normal_(std=0.4, generator=torch.Generator().manual_seed(5))
    return model.eval()


def test_the_score_is_that_of_the_adapter_that_is_active_whatever_was_found_before() -> None:
    """Which adapter takes part is no weight, no setting and no name: finds on disk have to know it all the same."""
    model, batches = two_adapters(), bert_batches(1)
    kinds = []
    for active, roles in (("default", {"query"}), ("second", {"value"}), (["default", "second"], {"query", "value"})):
        model.base_model.set_adapter(active)
        found = score(model, batches, params="lora", **SHORT)
        assert found.metric == "inv"
        assert {place.split(".")[-2] for place in found.share} == roles
        kinds.append(found.pairs.by_kind)
    assert kinds == [{"lora GL(2)": 2}, {"lora GL(2)": 2}, {"lora GL(2)": 4}]


def test_a_journal_is_of_the_adapter_that_was_active(tmp_path: Path) -> None:
    model, batches = two_adapters(), bert_batches(1)
    score(model, batches, output=tmp_path, **SHORT)
    model.set_adapter("second")
    with pytest.raises(UsageError, match=r"belongs to another run: .*adapters"):
        score(model, batches, output=tmp_path, **SHORT)
