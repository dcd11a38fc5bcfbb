"""The trace: which linear maps are cut, where their parameters are seen to lie, and that nothing of it remains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from hf_geosharp.symmetry.tracing.events import Linear, Trace
from hf_geosharp.symmetry.tracing.trace import norm_parameters, trace
from hf_geosharp.symmetry.tracing.weights import Slab, Weights
from tests.families import BY_NAME, batch_of, build, identical, state
from tests.symmetry.handmade import (
    HEAD,
    WIDTH,
    Chunked,
    Copied,
    Fused,
    Model,
    Norm,
    Pointwise,
    Projected,
    Residual,
    Torch,
    inputs,
    plain,
)
from tests.versions import needs_grouped_attention

SIZE = 4 * HEAD


def traced(module: nn.Module) -> Trace:
    return trace(Residual(module), inputs())


def of(found: Trace, parameter: str) -> list[Linear]:
    return [x for x in found.linears if x.weight.parameter == f"parts.0.{parameter}"]


# --------------------------------------------------------------------------------------------------------------- cuts


def test_every_linear_module_is_cut_once_in_the_order_of_the_pass() -> None:
    found = traced(Projected())
    assert [x.weight.parameter for x in found.linears] == [
        "parts.0.q.weight", "parts.0.k.weight", "parts.0.v.weight", "parts.0.o.weight", "head.weight"
    ]  # fmt: skip
    assert [type(x).__name__ for x in found.order] == ["Linear", "Linear", "Linear", "Softmax", "Linear", "Linear"]


def test_a_linear_module_has_its_weight_its_bias_and_its_sizes() -> None:
    (q,) = of(traced(Projected(heads=2, head=5)), "q.weight")
    assert q.weight == Slab("parts.0.q.weight", (0,), (1,), (0, 0), (10, WIDTH))
    assert q.bias == Slab("parts.0.q.bias", (0,), (), (0,), (10,))
    assert (q.inputs, q.outputs, q.axis, q.source_axis, q.grouped) == (WIDTH, 10, -1, -1, False)
    assert q.source.shape[-1] == WIDTH
    assert q.leaf.shape[-1] == 10


def test_a_linear_module_without_a_bias_has_none() -> None:
    (q,) = of(traced(Projected(bias=False)), "q.weight")
    assert q.bias is None


def test_scopes_are_the_modules_that_run_outermost_first() -> None:
    found = traced(Projected())
    assert found.linears[0].scope == ("", "parts.0", "parts.0.q")
    assert found.softmaxes[0].scope == ("", "parts.0")


def test_modules_that_run_twice_are_two_events_of_one_parameter() -> None:
    part = Projected()
    found = trace(Residual(part, part), inputs())
    assert len(of(found, "q.weight")) == 2
    assert len({id(x.leaf) for x in of(found, "q.weight")}) == 2


class Use(nn.Module):
    """A parameter, and a way to use it."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.use = nn.Parameter(torch.zeros(shape)), use
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.w)


IN = (WIDTH, WIDTH)
USES: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor], list[Slab]]] = {
    "x @ W": (IN, lambda x, w: x @ w, [Slab("parts.0.w", (1,), (0,), (0, 0), IN)]),
    "x @ W.T": (IN, lambda x, w: x @ w.T, [Slab("parts.0.w", (0,), (1,), (0, 0), IN)]),
    "torch.matmul(x, W.mT)": (
        IN, lambda x, w: torch.matmul(x, w.mT), [Slab("parts.0.w", (0,), (1,), (0, 0), IN)]
    ),
    "addmm": (
        IN, lambda x, w: torch.addmm(w[0], x.flatten(0, 1), w).view(x.shape),
        [Slab("parts.0.w", (1,), (0,), (0, 0), IN)],
    ),
    "linear": (IN, functional.linear, [Slab("parts.0.w", (0,), (1,), (0, 0), IN)]),
    "a slice of the outputs": (
        (3 * WIDTH, WIDTH), lambda x, w: functional.linear(x, w[WIDTH : 2 * WIDTH]),
        [Slab("parts.0.w", (0,), (1,), (WIDTH, 0), (3 * WIDTH, WIDTH))],
    ),
    "a slice of the inputs": (
        (WIDTH, 3 * WIDTH), lambda x, w: functional.linear(x, w[:, WIDTH : 2 * WIDTH]),
        [Slab("parts.0.w", (0,), (1,), (0, WIDTH), (WIDTH, 3 * WIDTH))],
    ),
    "chunks": (
        (2 * WIDTH, WIDTH), lambda x, w: functional.linear(x, w.chunk(2)[0]) * functional.linear(x, w.chunk(2)[1]),
        [Slab("parts.0.w", (0,), (1,), (i * WIDTH, 0), (2 * WIDTH, WIDTH)) for i in range(2)],
    ),
    "one of several": (
        (3, WIDTH, WIDTH), lambda x, w: functional.linear(x, w[2]),
        [Slab("parts.0.w", (1,), (2,), (2, 0, 0), (3, WIDTH, WIDTH))],
    ),
    "einsum": (
        (WIDTH, 4, HEAD), lambda x, w: torch.einsum("bti,inh->btnh", x, w).flatten(2),
        [Slab("parts.0.w", (1, 2), (0,), (0, 0, 0), (WIDTH, 4, HEAD))],
    ),
    "einsum over two axes": (
        (4, HEAD, WIDTH), lambda x, w: torch.einsum("btnh,nhi->bti", x.unflatten(-1, (4, HEAD)), w),
        [Slab("parts.0.w", (2,), (0, 1), (0, 0, 0), (4, HEAD, WIDTH))],
    ),
    "einsum with the parameter first": (
        IN, lambda x, w: torch.einsum("oi,bti->bto", w, x), [Slab("parts.0.w", (0,), (1,), (0, 0), IN)]
    ),
    "the parameter on the left": (IN, lambda x, w: (w @ x.mT).mT, [Slab("parts.0.w", (0,), (1,), (0, 0), IN)]),
    "einsum with operands in a list": (
        IN, lambda x, w: torch.einsum("bti,oi->bto", [x, w]), [Slab("parts.0.w", (0,), (1,), (0, 0), IN)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_a_parameter_is_found_however_it_is_used_as_a_linear_map(name: str) -> None:
    shape, use, slabs = USES[name]
    assert [x.weight for x in of(traced(Use(shape, use)), "w")] == slabs


UNCUT: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "a changed parameter": (IN, lambda x, w: x @ torch.tanh(w)),
    "a copy that is written to": (IN, lambda x, w: x @ w.clone().mul_(2)),
    "a copy that was cut off": (IN, lambda x, w: x @ w.clone().detach()),
    "a copy with an entry of its own": (IN, lambda x, w: x @ torch.cat([w[:1] * 0 + 1, torch.ones_like(w[1:])])),
    "its square": (IN, lambda x, w: x @ (w * w)),
    "an elementwise product": ((WIDTH,), lambda x, w: x * w),
    "a diagonal of it": (IN, lambda x, w: x * w.diagonal()),
    "a convolution of several points": (
        (WIDTH, WIDTH, 3), lambda x, w: functional.conv1d(x.mT, w, padding=1).mT
    ),
    "an einsum that keeps an axis": ((WIDTH,), lambda x, w: torch.einsum("bti,i->bti", x, w)),
    "two parameters with each other": (IN, lambda x, w: x + (w @ w).sum()),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCUT)
def test_what_is_not_a_linear_map_of_a_parameter_is_not_cut(name: str) -> None:
    found = traced(Use(*UNCUT[name]))
    assert of(found, "w") == []
    assert [x.weight.parameter for x in found.linears] == ["head.weight"]


def test_a_transposed_module_is_seen_with_its_axes() -> None:
    (q,) = of(traced(Conv1D(WIDTH, WIDTH)), "weight")
    assert (q.weight.out, q.weight.inner, q.bias is not None) == ((1,), (0,), True)


@pytest.mark.parametrize(("dimensions", "groups"), [(1, 1), (2, 1), (1, 4)])
def test_a_pointwise_convolution_is_a_linear_map_of_channels(dimensions: int, groups: int) -> None:
    (q,) = of(traced(Pointwise(dimensions, groups)), "q.weight")
    assert (q.axis, q.source_axis) == (-1 - dimensions, -1 - dimensions)
    assert (q.inputs, q.outputs, q.grouped) == (WIDTH // groups, SIZE, groups > 1)


def test_chunks_of_one_parameter_begin_where_they_lie_and_so_do_their_biases() -> None:
    found = of(traced(Chunked()), "weight")
    assert [x.weight.start for x in found] == [(0, 0), (SIZE, 0), (2 * SIZE, 0)]
    assert [x.bias.start for x in found if x.bias] == [(0,), (SIZE,), (2 * SIZE,)]


def test_weights_that_are_rearranged_in_memory_are_features_of_the_parameter() -> None:
    found = of(traced(Copied()), "weight")
    assert [x.weight.start for x in found] == [(0, 0), (HEAD, 0), (2 * HEAD, 0)]
    assert [x.outputs for x in found] == [3 * SIZE - 2 * HEAD] * 3


def _parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (6, 5), "b": (5, 4), "c": (2, 3, 5), "d": (4, 3, 5), "e": (2, 4, 3)}
    return {n: torch.randn(shape, generator=generator).requires_grad_() for n, shape in shapes.items()}


COPIES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a copy": (lambda a, b, c, d, e: a.clone(), "a"),
    "a part": (lambda a, b, c, d, e: a[1:4].clone(), "a"),
    "every second row": (lambda a, b, c, d, e: a[1::2], "a"),
    "some columns": (lambda a, b, c, d, e: a[:, 1:3].contiguous(), "a"),
    "turned in memory": (lambda a, b, c, d, e: a.T.contiguous().T, "a"),
    "a transposed one": (lambda a, b, c, d, e: b.T.double(), "b"),
    "two of them": (lambda a, b, c, d, e: torch.cat([a, b.T, a[:2]]), "ab"),
    "stacked": (lambda a, b, c, d, e: torch.stack([a, a.flip(0)]).flatten(0, 1), "a"),
    "repeated": (lambda a, b, c, d, e: a.repeat(2, 1).repeat_interleave(3, dim=0), "a"),
    "one of three axes": (lambda a, b, c, d, e: c[1].clone(), "c"),
    "along another axis": (lambda a, b, c, d, e: c[:, 1].clone(), "c"),
    "of three axes": (lambda a, b, c, d, e: c.reshape(6, 5).clone(), "c"),
    "of three axes in another order": (lambda a, b, c, d, e: d.transpose(0, 1).reshape(12, 5), "d"),
    "read along two axes": (lambda a, b, c, d, e: e.flatten(1).clone(), "e"),
    "all at once": (lambda a, b, c, d, e: torch.cat([c[0], torch.cat([a, c[1]]).roll(2, 0), b.T]).clone(), "abc"),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_told_row_by_row_what_it_is_of(name: str) -> None:
    make, made_of = COPIES[name]
    parameters = _parameters()
    weights = Weights({p.untyped_storage().data_ptr(): [(n, p)] for n, p in parameters.items()})

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            weights.note(func, args, kwargs or {}, result)
            return result

    with Noting():
        copy = make(*parameters.values())
    parts = weights.parts(copy, (0,), (1,))
    assert parts is not None
    assert {part.slab.parameter for part in parts} == set(made_of)
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(len(copy)))
    for part in parts:
        slab, p = part.slab, parameters[part.slab.parameter].detach()
        for d in range(p.ndim):
            # Of a dimension that counts nothing there is one index; of others what comes from the start on.
            count = p.shape[d] - slab.start[d] if d in (*slab.out, *slab.inner) else 1
            p = p.narrow(d, slab.start[d], count)
        own = p.permute(*slab.out, *slab.inner, *(d for d in range(p.ndim) if d not in (*slab.out, *slab.inner)))
        own = own.reshape(math.prod(p.shape[d] for d in slab.out), -1)[:, : copy.shape[1]]
        assert torch.equal(own[part.features].to(copy.dtype), copy.detach()[part.rows])


@pytest.mark.parametrize("change", [lambda a: a.T.reshape(6, 5), lambda a: torch.cat([a[:, :2], a[:, 3:]], 1)])
def test_a_copy_whose_rows_are_none_of_the_parameter_is_not_told(change: Callable[[Tensor], Tensor]) -> None:
    a = _parameters()["a"]
    weights = Weights({a.untyped_storage().data_ptr(): [("a", a)]})
    copy = change(a)
    weights.note(torch.reshape, (a.T, (6, 5)), {}, copy) if copy.shape == a.shape else None
    assert weights.parts(copy, (0,), (1,)) is None


@pytest.mark.parametrize("weights", [False, True])
def test_the_attention_of_torch_is_opened(weights: bool) -> None:
    found = traced(Torch(weights=weights))
    assert [x.weight.start[0] for x in of(found, "attention.in_proj_weight")] in ([0, SIZE, 2 * SIZE], [0])
    assert len(found.softmaxes) == 1
    assert len(of(found, "attention.out_proj.weight")) == 1


@pytest.mark.parametrize("training", [False, True])
def test_the_fast_path_of_torch_is_not_taken_and_is_as_it_was_afterwards(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 16, batch_first=True)
    model = Residual(layer).train(training)
    before = torch.backends.mha.get_fastpath_enabled()
    found = trace(model, inputs())
    assert len(found.softmaxes) == 1
    assert torch.backends.mha.get_fastpath_enabled() == before


@needs_grouped_attention
def test_scaled_dot_product_attention_is_opened_with_all_its_options() -> None:
    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype)
        y = functional.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=0.3, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)

    found = traced(Projected(core, key_heads=2))
    (softmax,) = found.softmaxes
    assert softmax.logits.shape[1] == 4
    assert len(found.sources(softmax.logits)) == 2


@pytest.mark.parametrize(
    "core",
    [
        plain,
        lambda m, x, q, k, v: (functional.softmax(q @ k.mT, dim=3, dtype=torch.float64) @ v).transpose(1, 2).flatten(2),
        lambda m, x, q, k, v: ((q @ k.mT).softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2),
    ],
)
def test_every_way_to_call_softmax_is_seen(core: Callable[..., Tensor]) -> None:
    assert len(traced(Projected(core)).softmaxes) == 1


def test_a_softmax_over_another_axis_has_it_last() -> None:
    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT).softmax(1) @ v).transpose(1, 2).flatten(2)

    found = traced(Projected(core))
    (softmax,) = found.softmaxes
    assert softmax.logits.shape[-1] == Projected(core).heads
    torch.testing.assert_close(softmax.leaf.sum(-1), torch.ones_like(softmax.leaf[..., 0]))


def test_a_softmax_of_plain_data_is_none_of_attention() -> None:
    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.transpose(1, 2).flatten(2) + x.detach().softmax(-1).mean()

    assert traced(Projected(core)).softmaxes == []


def test_products_within_vmap_and_picks_by_keyword_are_left_alone() -> None:
    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        best = torch.topk(input=q, k=1).values
        stacked = torch.func.vmap(torch.matmul)(q, k.mT).softmax(-1)
        return ((stacked + best) @ v).transpose(1, 2).flatten(2)

    assert len(traced(Projected(core)).softmaxes) == 1


def test_a_bias_that_is_put_together_leaves_the_map_seen() -> None:
    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = functional.linear(x, m.q.weight, torch.cat([m.q.bias[:3], m.k.bias[3:]]))
        q = y.unflatten(-1, (m.heads, -1)).transpose(1, 2)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)

    found = traced(Projected(core))
    (softmax,) = found.softmaxes
    maps = of(found, "q.weight")
    assert [x.bias is None for x in maps] == [False, True]
    assert any(s is maps[1].leaf for s in found.sources(softmax.logits))
    named = {found.parameters[id(s)] for s in found.sources(softmax.logits) if id(s) in found.parameters}
    assert {"parts.0.q.bias", "parts.0.k.bias"} <= named


def test_the_leaves_that_a_tensor_depends_on_are_the_last_ones_cut() -> None:
    found = traced(Projected())
    q, k, v, o, head = found.linears
    (softmax,) = found.softmaxes
    logits = found.sources(softmax.logits)
    assert {id(s) for s in logits} == {id(q.leaf), id(k.leaf)}
    assert {id(s) for s in found.sources(o.source)} == {id(softmax.leaf), id(v.leaf)}
    assert {id(s) for s in found.sources(head.source)} == {id(o.leaf)}


def test_entries_of_parameters_that_are_used_by_themselves_are_leaves_too() -> None:
    found = traced(Projected(lambda m, x, q, k, v: plain(m, x, q * m.scale, k, v), scale=(HEAD,)))
    names = {found.parameters.get(id(s)) for s in found.sources(found.softmaxes[0].logits)}
    assert "parts.0.scale" in names


def test_what_is_written_in_place_on_a_cut_is_followed() -> None:
    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q *= 2
        k += 1
        return plain(m, x, q, k, v)

    assert len(traced(Projected(core)).sources(traced(Projected(core)).softmaxes[0].logits)) == 2


# ----------------------------------------------------------------------------------------------------- norms, calls


def test_what_a_norm_wrote_is_known_by_its_storage() -> None:
    model = Model()
    found = trace(model, inputs())
    assert {found.norm_of(x.source) for x in found.linears[:3]} == {"norm"}
    assert found.bypassed == set()


def test_a_norm_is_a_module_with_a_vector_of_weights_and_no_parameters_inside() -> None:
    norm, around = nn.LayerNorm(3), nn.Sequential(nn.LayerNorm(3, elementwise_affine=False))
    assert norm_parameters(norm) == (norm.weight, norm.bias)
    rms = Norm()
    assert norm_parameters(rms) == (rms.weight, None)
    around.gamma = nn.Parameter(torch.ones(3))
    assert norm_parameters(around) == (around.gamma, None)
    assert norm_parameters(nn.LayerNorm(3, elementwise_affine=False)) is None
    assert norm_parameters(nn.Linear(3, 3)) is None
    assert norm_parameters(nn.Sequential(nn.LayerNorm(3))) is None


def test_arguments_of_first_calls_are_kept_as_values_without_a_graph() -> None:
    model = Residual(Projected(), Projected())
    found = trace(model, inputs())
    assert {"", "parts.0", "parts.1"} <= set(found.calls)
    (x,) = found.calls["parts.0"].args
    assert torch.equal(x, inputs()["x"])
    assert x.data_ptr() != inputs()["x"].data_ptr()
    assert not found.calls["parts.1"].args[0].requires_grad


# -------------------------------------------------------------------------------------------- nothing of it remains

FAMILY_NAMES = sorted(BY_NAME)


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_traced_model_is_bit_identical_in_weights_modes_and_flags(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    model.train()
    next(model.children()).eval()
    flags = {}
    for i, (n, p) in enumerate(model.named_parameters()):
        p.requires_grad_(i % 2 == 0)
        flags[n] = p.requires_grad
    modes, before = [m.training for m in model.modules()], state(model)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    trace(model, batch_of(name, dtype))
    assert identical(model, before)
    assert [m.training for m in model.modules()] == modes
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert all(p.grad is None for p in model.parameters())
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks


def test_a_frozen_model_is_seen_through_and_stays_frozen() -> None:
    model = Residual(Projected()).requires_grad_(False)
    found = trace(model, inputs())
    assert len(found.sources(found.softmaxes[0].logits)) == 2
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_forward_pass_leaves_no_trace_on_the_model(raised: type[BaseException]) -> None:
    model = Residual(Projected()).train()
    model.parts[0].k.requires_grad_(False)  # type: ignore[union-attr, operator]
    before = state(model)

    def fail(module: nn.Module, args: Any) -> None:
        raise raised("on purpose")

    handle = model.head.register_forward_pre_hook(fail)
    fast = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(raised, match="on purpose"):
        trace(model, inputs())
    handle.remove()
    assert identical(model, before)
    assert all(m.training for m in model.modules())
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["parts.0.k.weight", "parts.0.k.bias"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.backends.mha.get_fastpath_enabled() == fast
    # And nothing is left on the stack of modes: the model computes again what it did.
    assert torch.equal(model(inputs()["x"]), model(inputs()["x"]))


def test_hooks_that_the_user_has_put_on_a_model_still_run() -> None:
    model, seen = Residual(Projected()), []
    model.parts[0].register_forward_hook(lambda *_: seen.append("mine"))
    trace(model, inputs())
    trace(model, inputs())
    assert seen == ["mine", "mine"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_trace_does_not_depend_on_whether_gradients_are_on(context: Callable[[], Any]) -> None:
    model = Residual(Fused("s n h"))
    with context():
        found = trace(model, inputs())
        assert len(found.softmaxes) == 1


def test_two_traces_of_one_model_are_alike() -> None:
    one, two = (traced(Projected()) for _ in range(2))
    assert [x.weight for x in one.linears] == [x.weight for x in two.linears]
    assert all(torch.equal(x.leaf, y.leaf) for x, y in zip(one.linears, two.linears, strict=True))


def test_the_random_state_of_the_user_is_not_touched() -> None:
    model = Residual(Projected(lambda m, x, q, k, v: functional.dropout(plain(m, x, q, k, v), training=m.training)))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    trace(model.train(), inputs())
    assert torch.equal(torch.rand(2), expected)
