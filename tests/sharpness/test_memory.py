"""Activations: micro-batches that find their size, gradient checkpointing, and full float32 meanwhile."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp import SharpnessResult, score
from hf_geosharp.errors import GeosharpWarning, ModelError, UsageError
from hf_geosharp.sharpness.memory import checkpointed, give_back, is_out_of_memory
from hf_geosharp.sharpness.precision import _switches, full_float32
from tests.sharpness.tiny import bert, bert_batches, gpt2, gpt2_batches

TEXTS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
    "MPS backend out of memory (MPS allocated: 9.0 GB, other allocations: 1.0 GB, max allowed: 9.07 GB)",
    "[enforce fail at alloc_cpu.cpp:115] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 by",
)


def quick(model: Any, data: Any, **changes: Any) -> SharpnessResult:
    return score(model, data, **{"steps": 3, "dtype": "float64", **changes})


def timeless(result: SharpnessResult) -> SharpnessResult:
    return dataclasses.replace(result, seconds=0.0)


class Small:
    """Makes a model run out of memory with more than ``limit`` samples, in the forward or in the backward pass."""

    def __init__(self, model: nn.Module, limit: int, text: str = TEXTS[0], *, backward: bool = False) -> None:
        self.limit, self.text, self.seen, self.backward = limit, text, [], backward
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after)

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.size = len(kwargs["input_ids"])
        self.seen.append(self.size)
        if self.size > self.limit and not self.backward:
            raise RuntimeError(self.text)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.backward and output.logits.requires_grad:
            size = self.size

            def refuse(_: Tensor) -> None:
                if size > self.limit:
                    raise RuntimeError(self.text)

            output.logits.register_hook(refuse)
        return output


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("limit", [1, 5])
@pytest.mark.slow
def test_auto_halves_until_it_fits_and_the_score_stays(limit: int, backward: bool) -> None:
    # Finding symmetries takes four samples at a time.
    data, options = gpt2_batches(2, size=10), {"metric": "adaptive", "reproducibility": False}
    whole = quick(gpt2(), data, **options)
    model = gpt2()
    small = Small(model, limit, backward=backward)
    with pytest.warns(GeosharpWarning, match=r"out of memory with 10 samples at a time: going on with 5"):
        found = quick(model, data, micro_batch="auto", **options)
    assert found.geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=1e-5)
    assert found.passes == whole.passes
    assert any("going on with 5" in w for w in found.warnings)
    # What was learnt on the first batch holds for the others.
    assert small.seen.count(10) == 1


def test_passes_are_those_that_were_wanted_whatever_the_micro_batches() -> None:
    """Of micro-batches all have a backward pass, for the loss of all is known too late."""
    found = [quick(bert(2), bert_batches(1), rho=0.5, steps=15, micro_batch=size) for size in (None, 1, 4)]
    assert found[0].passes.backwards < found[0].passes.forwards - 1
    assert all(f.passes == found[0].passes for f in found)


@pytest.mark.parametrize("symmetries", ["full", "paper"])
def test_what_auto_came_to_is_told_whatever_ran_first(symmetries: str) -> None:
    # Where something folds, the stored losses are taken before any ball is.
    model = gpt2()
    Small(model, 5)
    result = score(model, gpt2_batches(2, size=10), micro_batch="auto", steps=2, symmetries=symmetries)
    assert any("going on with 5" in text for text in result.warnings), result.warnings


def test_auto_halves_for_those_who_look_on_at_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: model)
    data = gpt2_batches(2, size=10)
    options: dict[str, Any] = {"symmetries": "paper", "steps": 2}
    expected = score(gpt2(), data, **options).geodesic_sharpness
    model = gpt2()
    Small(model, 5)
    found = score(model, data, micro_batch="auto", compile=True, **options).geodesic_sharpness
    assert found == pytest.approx(expected, rel=1e-4)


def test_auto_takes_the_whole_batch_where_it_fits() -> None:
    assert timeless(quick(bert(), bert_batches(), micro_batch="auto")) == timeless(quick(bert(), bert_batches()))


@pytest.mark.parametrize("text", TEXTS)
def test_every_device_has_its_words_for_it(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError(text))


def test_out_of_memory_with_one_sample_is_an_error_that_says_what_helps() -> None:
    model = bert()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    small = Small(model, 0)
    # Proving the symmetries takes some samples at a time, too.
    with (
        pytest.warns(GeosharpWarning),
        pytest.raises(ModelError, match=r"out of memory with a single sample at a time\. Use gradient checkpointing"),
    ):
        quick(model, bert_batches(1), micro_batch="auto", metric="adaptive")
    # Two samples are what the loss in parts would be proved on.
    assert small.seen == [6, 2, 3, 1]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("micro_batch", [None, 6])
def test_without_auto_it_ends_with_what_helps(micro_batch: int | None) -> None:
    model = bert()
    Small(model, 4)
    with pytest.raises(
        ModelError, match=r"out of memory with 6 samples at a time\. A smaller micro_batch.*'auto'"
    ) as told:
        quick(model, bert_batches(1), micro_batch=micro_batch)
    assert "CUDA out of memory" in str(told.value.__cause__)


def test_another_error_is_not_taken_for_it() -> None:
    model = bert()
    small = Small(model, 4, "shape mismatch")
    with pytest.raises(RuntimeError, match="shape mismatch"):
        quick(model, bert_batches(1), micro_batch="auto")
    assert small.seen.count(6) == 1


@pytest.mark.parametrize(("platform", "functions"), [("win32", {}), ("linux", {}), ("linux", {"malloc_trim": int})])
def test_memory_is_given_back_where_the_c_library_can(
    platform: str, functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(name: None) -> SimpleNamespace:
        assert platform == "linux", "there is no such library"
        return SimpleNamespace(**functions)

    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("ctypes.CDLL", library)
    give_back()


@pytest.mark.parametrize(
    ("micro_batch", "message"), [("much", "'much'; it is a number or 'auto'"), (0, "0; at least 1 is needed")]
)
def test_a_size_that_is_none_is_refused(micro_batch: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"micro_batch is .*{message}"):
        quick(bert(), bert_batches(1), micro_batch=micro_batch)


# --------------------------------------------------------------------------------------------- gradient checkpointing


def layers(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.bert.encoder.layer


@pytest.mark.parametrize(("make", "data"), [(bert, bert_batches), (gpt2, gpt2_batches)])
@pytest.mark.slow
def test_checkpointing_computes_layers_twice_and_changes_nothing(make: Any, data: Any, finds_anew: None) -> None:
    model, batches = make(), data(1)
    plain = quick(model, batches, reproducibility=False)
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += torch.is_grad_enabled()

    inner = next(m for m in layers(model)[0].modules() if not list(m.children()))
    inner.register_forward_hook(hook)
    state = [dict(m.__dict__) for m in model.modules()]
    quick(model, batches, reproducibility=False)
    once, count = count, 0
    found = quick(model, batches, reproducibility=False, gradient_checkpointing=True)
    assert timeless(found) == timeless(plain)
    # Three passes with gradients run the layer once more; finding the symmetries does not.
    assert count == once + 3
    assert [m.__dict__.keys() for m in model.modules()] == [s.keys() for s in state]
    assert not model.training


def test_checkpointed_layers_are_as_they_were_after_an_exception() -> None:
    model = bert()
    layer = layers(model)[0]
    own = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    layers(model)[1].forward = forward
    with pytest.raises(ZeroDivisionError), checkpointed(model):
        assert 1 / ("forward" not in layer.__dict__)
    assert "forward" not in layer.__dict__
    assert layers(model)[1].__dict__["forward"] is forward


def test_checkpointing_keeps_fewer_activations() -> None:
    model = bert(num_hidden_layers=4)
    batch = bert_batches(1)[0]

    def kept(wanted: bool) -> int:
        total = 0

        def pack(t: Tensor) -> Tensor:
            nonlocal total
            total += t.numel()
            return t

        with checkpointed(model, wanted), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(**batch)
        return total

    assert kept(True) < kept(False) / 3


def test_a_model_without_marked_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="gradient checkpointing: Linear has no layers"), checkpointed(nn.Linear(2, 2)):
        pass


# --------------------------------------------------------------------------------------------------- full precision


def switches() -> list[Any]:
    """Those that this torch has."""
    return [switch for switch in _switches() if readable(switch[0])]


def readable(read: Any) -> bool:
    try:
        read()
    except AttributeError:
        return False
    return True


def test_rounding_inside_products_is_off_meanwhile_and_back_afterwards() -> None:
    def seen() -> list[Any]:
        return [read() for read, _, _ in known]

    known = switches()
    before = (torch.get_float32_matmul_precision(), seen())
    try:
        torch.set_float32_matmul_precision("medium")
        mine = seen()
        inside: list[Any] = []
        with pytest.raises(ZeroDivisionError), full_float32():
            assert 1 / len(inside.extend(seen()) or [])
        assert inside == [value for _, _, value in known]
        assert inside != mine
        assert seen() == mine
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before[0])
    assert seen()[0] in (before[1][0], "ieee", False)


def test_a_score_is_taken_in_full_float32() -> None:
    seen: list[Any] = []
    model, known = bert(), switches()
    model.register_forward_hook(lambda *_: seen.append([read() for read, _, _ in known]))
    quick(model, bert_batches(1), reproducibility=False)
    assert seen
    assert all(state == [value for _, _, value in known] for state in seen)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_older_switches_can_be_read_meanwhile_and_are_back_afterwards(precision: str) -> None:
    """Models read them: a CTC loss switches cuDNN off and on again, which reads and sets all its switches."""

    def older() -> tuple[Any, ...]:
        backends = torch.backends
        return backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()

    usual = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        before = older()
        with full_float32():
            assert older() == (False, False, "highest")
            with torch.backends.cudnn.flags(enabled=False):
                pass
        assert older() == before
    finally:
        torch.set_float32_matmul_precision(usual)


def test_autocast_around_a_score_does_not_change_it() -> None:
    model, data = bert(), bert_batches(1)
    for labels in ("data", "model"):
        plain = score(model, data, steps=3, labels=labels, reproducibility=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            around = score(model, data, steps=3, labels=labels, reproducibility=False)
            assert torch.is_autocast_enabled("cpu")
        assert timeless(around) == timeless(plain)
