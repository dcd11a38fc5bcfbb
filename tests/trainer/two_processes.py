"""A training by two processes, for torchrun: ``two_processes.py OUT SETUP...``; each process writes what it saw."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from hf_geosharp import GeodesicSharpnessCallback
from hf_geosharp.sharpness.shards import whole_of
from tests.trainer.tiny import QUICK, bert, dataset, evaluations, trainer


class Heard(TrainerCallback):
    """Stands where a reporter does."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "eval_geodesic_sharpness" in logs:
            self.values.append(logs["eval_geodesic_sharpness"])


class FailsOnOne(GeodesicSharpnessCallback):
    """A measurement that fails on the second process only."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        if args.process_index == 1:
            self._measurement = Failing()
        super().on_log(args, state, control, logs, **kwargs)


class LogsOnOne(Trainer):
    """Logs its evaluations on the first process only, as the question answering examples do."""

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        output = self.evaluation_loop(self.get_eval_dataloader(), "own", metric_key_prefix=metric_key_prefix)
        output.metrics.update(eval_runtime=1.0, eval_samples_per_second=1.0)
        if self.args.should_log:
            self.log(dict(output.metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, output.metrics)
        return output.metrics


class Failing:
    def take(self, model: Any, step: int) -> Any:
        raise MemoryError("too little")


class Shards(Trainer):
    """Trains a model that is sharded: what Accelerate does with FSDP2, which it does on accelerators only."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, **_: model


class Decays(Shards):
    """Puts a penalty on the weights into its loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        sizes = [whole_of(p).square().sum() for n, p in self.model.named_parameters() if "query" in n]
        loss = outputs.loss + 1e-3 * torch.stack(sizes).sum()
        return (loss, outputs) if return_outputs else loss


def shard(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (2,))
    for layer in [m for m in model.modules() if type(m).__name__ == "BertLayer"]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adapted(model: Any) -> Any:
    """With an adapter that is not zero."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def measured_again(callback: Any, weights: Any) -> float:
    """The last value, taken of a whole model with the weights at the end."""
    model = adapted(bert()) if callback._settings.params == "lora" else bert()
    model.load_state_dict(weights, strict=False)
    measurement = callback._measurement
    return float(replace(measurement, hooked=False).take(model, 0).geodesic_sharpness)


def main(out: Path, setup: str) -> None:
    torch.set_num_threads(1)
    model = bert()
    if "half" in setup:
        model = model.bfloat16()
    changes: dict[str, Any] = {}
    if "best" in setup:
        changes = {
            "metric_for_best_model": "geodesic_sharpness", "greater_is_better": False, "load_best_model_at_end": True,
            "save_strategy": "epoch", "num_train_epochs": 4,
        }  # fmt: skip
    if "accumulate" in setup:
        changes["gradient_accumulation_steps"] = 2
    heard, error = Heard(), ""
    if "overridden" in setup:
        changes["kind"] = LogsOnOne
    if "sharded" in setup:
        kept = {"kind": Decays if "penalty" in setup else Shards}
        model, changes = shard(adapted(model) if "adapter" in setup else model), kept
    trained = trainer(out / "run", model=model, callbacks=[heard], train_dataset=dataset(32), **changes)
    callback = None
    if "without" not in setup:
        kind = FailsOnOne if {"failing", "raising"} & set(setup.split("-")) else GeodesicSharpnessCallback
        params = "lora" if "adapter" in setup else "all"
        how: dict[str, Any] = {"loss": "trainer"} if "penalty" in setup else {}
        on_error: Any = "raise" if "raising" in setup else "warn"
        callback = kind(on_error=on_error, params=params, **QUICK, **how).attach(trained)
        if "best" in setup:
            trained.add_callback(EarlyStoppingCallback(1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            trained.train()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    digest = hashlib.sha256()
    weights = {n: whole_of(p) for n, p in trained.model.named_parameters()}
    for p in weights.values():
        digest.update(p.float().numpy().tobytes())
    rank = trained.args.process_index
    report = {
        "world": trained.args.world_size,
        "weights": digest.hexdigest(),
        "values": [record.get("eval_geodesic_sharpness") for record in evaluations(trained)],
        "best": [trained.state.best_metric, trained.state.best_global_step],
        "steps": trained.state.global_step,
        "heard": heard.values,
        "own": [result.geodesic_sharpness for _, result in callback.results] if callback else [],
        "said": [str(w.message) for w in said if w.category.__name__ == "GeosharpWarning"],
        "error": error,
        "random": float(torch.rand(())),
        "again": measured_again(callback, weights) if "sharded" in setup and callback and not error else None,
    }
    trained.accelerator.wait_for_everyone()
    (out / f"{setup}-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(Path(sys.argv[1]), name)
    # Gloo's thread may still hold the last collective's tensors, whose Python objects it cannot give back to an
    # interpreter that has begun to end: the process would be aborted after all its work.
    sys.stdout.flush()
    os._exit(0)
