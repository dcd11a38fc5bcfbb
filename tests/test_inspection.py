"""What an inspection says of models whose symmetries are known, and of input that is wrong."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_geosharp
from benchmarks import tiny
from hf_geosharp import demos, inspection
from hf_geosharp.errors import (
    DataError,
    GeosharpWarning,
    HubError,
    ModelError,
    UnsupportedModelError,
    UsageError,
)
from hf_geosharp.inspection import Inspection, inspect, inspect_pretrained
from hf_geosharp.site_report import Slice
from hf_geosharp.symmetry import cache
from hf_geosharp.symmetry.groups import Group
from tests.families import BY_NAME, Family, batch_of, build, each_family, identical, state
from tests.tasks.tiny import bert_config, edit_config, make_tokenizer, save

KEYS = {
    "schema", "model", "preset", "inputs", "deviation", "control", "sites", "totals", "unrecognised", "dropped",
    "health", "versions", "warnings",
}  # fmt: skip
SITE_KEYS = {
    "kind", "module", "name", "group", "copies", "dim", "total_dim", "parameters", "slices", "deviation", "control",
    "status",
}  # fmt: skip
SLICE_KEYS = {"parameter", "factor", "index", "layout", "start", "axes"}
TOTAL_KEYS = {"parameters", "symmetry_dim", "effective_parameters", "by_kind"}
HEAD_KEYS = {
    "site", "module", "kind", "head", "dim", "rank", "condition_g", "condition_h", "balance", "singular_values",
    "flags",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _found_anew(finds_anew: None) -> None:
    """And proved anew."""


@pytest.fixture(scope="module")
def demo() -> Inspection:
    return inspect_pretrained("demo:digits-vit")


def test_the_public_names() -> None:
    assert hf_geosharp.inspect is inspect
    assert hf_geosharp.inspect_pretrained is inspect_pretrained
    assert hf_geosharp.Inspection is Inspection


def test_the_json_has_these_keys_and_no_others(demo: Inspection) -> None:
    data = json.loads(demo.to_json())
    assert data["schema"] == 1
    assert set(data) == KEYS
    assert all(set(site) == SITE_KEYS for site in data["sites"])
    assert all(set(part) == SLICE_KEYS for site in data["sites"] for part in site["slices"])
    assert set(data["totals"]) == TOTAL_KEYS
    assert all(set(head) == HEAD_KEYS for head in data["health"])
    assert next(iter(data)) == "schema"


def test_the_json_reads_back(demo: Inspection) -> None:
    assert Inspection.from_dict(json.loads(demo.to_json())) == demo
    with pytest.raises(DataError, match="schema 9"):
        Inspection.from_dict({"schema": 9})
    with pytest.raises(DataError, match="not an inspection"):
        Inspection.from_dict({"schema": 1, "sites": []})
    with pytest.raises(DataError, match="surprise"):
        Inspection.from_dict({**demo.to_dict(), "surprise": 1})


@each_family
def test_every_family_has_the_symmetries_worked_out_by_hand(family: Family) -> None:
    model = build(family.name)
    before = state(model)
    modes = [m.training for m in model.train().modules()]
    result = inspect(model, batch_of(family.name))
    assert identical(model, before)
    assert [m.training for m in model.modules()] == modes
    totals = result.totals
    assert totals.by_kind["qk"] == family.attentions * family.qk_dimension
    assert totals.by_kind["vo"] == family.attentions * family.vo_dimension
    assert totals.symmetry_dim == sum(totals.by_kind.values()) == sum(s.total_dim for s in result.sites)
    assert totals.parameters == sum(p.numel() for p in model.parameters())
    assert totals.effective_parameters == totals.parameters - totals.symmetry_dim
    names = dict(model.named_parameters())
    for site in result.sites:
        assert site.status == "holds"
        assert site.deviation is not None
        assert site.control is not None
        assert site.deviation < 1e-3 * site.control
        assert site.module in dict(model.named_modules())
        assert set(site.parameters) <= set(names)
        assert {s.parameter for s in site.slices} <= set(site.parameters)
    pairs = [s for s in result.sites if s.kind in ("qk", "vo")]
    assert {s.group for s in pairs if s.kind == "qk"} == {family.qk_group}
    assert {(s.group, s.copies) for s in pairs if s.kind == "vo"} == {(f"GL({family.head_dim})", family.heads)}
    assert len(result.health) == 2 * family.attentions * family.heads
    assert not result.dropped
    assert not result.warnings


def test_the_kinds_of_folds_and_their_groups() -> None:
    sites = {s.kind: s for s in inspect(build("vit"), batch_of("vit"), health=False).sites}
    assert (sites["key_bias"].group, sites["key_bias"].copies, sites["key_bias"].dim) == ("shift(8)", 4, 8)
    assert (sites["value_bias"].group, sites["value_bias"].total_dim) == ("shift(8)", 32)
    # A layer norm's bias folds with its gain: two numbers an entry.
    assert (sites["norm_gain"].group, sites["norm_gain"].total_dim) == ("affine(32)", 64)
    rms = {s.kind: s for s in inspect(build("llama"), batch_of("llama"), health=False).sites}
    assert (rms["norm_gain"].group, rms["norm_gain"].total_dim) == ("scale(32)", 32)


def _taken(model: nn.Module, part: Slice) -> Tensor:
    """What a slice names, by brute force over the indices of its axes."""
    parameter = model.get_parameter(part.parameter)
    mask = torch.zeros(parameter.shape, dtype=torch.bool)
    grid = torch.cartesian_prod(*[torch.arange(a.size) for a in part.axes]).view(-1, len(part.axes))
    at = torch.tensor(part.start).repeat(len(grid), 1)
    for column, axis in zip(grid.T, part.axes, strict=True):
        at[:, axis.dimension] += column * axis.step
    mask[tuple(at.T)] = True
    return mask


def test_slices_say_which_part_of_a_fused_parameter() -> None:
    model = build("gpt2")
    result = inspect(model, batch_of("gpt2"), health=False)
    fused = "transformer.h.0.attn.c_attn.weight"
    covered = torch.zeros(model.get_parameter(fused).shape, dtype=torch.long)
    for site in (s for s in result.sites if s.module == "transformer.h.0.attn" and s.kind in ("qk", "vo")):
        for part in (p for p in site.slices if p.parameter == fused):
            mask = _taken(model, part)
            # The text is what indexes a tensor in Python.
            by_text = torch.zeros_like(mask)
            exec(f"by_text{part.index} = True", {"by_text": by_text})
            assert torch.equal(mask, by_text)
            covered += mask
    assert torch.equal(covered, torch.ones_like(covered))
    whole = next(s for s in result.sites if s.kind == "norm_gain").slices[0]
    assert whole.index == ""


def test_sites_stand_in_the_order_of_the_modules(demo: Inspection) -> None:
    modules = [s.module for s in demo.sites]
    assert modules[0] == "vit.embeddings"
    assert modules == sorted(modules, key=modules.index)
    assert modules[-1] == "vit.layernorm"


def test_without_proof_nothing_is_said_to_hold() -> None:
    result = inspect(build("bert"), batch_of("bert"), verify=False, health=False)
    assert {s.status for s in result.sites} == {"unverified"}
    assert {(s.deviation, s.control) for s in result.sites} == {(None, None)}
    assert (result.deviation, result.control) == (None, None)
    assert result.totals.symmetry_dim > 0
    assert result.health == []


def test_a_claim_that_fails_is_shown_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotary head is claimed to have the full group."""
    honest = inspection.find_symmetries

    def lying(model: Any, inputs: Any, **options: Any) -> Any:
        from dataclasses import replace

        found = honest(model, inputs, **options)
        wrong = []
        for pair in found.pairs:
            if pair.kind == "qk" and "layers.0" in pair.module:
                views = [tuple(_unrotated(v) for v in side) for side in (pair.g, pair.h)]
                pair = replace(pair, group=Group(8), g=views[0], h=views[1])
            wrong.append(pair)
        return replace(found, pairs=tuple(wrong))

    def _unrotated(view: Any) -> Any:
        axes = [a for a in view.axes if a.name not in ("f", "c")]
        whole = type(view.axes[0])("h", 8, *next((a.dimension, 1) for a in view.axes if a.name == "f"))
        return type(view)(view.parameter, (*axes, whole), view.start, ("n",), ("h",), view.rows)

    monkeypatch.setattr(inspection, "find_symmetries", lying)
    result = inspect(build("llama"), batch_of("llama"))
    (failed,) = [s for s in result.sites if s.status == "failed"]
    assert (failed.kind, failed.group, failed.module) == ("qk", "GL(8)", "model.layers.0.self_attn")
    assert any(text.startswith(failed.name) for text in result.dropped)
    assert result.totals.by_kind["qk"] == BY_NAME["llama"].qk_dimension
    assert not [h for h in result.health if h.site == failed.name]
    json.dumps(result.to_dict(), allow_nan=False)


def test_what_reaches_no_output_is_dead_and_not_counted() -> None:
    model = build("bert")
    for layer in range(2):
        model.get_parameter(f"bert.encoder.layer.{layer}.attention.output.dense.weight").data.zero_()
    result = inspect(model, batch_of("bert"))
    assert {s.status for s in result.sites if s.kind in ("qk", "vo")} == {"dead"}
    assert not {"qk", "vo"} & set(result.totals.by_kind)
    assert {h.flags for h in result.health if h.kind == "vo"} == {("dead",)}
    assert {h.flags for h in result.health if h.kind == "qk"} == {()}


def test_half_precision_is_proved_in_double_precision() -> None:
    model = build("vit", torch.bfloat16)
    before = state(model)
    result = inspect(model)
    assert identical(model, before)
    assert result.model["stored_dtypes"] == ["bfloat16"]
    assert result.deviation is not None
    assert result.deviation < 1e-9


class Single(nn.Module):
    """Its head is for single precision alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = build("bert").eval()
        # Enough numbers that some of them are rounded otherwise where the function is the same.
        self.head = nn.Linear(self.body.config.num_labels, 256)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.head(self.body(**batch).logits.float())  # type: ignore[no-any-return]


def test_code_that_does_not_run_in_double_precision_is_proved_in_single_precision() -> None:
    model = Single()
    before = state(model)
    result = inspect(model, {k: v for k, v in batch_of("bert").items() if k != "labels"})
    assert identical(model, before)
    assert {site.kind for site in result.sites} >= {"qk", "vo", "key_bias", "value_bias"}
    assert all(site.status == "holds" for site in result.sites)
    assert result.deviation is not None
    assert 1e-9 < result.deviation < 1e-4


def test_inputs_are_made_up_or_given() -> None:
    model = build("bert")
    assert inspect(model, health=False).inputs == "2 batches made up from the config"
    batch = batch_of("bert")
    assert inspect(model, batch, health=False).inputs == "1 batch given"
    assert inspect(model, [batch, batch_of("bert", seed=1)], health=False).inputs == "2 batches given"


def test_progress_is_told_of_the_stages() -> None:
    stages: list[str] = []
    inspect(build("bert"), batch_of("bert"), progress=stages.append)
    assert stages == ["find", "verify", "health"]


# -------------------------------------------------------------------------------------------------------- bad input


class Plain(nn.Module):
    """A model without attention that needs an input of its own."""

    main_input_name = "signal"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, signal: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(signal * mask) * scale  # type: ignore[no-any-return]


def test_a_model_without_attention_says_so() -> None:
    result = inspect(Plain(), {"signal": torch.randn(2, 4), "mask": torch.ones(2, 4)})
    assert (result.sites, result.health, result.totals.symmetry_dim) == ([], [], 0)
    assert result.totals.effective_parameters == 20
    assert "no attention symmetry was found" in result.warnings[0]


def test_inputs_that_cannot_be_made_up_are_named() -> None:
    with pytest.raises(UsageError, match=r"'signal'.*--data.*signal, mask, scale"):
        inspect(Plain())


def test_inputs_that_are_missing_are_named() -> None:
    model = Plain()
    before = state(model)
    with pytest.raises(UsageError, match=r"example batch of signal, without mask: TypeError"):
        inspect(model, {"signal": torch.randn(2, 4)})
    assert identical(model, before)


def test_batches_that_do_not_fit_are_an_error_with_the_reason() -> None:
    with pytest.raises(UsageError, match=r"does not run on the example batch of signal, mask: RuntimeError"):
        inspect(Plain(), {"signal": torch.randn(2, 5), "mask": torch.ones(2, 5)})
    with pytest.raises(UsageError, match="the list is empty"):
        inspect(Plain(), [])


def test_no_such_preset() -> None:
    with pytest.raises(UsageError, match=r"'most'.*full"):
        inspect(Plain(), preset="most")


def test_broken_weights_are_named() -> None:
    model = build("bert")
    model.get_parameter("classifier.weight").data[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"classifier\.weight has 1 NaN"):
        inspect(model)


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("vit", torch.float16)
    before = state(model)

    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspection, "prove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        inspect(model)
    assert identical(model, before)


# ---------------------------------------------------------------------------------------------------- looked up


@pytest.fixture
def proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were proved, not looked up."""
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    proved: list[nn.Module] = []
    prove = inspection.prove

    def counted(model: nn.Module, *args: Any, **options: Any) -> Any:
        proved.append(model)
        return prove(model, *args, **options)

    monkeypatch.setattr(inspection, "prove", counted)
    return proved


def test_the_same_weights_are_proved_once(proofs: list[nn.Module]) -> None:
    first = inspect(build("bert"))
    again = inspect(build("bert"))
    assert len(proofs) == 1
    assert again.inputs == f"{first.inputs}; proved before on the very same weights"
    assert replace(again, inputs=first.inputs) == first
    assert inspect(build("bert"), cached=False) == first
    assert len(proofs) == 2


@pytest.mark.slow
def test_other_weights_other_inputs_and_other_wishes_are_proved_anew(proofs: list[nn.Module]) -> None:
    inspect(build("bert"))
    changed = build("bert")
    changed.get_parameter("classifier.bias").data[0] += 1e-9
    inspect(changed)
    inspect(build("bert"), batch_of("bert"))
    inspect(build("bert"), preset="attention")
    inspect(build("bert"), health=False)
    assert len(proofs) == 5


def test_a_model_of_own_code_is_proved_every_time(proofs: list[nn.Module]) -> None:
    model = build("bert")
    model.get_submodule("bert.embeddings").register_forward_hook(lambda *_: None)
    for _ in range(2):
        inspect(model)
    assert len(proofs) == 2


def test_what_cannot_be_read_is_measured_again(proofs: list[nn.Module], tmp_path: Path) -> None:
    inspect(build("bert"))
    for file in (tmp_path / "cache").iterdir():
        file.write_text('{"schema": 1, "sites": 3}')
    inspect(build("bert"))
    assert len(proofs) == 2


# ---------------------------------------------------------------------------------------------------- stored models


def test_the_twin_of_a_demo_has_the_same_products(demo: Inspection) -> None:
    twin = inspect_pretrained("demo:digits-vit-twin")
    assert twin.model["id"] == "demo:digits-vit-twin"
    assert twin.totals == demo.totals
    for a, b in zip(demo.health, twin.health, strict=True):
        assert b.balance is not None
        assert a.balance is not None
        assert b.balance > 2 * a.balance
        # The twin's weights are rounded to float32.
        assert b.singular_values == pytest.approx(a.singular_values, rel=1e-3)


@pytest.fixture
def config_only(tmp_path: Path) -> Callable[..., Path]:
    """A folder with nothing but a config.json."""

    def make(config: Any, **changes: Any) -> Path:
        config.save_pretrained(tmp_path)
        edit_config(tmp_path, **changes)
        return tmp_path

    return make


def test_random_weights_need_a_config_alone(config_only: Callable[..., Path]) -> None:
    folder = str(config_only(BY_NAME["llama"].config(), architectures=["LlamaForCausalLM"]))
    with pytest.raises(ModelError, match=r"no weights .*inspect --random-init"):
        inspect_pretrained(folder)
    result = inspect_pretrained(folder, random_init=True, device="cpu")
    assert result.model["class"] == "LlamaForCausalLM"
    assert result.model["random_init"] is True
    assert result.totals.by_kind["qk"] == 2 * BY_NAME["llama"].qk_dimension
    assert {s.status for s in result.sites} == {"holds"}
    # As initialised, with attention all but flat, queries and keys would move the outputs by 1e-4 or so.
    assert min(s.control or 0.0 for s in result.sites) > 0.01
    assert result.health == []
    assert any("health" in text for text in result.warnings)
    torch.manual_seed(1)
    assert inspect_pretrained(folder, random_init=True, device="cpu") == result


@pytest.mark.parametrize(
    ("changes", "options", "name"),
    [
        ({"architectures": None}, {}, "BertModel"),
        ({"architectures": ["BertForQuestionAnswering"]}, {}, "BertForQuestionAnswering"),
        ({"architectures": ["BertModel"]}, {"task": "masked-lm"}, "BertForMaskedLM"),
        ({"architectures": ["TFSomethingElse"]}, {}, "BertModel"),
    ],
)
def test_the_class_is_the_task_s_or_the_config_s(
    config_only: Callable[..., Path], changes: Any, options: Any, name: str
) -> None:
    folder = config_only(bert_config(), **changes)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = inspect_pretrained(str(folder), random_init=True, verify=False, device="cpu", **options)
    assert result.model["class"] == name
    unknown = [w for w in told if "a class that transformers does not have" in str(w.message)]
    assert len(unknown) == (changes["architectures"] == ["TFSomethingElse"])


def test_a_model_of_no_task_of_ours_loads_with_its_weights(tmp_path: Path) -> None:
    save(transformers.BertForQuestionAnswering(bert_config()), tmp_path)
    result = inspect_pretrained(str(tmp_path), device="cpu")
    assert result.model["class"] == "BertForQuestionAnswering"
    assert result.health


def test_a_config_without_a_class_of_models(config_only: Callable[..., Path]) -> None:
    folder = config_only(transformers.CLIPVisionConfig(), model_type="timm_wrapper")
    edit_config(folder, model_type="encodec_nothing")
    with pytest.raises(ModelError, match="encodec_nothing"):
        inspect_pretrained(str(folder), random_init=True)


def test_a_config_that_no_model_takes(config_only: Callable[..., Path]) -> None:
    # A part of a larger model, which has a config of its own and no auto class.
    folder = config_only(transformers.TrOCRConfig())
    with pytest.raises(ModelError, match=r"no model that takes a TrOCRConfig.*--task"):
        inspect_pretrained(str(folder), random_init=True)


def test_a_config_without_a_model_for_the_task(config_only: Callable[..., Path]) -> None:
    folder = config_only(transformers.ViTConfig(), architectures=["ViTModel"])
    with pytest.raises(ModelError, match=r"no model for causal-lm that takes a ViTConfig"):
        inspect_pretrained(str(folder), random_init=True, task="causal-lm")


def test_a_config_that_cannot_be_built(config_only: Callable[..., Path]) -> None:
    folder = config_only(bert_config(), architectures=["BertModel"], num_attention_heads=3)
    with pytest.raises(ModelError, match=r"cannot be built from its config\.json: ValueError.*3"):
        inspect_pretrained(str(folder), random_init=True)


def test_names_of_a_checkpoint_that_do_not_match(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(transformers.BertForSequenceClassification(bert_config()), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["extra.weight"] = weights["classifier.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    result = inspect_pretrained(str(tmp_path), verify=False, health=False, device="cpu")
    assert any("1 weights" in text and "extra.weight" in text for text in result.warnings)
    del weights["bert.encoder.layer.0.attention.self.key.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the weights.*self\.key\.weight.*no place for: extra\.weight"):
        inspect_pretrained(str(tmp_path))
    with pytest.warns(GeosharpWarning, match=r"self\.key\.weight"):
        inspect_pretrained(str(tmp_path), allow_missing=True, verify=False, health=False, device="cpu")


@pytest.mark.parametrize("random_init", [False, True])
def test_code_of_the_repository_is_not_run(
    config_only: Callable[..., Path], random_init: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = config_only(
        bert_config(), model_type="mine", architectures=["Mine"],
        auto_map={"AutoConfig": "mine.Config", "AutoModel": "mine.Mine"},
    )  # fmt: skip
    (folder / "mine.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("the user was asked"))
    with pytest.raises(ModelError, match="--trust-remote-code"):
        inspect_pretrained(str(folder), random_init=random_init)


REMOTE = """
from transformers import BertConfig, BertModel

class Config(BertConfig):
    model_type = "mine"

class Mine(BertModel):
    config_class = Config
"""


def test_code_that_is_trusted_runs(
    config_only: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers copies the code to where it imports it from: for users a cache, which is to stay out of this.
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = config_only(
        bert_config(), model_type="mine", architectures=["Mine"],
        auto_map={"AutoConfig": "mine.Config", "AutoModel": "mine.Mine"},
    )  # fmt: skip
    (folder / "mine.py").write_text(REMOTE)
    result = inspect_pretrained(str(folder), random_init=True, trust_remote_code=True, device="cpu")
    assert result.model["class"] == "Mine"
    assert result.totals.by_kind["vo"] == 2 * 4**2


def test_an_adapter_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="adapter"):
        inspect_pretrained(str(tmp_path))


def test_a_repository_out_of_reach() -> None:
    with pytest.raises(HubError, match="someone/model"):
        inspect_pretrained("someone/model", random_init=True)


# -------------------------------------------------------------------------------------------------- example batches


@pytest.fixture
def bert_folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save(  # type: ignore[no-any-return]
        transformers.BertForSequenceClassification(bert_config()), tmp_path / "bert", make_tokenizer()
    )


def test_a_file_of_tensors_is_one_batch(bert_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "batch.safetensors"
    save_file({"inputs_embeds": torch.randn(2, 5, 8)}, path)
    result = inspect_pretrained(str(bert_folder), data=path, device="cpu")
    assert result.inputs == f"1 batch of {path}"
    assert {s.status for s in result.sites} == {"holds"}
    save_file({"pixels": torch.randn(2, 5, 8)}, path)
    with pytest.raises(DataError, match="'pixels'"):
        inspect_pretrained(str(bert_folder), data=path)
    path.write_bytes(b"no tensors")
    with pytest.raises(DataError, match="cannot be read"):
        inspect_pretrained(str(bert_folder), data=path)
    with pytest.raises(DataError, match="no file"):
        inspect_pretrained(str(bert_folder), data=tmp_path / "other.safetensors")


@pytest.mark.parametrize("rows", [1, 9])
def test_a_data_set_without_labels_will_do(bert_folder: Path, tmp_path: Path, rows: int) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text\n" + "the film is good\n" * rows)
    result = inspect_pretrained(str(bert_folder), data=path, device="cpu", health=False)
    assert result.inputs == f"{'1 batch' if rows == 1 else '2 batches'} of {path}"


def test_a_data_set_needs_a_task(tmp_path: Path) -> None:
    save(transformers.BertForQuestionAnswering(bert_config()), tmp_path, make_tokenizer())
    (tmp_path / "rows.csv").write_text("text\ngood\n")
    with pytest.raises(UsageError, match=r"BertForQuestionAnswering.*none of the tasks"):
        inspect_pretrained(str(tmp_path), data=tmp_path / "rows.csv")


def test_every_demo_is_inspected() -> None:
    assert demos.names() == ["digits-vit", "vader-bert"]
    result = inspect_pretrained("demo:vader-bert")
    assert {s.status for s in result.sites} == {"holds"}


def test_a_model_that_does_not_run_on_what_the_proof_needs_is_told_so() -> None:
    """Its table of positions is shorter than its configuration says: enough to search it, too short to prove it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertModel(config)
    model.embeddings.position_embeddings = nn.Embedding(20, 32)
    with pytest.raises(UsageError, match=r"cannot make up the input 'input_ids'.*index out of range"):
        inspect(model)


def test_an_inspection_that_was_kept_says_nothing_of_where_its_model_was_from(
    proofs: list[nn.Module], tmp_path: Path
) -> None:
    folder = save(transformers.BertForSequenceClassification(bert_config()), tmp_path / "model", make_tokenizer())
    named = inspect_pretrained(folder, device="cpu")
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    alone = inspect(model)
    assert alone.inputs.endswith("proved before on the very same weights")
    fresh = inspect(model, cached=False)
    assert alone.model == fresh.model
    assert set(named.model) > set(alone.model)
    # And the other way round.
    assert inspect_pretrained(folder, device="cpu").model == named.model
    assert len(proofs) == 2


def test_units_behind_a_squared_relu_are_shown_with_what_they_move() -> None:
    result = inspect(tiny.build("nemotron"), health=False)
    units = [s for s in result.sites if s.kind == "mlp"]
    assert [s.module for s in units] == ["layers.0.mlp", "layers.1.mlp"]
    assert {(s.group, s.dim, s.status) for s in units} == {("GL(1)+", 1, "holds")}
    assert all(s.total_dim == s.copies and {part.factor for part in s.slices} == {"g", "h"} for s in units)
    totals = result.totals
    assert totals.symmetry_dim == sum(totals.by_kind.values()) == sum(s.total_dim for s in result.sites)
