"""Which model is measured: without wrappers, merged, or copied; and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from hf_geosharp import GeodesicSharpnessCallback, score
from hf_geosharp.errors import ModelError, UnsupportedModelError, UsageError
from hf_geosharp.trainer.subject import fingerprint, refuse, subject
from tests.sharpness.tiny import randomise
from tests.trainer.tiny import QUICK, bert, evaluations, rows, trainer
from tests.versions import needs_fully_shard


def batch() -> dict[str, torch.Tensor]:
    found = rows(8)
    return {
        "input_ids": torch.tensor([row["input_ids"] for row in found]),
        "labels": torch.tensor([row["label"] for row in found]),
    }


def value(model: nn.Module) -> float:
    return score(model, [batch()], steps=3, reproducibility=False).geodesic_sharpness


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    return (
        {k: v.clone() for k, v in model.state_dict().items()},
        [p.requires_grad for p in model.parameters()],
        [m.training for m in model.modules()],
        [sorted(vars(m)) for m in model.modules()],
    )


def assert_as_before(model: nn.Module, before: tuple[Any, ...]) -> None:
    after = snapshot(model)
    assert all(torch.equal(before[0][k], v) for k, v in after[0].items())
    assert before[1:] == after[1:]


def test_a_plain_model_is_measured_itself() -> None:
    model = bert()
    with subject(model) as measured:
        assert measured is model


@pytest.mark.slow
def test_autocast_and_compiled_code_are_left_out() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    plain = bert().eval()
    expected = value(plain)
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    try:
        wrapped = accelerator.prepare_model(copy.deepcopy(plain), evaluation_mode=True)
        patched = wrapped.forward
        assert wrapped(**batch()).loss.item() != plain(**batch()).loss.item()
        with subject(wrapped) as measured:
            assert value(measured) == expected
        assert wrapped.forward is patched
    finally:
        AcceleratorState._reset_state(True)
    compiled = torch.compile(copy.deepcopy(plain), backend="eager")
    with subject(compiled) as measured:
        assert type(measured) is type(plain)
    inside = copy.deepcopy(plain)
    inside.bert.compile(backend="eager")
    inside.classifier = torch.compile(inside.classifier, backend="eager")
    layer, code = inside.classifier, inside.bert._compiled_call_impl
    with subject(inside) as measured:
        assert [name for name, _ in measured.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert value(measured) == expected
    assert inside.classifier is layer
    assert inside.bert._compiled_call_impl is code


def test_a_wrapper_of_parallel_training_is_taken_off() -> None:
    model = bert()
    with subject(nn.DataParallel(model)) as measured:
        assert measured is model


@pytest.mark.parametrize("how", ["hook", "post-accumulate", "half and hooked"])
def test_a_copy_is_measured_where_training_would_notice(how: str) -> None:
    model = bert()
    called = []
    if how == "hook":
        model.classifier.weight.register_hook(lambda g: called.append(1))
    elif how == "post-accumulate":
        model.classifier.weight.register_post_accumulate_grad_hook(lambda p: called.append(1))
    else:
        model = model.bfloat16()
    before = snapshot(model)
    with subject(model, hooked=True) as measured:
        assert measured is not model
        value(measured)
    assert called == []
    assert_as_before(model, before)


class OfItself(Trainer):
    """Computes its loss by the model that it has, rather than by the one that it is given."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = self.model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class TestAdapters:
    @pytest.fixture(autouse=True)
    def peft(self) -> Any:
        return pytest.importorskip("peft")

    def lora(self, model: Any, **changes: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(
            model, LoraConfig(**{"r": 2, "target_modules": ["query", "value"], "task_type": "SEQ_CLS", **changes})
        )
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, p in adapted.named_parameters():
                if "lora_" in name:
                    p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        return adapted

    @pytest.mark.parametrize("changes", [{}, {"use_dora": True}])
    def test_the_merged_model_is_measured(self, changes: Any) -> None:
        base = randomise(bert())
        adapted = self.lora(copy.deepcopy(base), **changes)
        by_hand = copy.deepcopy(adapted).merge_and_unload()
        before = snapshot(adapted)
        with subject(adapted) as measured:
            assert value(measured) == value(by_hand) != value(base)
        assert_as_before(adapted, before)

    def test_half_precision_is_merged_in_float32(self) -> None:
        adapted = self.lora(bert().bfloat16())
        query = adapted.base_model.model.bert.encoder.layer[0].attention.self.query
        exact = query.base_layer.weight.float() + query.get_delta_weight("default").float()
        with subject(adapted) as measured:
            weight = measured.bert.encoder.layer[0].attention.self.query.weight
            assert weight.dtype == torch.float32
            assert torch.allclose(weight, exact, rtol=1e-6, atol=1e-8)
        assert query.base_layer.weight.dtype == torch.bfloat16

    @pytest.mark.slow
    def test_a_training_of_adapters(self, tmp_path: Path) -> None:
        weights = []
        for attached in (False, True):
            torch.manual_seed(0)
            trained = trainer(tmp_path, model=self.lora(bert(), lora_dropout=0.2))
            callback = GeodesicSharpnessCallback(**QUICK)
            if attached:
                callback.attach(trained)
            trained.train()
            weights.append([p.detach().clone() for p in trained.model.parameters()])
        assert all(map(torch.equal, *weights))
        found = [record["eval_geodesic_sharpness"] for record in evaluations(trained)]
        assert found == [result.geodesic_sharpness for _, result in callback.results]
        result = callback.results[-1][1]
        assert result.metric == "inv"
        assert result.pairs.count == 4
        assert result.model["class"] == "BertForSequenceClassification"

    @pytest.mark.slow
    def test_a_training_whose_adapter_alone_is_measured(self, tmp_path: Path) -> None:
        """As :func:`hf_geosharp.score` takes it of the same batches; the training does not notice."""
        weights = []
        for attached in (False, True):
            torch.manual_seed(0)
            trained = trainer(tmp_path, model=self.lora(bert(), lora_dropout=0.2))
            batches = [dict(trained.data_collator(rows(4, seed)).items()) for seed in (5, 6)]
            callback = GeodesicSharpnessCallback(batches, params="lora", ascent="apgd", **QUICK)
            if attached:
                callback.attach(trained)
            trained.train()
            weights.append([p.detach().clone() for p in trained.model.parameters()])
        assert all(map(torch.equal, *weights))
        found = callback.results[-1][1]
        assert (found.params, found.ascent, found.model["task"]) == ("lora", "apgd", "text-classification")
        assert set(found.pairs.by_kind) == {"lora GL(2)"}
        quick = {k: v for k, v in QUICK.items() if k not in ("samples", "batch_size")}
        alone = score(trained.model, batches, params="lora", ascent="apgd", micro_batch=4, **quick)
        assert found.geodesic_sharpness == alone.geodesic_sharpness

    def test_an_adapter_alone_is_measured_where_it_is_though_its_base_is_in_half_precision(self) -> None:
        """Also where weights have hooks of DDP: the base has none, for it is frozen."""
        adapted = self.lora(bert().bfloat16())
        for p in adapted.parameters():
            p.data = p.data.float() if p.requires_grad else p.data
        with subject(adapted, hooked=True, params="lora") as measured:
            assert measured is adapted
        with subject(adapted, hooked=True) as measured:
            assert measured is not adapted

    @pytest.mark.parametrize("named", [True, False])
    def test_a_loss_of_the_model_in_training_is_refused_where_a_copy_is_measured(
        self, tmp_path: Path, named: bool
    ) -> None:
        """The copy would have no gradient, and the model in training one that no step of it made."""
        trained = trainer(tmp_path, model=self.lora(bert()), kind=OfItself)
        own = {"loss": "trainer"} if named else {"loss": lambda outputs, batch: trained.model(**batch).loss}
        GeodesicSharpnessCallback(**QUICK, **own).attach(trained)
        with pytest.raises(UsageError, match=r"model instead of self\.model"):
            trained.train()
        assert trained.state.global_step == 0
        assert all(p.grad is None for p in trained.model.parameters())

    def test_a_loss_of_the_model_in_training_is_measured_where_it_is_no_copy(self, tmp_path: Path) -> None:
        trained = trainer(tmp_path, model=bert(), kind=OfItself)
        GeodesicSharpnessCallback(**QUICK, loss="trainer").attach(trained)
        assert trained.evaluate()["eval_geodesic_sharpness"] > 0

    def test_only_an_adapter_of_a_model_without_one_is_refused_at_the_start(self, tmp_path: Path) -> None:
        trained = trainer(tmp_path)
        GeodesicSharpnessCallback(params="lora", **QUICK).attach(trained)
        with pytest.raises(UsageError, match="has no adapter"):
            trained.train()
        assert trained.state.global_step == 0

    def test_adapters_that_cannot_be_merged_are_refused_at_the_start(self, tmp_path: Path) -> None:
        from peft import PromptTuningConfig, get_peft_model

        adapted = get_peft_model(bert(), PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))
        trained = trainer(tmp_path, model=adapted)
        GeodesicSharpnessCallback(**QUICK).attach(trained)
        with pytest.raises(UnsupportedModelError, match=r"PROMPT_TUNING.* cannot be merged"):
            trained.train()
        assert trained.state.global_step == 0

    def test_adapters_without_a_wrapper_are_refused(self) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        model = inject_adapter_in_model(LoraConfig(r=2, target_modules=["query"]), bert())
        with pytest.raises(UnsupportedModelError, match="get_peft_model"), subject(model):
            pass


class TestRefusals:
    def test_zero_3(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"ZeRO-3.*score the saved checkpoints"):
            refuse(bert(), SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3)))
        refuse(bert(), SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=2)))
        model = bert()
        model.classifier.weight.ds_id = 0
        with pytest.raises(UnsupportedModelError, match="ZeRO-3"):
            refuse(model)

    @pytest.fixture
    def world(self, tmp_path: Path) -> Any:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    @pytest.mark.filterwarnings("ignore")
    def test_fsdp(self, world: Any) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with pytest.raises(UnsupportedModelError, match="FSDP"):
            refuse(bert(), SimpleNamespace(fsdp=["full_shard"]))
        wrapped = FullyShardedDataParallel(bert(), device_id=torch.device("cpu"))
        with pytest.raises(UnsupportedModelError, match="FSDP"):
            refuse(wrapped)

    @needs_fully_shard
    def test_sharded_parameters(self, world: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import distribute_module

        mesh = init_device_mesh("cpu", (1,))
        refuse(fully_shard(bert(), mesh=mesh), SimpleNamespace(fsdp=["full_shard"]))
        refuse(fully_shard(bert().bfloat16(), mesh=mesh), SimpleNamespace(fsdp=["full_shard"]))
        with pytest.raises(UnsupportedModelError, match=r"no tensor parallelism.*score the saved checkpoints"):
            refuse(distribute_module(bert(), mesh))
        model = fully_shard(bert(), mesh=mesh)
        next(model.parameters()).register_hook(lambda g: g)
        with pytest.raises(UnsupportedModelError, match="gradient hooks"):
            refuse(model)
        with torch.no_grad():
            broken = fully_shard(bert(), mesh=mesh)
            broken.classifier.bias.to_local()[0] = float("nan")
        with pytest.raises(ModelError, match=r"classifier\.bias"):
            refuse(broken)

    @needs_fully_shard
    def test_adapters_on_sharded_parameters(self, world: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query"]))
        with pytest.raises(UnsupportedModelError, match="params='lora'"):
            refuse(fully_shard(model, mesh=init_device_mesh("cpu", (1,))))
        refuse(model, params="lora")
        # A base in half precision stays as it is.
        half = peft.get_peft_model(bert().bfloat16(), peft.LoraConfig(r=2, target_modules=["query"]))
        refuse(fully_shard(half, mesh=init_device_mesh("cpu", (1,))), params="lora")

    def test_at_the_start_of_the_training(self, tmp_path: Path) -> None:
        model = bert()
        model.classifier.weight.ds_id = 0
        trained = trainer(tmp_path, model=model)
        GeodesicSharpnessCallback(**QUICK).attach(trained)
        with pytest.raises(UnsupportedModelError, match="ZeRO-3"):
            trained.train()
        assert trained.state.global_step == 0

    def test_what_no_score_takes(self) -> None:
        model = bert()
        with torch.no_grad():
            model.classifier.bias[0] = float("nan")
        with pytest.raises(ModelError, match=r"classifier\.bias"):
            refuse(model)


class TestFingerprint:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_it_changes_with_the_last_bit_of_any_weight(self, dtype: torch.dtype) -> None:
        model = bert().to(dtype)
        before = fingerprint(model)
        assert fingerprint(copy.deepcopy(model)) == before
        weight = model.classifier.weight.data
        kept = weight[1, 2].clone()
        weight[1, 2] = torch.nextafter(kept.float(), torch.tensor(9e9)) if dtype == torch.float32 else kept * 1.01
        assert fingerprint(model) != before
        weight[1, 2] = kept
        assert fingerprint(model) == before

    def test_buffers_count(self) -> None:
        model = nn.BatchNorm1d(3)
        before = fingerprint(model)
        model.running_mean.add_(1)
        assert fingerprint(model) != before
