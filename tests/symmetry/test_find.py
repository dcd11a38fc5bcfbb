"""What is found on nine families and on hand-made models, against tables worked out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from hf_geosharp.errors import InputsError, UsageError
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.trials import probe
from hf_geosharp.symmetry.verify import verify
from tests.families import (
    BY_NAME,
    FAMILIES,
    LAYERS,
    WIDTH,
    Family,
    batch_of,
    build,
    each_family,
    identical,
    randomise,
    state,
)
from tests.symmetry.handmade import (
    HEAD,
    Chain,
    Core,
    Fused,
    Latent,
    Mlp,
    Model,
    Norm,
    Projected,
    Residual,
    attend,
    change,
    half,
    inputs,
    joined,
    outputs,
    split,
)
from tests.symmetry.handmade import WIDTH as HAND_WIDTH
from tests.versions import TORCH


@pytest.fixture(scope="module")
def maps() -> dict[str, SymmetryMap]:
    """The map of each family under the preset full."""
    return {f.name: find_symmetries(build(f.name), batch_of(f.name)) for f in FAMILIES}


def of_kind(found: SymmetryMap, *kinds: str) -> list[Any]:
    return [s for s in found.symmetries if s.kind in kinds]


@each_family
def test_every_attention_has_one_query_key_and_one_value_output_pair(
    family: Family, maps: dict[str, SymmetryMap]
) -> None:
    qk, vo = of_kind(maps[family.name], "qk"), of_kind(maps[family.name], "vo")
    assert len(qk) == len(vo) == family.attentions
    assert [p.module for p in qk] == [p.module for p in vo]
    assert len({p.module for p in qk}) == family.attentions
    assert not maps[family.name].dropped
    assert not maps[family.name].unrecognised


def test_a_module_whose_train_returns_nothing_is_tried_too(maps: dict[str, SymmetryMap]) -> None:
    """LeViT's attention overrides ``train`` like this."""

    def overridden(cls: type[nn.Module]) -> type[nn.Module]:
        return type(cls.__name__, (cls,), {"train": lambda self, mode=True: (cls.train(self, mode), None)[1]})

    model = build("bert")
    for module in list(model.modules())[1:]:
        module.__class__ = overridden(type(module))
    found = find_symmetries(model, batch_of("bert"), cached=False)
    assert [s.name for s in found.symmetries] == [s.name for s in maps["bert"].symmetries]
    assert not found.unrecognised


@each_family
def test_hidden_units_scale_where_the_activation_lets_them(family: Family, maps: dict[str, SymmetryMap]) -> None:
    units = of_kind(maps[family.name], "mlp")
    assert sorted((p.group.name, p.copies) for p in units) == sorted(family.units)
    means = {"read_mean"} if family.means else set()
    means |= {"written_mean", "stream_bias"} if family.constants else set()
    assert {s.kind for s in maps[family.name].symmetries} <= {
        "qk", "vo", "mlp", "key_bias", "value_bias", "norm_gain", *means
    }  # fmt: skip


@each_family
def test_groups_copies_and_dimensions_are_those_of_the_architecture(
    family: Family, maps: dict[str, SymmetryMap]
) -> None:
    for p in of_kind(maps[family.name], "qk"):
        assert (p.group.name, p.copies, p.dimension) == (family.qk_group, family.qk_copies, family.qk_dimension)
    for p in of_kind(maps[family.name], "vo"):
        assert (p.group.name, p.copies, p.dimension) == (f"GL({family.head_dim})", family.heads, family.vo_dimension)


@each_family
def test_the_dimension_of_the_whole_group_is_the_sum_worked_out_by_hand(
    family: Family, maps: dict[str, SymmetryMap]
) -> None:
    per_attention = family.qk_dimension + family.vo_dimension
    per_attention += family.heads * family.head_dim * (int(family.key_bias) + int(family.value_bias))
    # A norm with a bias folds both; only T5 and the rotary families have norms without.
    per_norm = WIDTH * (1 if family.casts and family.name != "gpt2" else 2)
    folds_and_pairs = family.attentions * per_attention + sum(family.gains.values()) * per_norm
    assert (
        maps[family.name].dimension
        == folds_and_pairs + sum(n for _, n in family.units) + family.means + family.constants
    )


@each_family
def test_biases_are_rows_of_their_factors(family: Family, maps: dict[str, SymmetryMap]) -> None:
    model = build(family.name)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    has_bias = family.key_bias or family.name == "qwen2"
    group = 2 if family.rotary else 1
    for p in of_kind(maps[family.name], "qk", "vo"):
        g, h = p.factors(weights)
        rows = WIDTH + int(has_bias)
        if p.kind == "qk":
            assert (g.shape[1], h.shape[1]) == (group * rows, rows)
        else:
            assert (g.shape[1], h.shape[1]) == (rows, group * WIDTH)


@each_family
def test_key_and_value_biases_fold_where_the_function_does_not_feel_them(
    family: Family, maps: dict[str, SymmetryMap]
) -> None:
    found = maps[family.name]
    assert len(of_kind(found, "key_bias")) == family.attentions * family.key_bias
    assert len(of_kind(found, "value_bias")) == family.attentions * family.value_bias


@each_family
def test_the_gains_found_are_those_of_norms_that_only_linear_maps_read(
    family: Family, maps: dict[str, SymmetryMap]
) -> None:
    gains = [s.module for s in of_kind(maps[family.name], "norm_gain")]
    assert Counter(next((end for end in family.gains if m.endswith(end)), m) for m in gains) == Counter(family.gains)


def test_post_norm_gains_of_bert_are_left_alone_but_for_the_last_which_only_the_pooler_reads(
    maps: dict[str, SymmetryMap],
) -> None:
    assert [g.module for g in of_kind(maps["bert"], "norm_gain")] == [
        f"bert.encoder.layer.{LAYERS - 1}.output.LayerNorm"
    ]


def test_the_final_norm_of_gpt2_is_not_folded_because_its_reader_is_tied_to_the_embedding(
    maps: dict[str, SymmetryMap],
) -> None:
    assert "transformer.ln_f" not in {g.module for g in of_kind(maps["gpt2"], "norm_gain")}


def test_untying_the_embedding_of_gpt2_lets_its_final_gain_fold_but_not_its_bias() -> None:
    config = BY_NAME["gpt2"].config()
    config.tie_word_embeddings = False
    model = BY_NAME["gpt2"].make(config).double()
    found = find_symmetries(model, batch_of("gpt2"))
    (final,) = [g for g in of_kind(found, "norm_gain") if g.module == "transformer.ln_f"]
    assert (final.folds_bias, final.dimension) == (False, WIDTH)


def test_tying_the_embedding_of_llama_keeps_its_final_gain_from_folding() -> None:
    config = BY_NAME["llama"].config()
    config.tie_word_embeddings = True
    found = find_symmetries(BY_NAME["llama"].make(config).double(), batch_of("llama"))
    assert "model.norm" not in {g.module for g in of_kind(found, "norm_gain")}


@each_family
def test_the_preset_paper_folds_nothing_and_finds_the_same_pairs(family: Family, maps: dict[str, SymmetryMap]) -> None:
    found = find_symmetries(build(family.name), batch_of(family.name), preset="paper")
    assert found.folds == ()
    assert list(found.pairs) == of_kind(maps[family.name], "qk", "vo")


@each_family
def test_the_preset_attention_folds_biases_but_no_gains_and_means(family: Family, maps: dict[str, SymmetryMap]) -> None:
    found = find_symmetries(build(family.name), batch_of(family.name), preset="attention")
    assert list(found.pairs) == of_kind(maps[family.name], "qk", "vo")
    assert found.folds == tuple(f for f in maps[family.name].folds if f.kind in ("key_bias", "value_bias"))


@each_family
def test_finding_leaves_weights_and_modes_as_they_were(family: Family) -> None:
    model = build(family.name)
    model.train()
    next(model.children()).eval()
    modes, before = [m.training for m in model.modules()], state(model)
    find_symmetries(model, batch_of(family.name))
    assert identical(model, before)
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


@each_family
def test_inputs_made_up_from_the_configuration_find_the_same(family: Family, maps: dict[str, SymmetryMap]) -> None:
    assert find_symmetries(build(family.name)) == maps[family.name]


@each_family
def test_a_float32_model_has_the_same_symmetries(family: Family, maps: dict[str, SymmetryMap]) -> None:
    assert find_symmetries(build(family.name, torch.float32), batch_of(family.name, torch.float32)) == maps[family.name]


@each_family
def test_a_bfloat16_model_has_the_same_pairs_and_bias_folds(family: Family, maps: dict[str, SymmetryMap]) -> None:
    found = find_symmetries(build(family.name, torch.bfloat16), batch_of(family.name, torch.bfloat16))
    assert found.pairs == maps[family.name].pairs
    assert of_kind(found, "key_bias") == of_kind(maps[family.name], "key_bias")
    assert of_kind(found, "value_bias") == of_kind(maps[family.name], "value_bias")


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_biases_fold_behind_a_norm_that_is_fresh_from_initialisation(name: str) -> None:
    """Gains of one and shifts of zero: what is added to all rows of a projection alike is removed by the norm."""
    family = BY_NAME[name]
    torch.manual_seed(0)
    model = family.make().double()
    found = find_symmetries(model, batch_of(name))
    assert len(of_kind(found, "key_bias")) == len(of_kind(found, "value_bias")) == family.attentions


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_default_weights_do_not_make_a_rotary_head_look_like_the_full_group(name: str) -> None:
    torch.manual_seed(0)
    model = BY_NAME[name].make().double()
    found = find_symmetries(model, batch_of(name))
    assert {p.group.name for p in of_kind(found, "qk")} == {"GL(1,C)"}
    assert not of_kind(found, "key_bias")


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_saturated_or_vanishing_attention_does_not_change_what_is_found(
    name: str, maps: dict[str, SymmetryMap]
) -> None:
    for factor in (100.0, 0.001):
        model = build(name)
        with torch.no_grad():
            for p in maps[name].pairs:
                for n in p.parameters if p.kind == "qk" else ():
                    dict(model.named_parameters())[n].mul_(factor)
        found = find_symmetries(model, batch_of(name), preset="attention")
        assert list(found.pairs) == of_kind(maps[name], "qk", "vo")


def test_a_model_without_attention_has_an_empty_map() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)).double()
    assert find_symmetries(model, {"input": torch.randn(3, 4, dtype=torch.float64)}) == SymmetryMap()


def test_a_model_whose_input_cannot_be_made_up_says_which_it_is() -> None:
    with pytest.raises(InputsError, match=r"'input'.*example batch"):
        find_symmetries(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


def _one_weight() -> nn.Module:
    part = Projected()
    part.k.weight = part.q.weight
    return part


class _Adapter(Projected):
    """Values get what a low-rank map adds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HAND_WIDTH, 4, bias=False), nn.Linear(4, 4 * HEAD, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t, 4) for t in (self.q(x), self.k(x), self.v(x) + self.b(self.a(x))))
        return self.o(attend(q, k, v))  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------ hand-made modules


def handmade(twist: str = "", **options: Any) -> SymmetryMap:
    return find_symmetries(Model(twist, **options), inputs())


def kinds(found: SymmetryMap) -> dict[str, str]:
    return {p.kind: p.group.name for p in found.pairs}


def test_plain_attention_of_an_unknown_class_is_understood() -> None:
    found = handmade()
    assert kinds(found) == {"qk": "GL(6)", "vo": "GL(6)"}
    assert {f.name for f in found.folds} == {"norm.gain", "attention.key_bias", "attention.value_bias"}
    assert not found.dropped


@pytest.mark.parametrize("twist", ["nonlinear q", "second reader of q"])
def test_queries_that_are_bent_or_read_twice_have_no_pair_and_that_is_recorded(twist: str) -> None:
    found = handmade(twist)
    assert kinds(found) == {"vo": "GL(6)"}
    assert [u.split(":")[0] for u in found.unrecognised] == ["attention.qk"]
    assert not found.dropped


def test_queries_of_length_one_keep_the_rotations_of_a_head() -> None:
    found = handmade("normed q")
    assert kinds(found) == {"qk": "O(6)", "vo": "GL(6)"}
    assert verify(Model("normed q"), found, [inputs(1)], each=True).map == found


def test_modules_that_are_too_large_to_be_copied_are_named_and_nothing_is_claimed_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = sum(p.numel() for p in Model().attention.parameters())
    monkeypatch.setattr(probe, "LARGEST", size)
    assert handmade().pairs
    monkeypatch.setattr(probe, "LARGEST", size - 1)
    found = handmade()
    assert found.pairs == ()
    sides, (text,) = found.unrecognised[:-1], found.unrecognised[-1:]
    assert sides == ("attention.qk: too large to be tried", "attention.vo: too large to be tried")
    assert text.startswith(f"attention: its {size:,} parameters are more than are copied for a trial ({size - 1:,})")


def test_attention_that_reads_zeros_is_said_to_show_nothing() -> None:
    model = Model()
    model.norm = nn.Threshold(1e9, 0.0)
    found = find_symmetries(model, inputs())
    # Every key is the same, so that queries compare nothing; values have a bias, which goes through.
    assert found.unrecognised == (
        "attention.qk: nothing that it does shows in what the module returns on this example",
    )
    assert kinds(found) == {"vo": "GL(6)"}


class Chunked(nn.Module):
    """Each half of the tokens attends to itself; the output projection belongs to what is around."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(HAND_WIDTH, 4 * HEAD) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (split(p(x), 4) for p in (self.q, self.k, self.v))
            return torch.cat(
                [attend(*(t[:, :, part] for t in (q, k, v))) for part in (slice(3), slice(3, None))], dim=1
            )

    def __init__(self) -> None:
        super().__init__()
        self.halves, self.o = self.Halves(), nn.Linear(4 * HEAD, HAND_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.halves(x))  # type: ignore[no-any-return]


def test_what_moves_parameters_around_a_module_is_tried_on_what_is_around_it() -> None:
    model = Residual(Chunked())
    found = find_symmetries(model, inputs())
    assert kinds(found) == {"qk": "GL(6)", "vo": "GL(6)"}
    assert verify(model, found, [inputs(1)], each=True).map == found


class Bent(Projected):
    """One class of layers that differ in a setting alone: whether, and how, queries are bent."""

    def __init__(self, bound: float | None, by_hook: bool = False) -> None:
        super().__init__(bias=False, out_bias=False)
        self.bound = None if by_hook else bound
        if by_hook and bound is not None:
            self.q.register_forward_hook(lambda module, args, y: y.clamp(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(p(x), 4) for p in (self.q, self.k, self.v))
        return self.o(attend(q if self.bound is None else q.clamp(-self.bound, self.bound), k, v))  # type: ignore[no-any-return]


@pytest.mark.parametrize("plain", [None, 1e9], ids=["without", "far"])
@pytest.mark.parametrize("by_hook", [False, True], ids=["setting", "hook"])
@pytest.mark.parametrize("order", ["10", "01", "1100", "0011", "1010", "11111110"])
def test_a_layer_is_claimed_or_not_for_what_it_computes_whatever_its_class(
    order: str, by_hook: bool, plain: float | None
) -> None:
    found = find_symmetries(Residual(*(Bent(0.3 if one == "1" else plain, by_hook) for one in order)), inputs())
    assert [(p.module, p.group.name) for p in found.pairs if p.kind == "qk"] == [
        (f"parts.{i}", f"GL({HEAD})") for i, one in enumerate(order) if one == "0"
    ]
    assert [text.split(":")[0] for text in found.unrecognised] == [
        f"parts.{i}.qk" for i, one in enumerate(order) if one == "1"
    ]


def test_hooks_may_be_objects_of_any_kind() -> None:
    class Bound:
        """It has an equality, hence no hash."""

        def __eq__(self, other: object) -> bool:
            return True

        def __call__(self, module: nn.Module, args: Any, y: Tensor) -> Tensor:
            return y.clamp(-0.3, 0.3)

    parts = [Bent(None), Bent(None)]
    parts[0].q.register_forward_hook(Bound())
    found = find_symmetries(Residual(*parts), inputs())
    assert [p.module for p in found.pairs if p.kind == "qk"] == ["parts.1"]


@pytest.mark.parametrize("bound", [None, 0.3], ids=["plain", "bent"])
def test_a_claim_is_tried_on_few_layers_of_a_deep_model(bound: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(layers: int) -> int:
        calls: list[object] = []
        measure = probe.Trials.measure
        monkeypatch.setattr(probe.Trials, "measure", lambda *args: calls.append(args) or measure(*args))
        find_symmetries(Residual(*(Bent(bound) for _ in range(layers))), inputs(), prove=False)
        monkeypatch.setattr(probe.Trials, "measure", measure)
        return len(calls)

    assert tried(probe.RETRIES) == tried(8) > 0


def _far(x: Tensor) -> Tensor:
    """As it is up to some size."""
    return x.clamp(-99, 99)


@pytest.mark.parametrize(
    ("core", "ends"),
    [
        (lambda m, x, q, k, v: attend(_far(q), k, v), {"parts.0.qk"}),
        (
            lambda m, x, q, k, v: attend(q, torch.where(k.abs().amax() > 99, torch.tanh(k), k), v),
            {"parts.0.qk", "parts.0.key_bias"},
        ),
        (lambda m, x, q, k, v: attend(q, k, _far(v)), {"parts.0.vo", "parts.0.value_bias"}),
        # What is done to the logits as a whole is nothing to queries and keys.
        (lambda m, x, q, k, v: joined(_far(q @ k.mT).softmax(-1) @ v), {"parts.0.key_bias"}),
        (lambda m, x, q, k, v: attend(q, k, v), set()),
    ],
    ids=["queries", "keys by a branch", "values", "logits", "none"],
)
def test_a_claim_that_ends_on_larger_inputs_is_made_and_its_end_told(core: Core, ends: set[str]) -> None:
    found = find_symmetries(Residual(Projected(core), Projected(core)), inputs())
    assert kinds(found) == {"qk": f"GL({HEAD})", "vo": f"GL({HEAD})"}
    both = ends | {name.replace(".0.", ".1.") for name in ends}
    assert {text.split(": ")[0] for text in found.limited} == both
    assert found.limits.startswith(f"{len(both)} of the symmetries hold only while" if ends else "")
    assert found.without(dict.fromkeys(both, "because")).limits == ""


def test_attention_that_goes_to_one_token_alone_on_larger_inputs_says_nothing() -> None:
    """Saturated, logits do not move what comes out, whatever is done to them."""
    found = find_symmetries(Residual(Projected(lambda m, x, q, k, v: attend(1e3 * q, 1e3 * k, v))), inputs())
    assert kinds(found) == {"qk": f"GL({HEAD})", "vo": f"GL({HEAD})"}
    assert found.limited == ()


class Telling(nn.Module):
    """Attention that returns its keys and values, and what it looked like inside, next to its output."""

    def __init__(self, pack: Callable[[Tensor, dict[str, Any]], Any]) -> None:
        super().__init__()
        self.pack = pack
        self.q, self.k, self.v, self.o = (nn.Linear(HAND_WIDTH, HAND_WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        q, k, v = (split(p(x), HAND_WIDTH // HEAD) for p in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.mT, dim=-1)
        return self.pack(self.o(joined(weights @ v)), {"keys": k, "values": v, "weights": weights})


class Listening(nn.Module):
    """A model that goes on with what ``read`` takes of it."""

    def __init__(self, pack: Callable[[Tensor, dict[str, Any]], Any], read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.attention, self.head, self.read = Telling(pack), nn.Linear(HAND_WIDTH, 5), read
        self.double().eval()
        randomise(self, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.read(self.attention(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("pack", "read", "kinds"),
    [
        (lambda y, inside: (y, inside), lambda out: out[0], {"qk", "vo"}),
        (lambda y, inside: {"inside": inside, "y": y}, lambda out: out["y"], {"qk", "vo"}),
        (lambda y, inside: SimpleNamespace(y=y, **inside), lambda out: out.y + 0 * out.keys.shape[0], {"qk", "vo"}),
        (lambda y, inside: (y, inside), lambda out: (out[1]["keys"].detach().transpose(1, 2), out[0])[1], {"qk", "vo"}),
        (lambda y, inside: (y, inside), lambda out: out[0] + joined(out[1]["keys"]).tanh(), {"vo"}),
        (lambda y, inside: (inside, y), lambda out: torch.stack([out[1], joined(out[0]["values"])]).sum(0), {"qk"}),
    ],
    ids=[
        "a tuple",
        "a dictionary",
        "an object, of which a shape is read",
        "keys are kept",
        "keys are read",
        "values are read in a list",
    ],
)
def test_of_what_a_module_returns_that_counts_which_the_model_reads(
    pack: Callable[[Tensor, dict[str, Any]], Any], read: Callable[[Any], Tensor], kinds: set[str]
) -> None:
    model = Listening(pack, read)
    found = find_symmetries(model, inputs(), cached=False, prove=False)
    assert {p.kind for p in found.pairs} == kinds
    assert all(str(p.group) == f"GL({HEAD})" for p in found.pairs)
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_what_a_model_itself_returns_counts() -> None:
    model = Telling(lambda y, inside: (y, inside["keys"]))
    model.double().eval()
    randomise(model, 0)
    assert {p.kind for p in find_symmetries(model, inputs(), cached=False, prove=False).pairs} == {"vo"}


class Sublayer(nn.Module):
    """What is around a function that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HAND_WIDTH)

    def forward(self, x: Tensor, inside: Callable[[Tensor], Tensor]) -> Tensor:
        return x + inside(self.norm(x))


class Given(nn.Module):
    """Attention that runs inside another module, as a function: no call of its own is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.around = Projected(), Sublayer()

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x, lambda y: self.attention.forward(y))  # type: ignore[no-any-return]


def test_attention_that_is_given_as_a_function_is_tried_with_what_is_around_it() -> None:
    model = Residual(Given(), Given()).float()
    found = find_symmetries(model, {"x": inputs()["x"].float()}, prove=False)
    assert Counter((p.kind, str(p.group), p.copies) for p in found.pairs) == {
        ("qk", f"GL({HEAD})", 4): 2,
        ("vo", f"GL({HEAD})", 4): 2,
    }
    assert not found.unrecognised
    assert verify(model.double(), found, [inputs(1)], each=True).map == found


def test_values_that_are_bent_have_no_pair_and_their_bias_does_not_fold() -> None:
    found = handmade("nonlinear v")
    assert kinds(found) == {"qk": "GL(6)"}
    assert [u.split(":")[0] for u in found.unrecognised] == ["attention.vo"]
    assert "value_bias" not in {f.kind for f in found.folds}


def test_weights_that_do_not_sum_to_one_keep_the_pairs_but_not_the_value_bias_fold() -> None:
    found = handmade("leaky")
    assert kinds(found) == {"qk": "GL(6)", "vo": "GL(6)"}
    assert {f.kind for f in found.folds} == {"key_bias", "norm_gain"}


@pytest.mark.parametrize("twist", ["half", "interleaved"])
def test_both_ways_to_pair_rotary_columns_are_told_apart(twist: str) -> None:
    found, model = handmade(twist), Model(twist)
    assert kinds(found) == {"qk": "GL(1,C)", "vo": "GL(6)"}
    assert {f.kind for f in found.folds} == {"value_bias", "norm_gain"}
    other = handmade("half" if twist == "interleaved" else "interleaved")
    assert found.pairs[0] != other.pairs[0]
    proof = verify(model, found, [inputs(1)])
    assert proof.map == found
    assert proof.deviation is not None
    assert proof.deviation < 1e-12


def test_grouped_queries_move_with_their_key_head() -> None:
    found = handmade(heads=4, key_heads=2)
    assert {p.kind: p.copies for p in found.pairs} == {"qk": 2, "vo": 2}
    assert verify(Model(heads=4, key_heads=2), found, [inputs(1)]).map == found


def test_no_output_bias_keeps_the_value_bias_as_a_row() -> None:
    found = handmade(out_bias=False)
    assert {f.kind for f in found.folds} == {"key_bias", "norm_gain"}
    vo = next(p for p in found.pairs if p.kind == "vo")
    assert [v.parameter for v in vo.g] == ["attention.v_proj.weight", "attention.v_proj.bias"]
    assert found.coordinates(vo) == vo


def test_folded_biases_are_no_coordinates_of_their_pairs() -> None:
    found = handmade()
    for p in found.pairs:
        names = {v.parameter for v in (*found.coordinates(p).g, *found.coordinates(p).h)}
        assert names.isdisjoint({"attention.k_proj.bias", "attention.v_proj.bias"})


def test_a_norm_that_multiplies_by_one_plus_weight_folds_with_that_offset() -> None:
    (fold,) = of_kind(handmade(norm=Norm(offset=1.0, bias=True)), "norm_gain")
    assert (fold.offset, fold.folds_bias) == (1.0, True)


def test_a_norm_bias_stays_where_its_readers_have_none() -> None:
    (fold,) = of_kind(handmade(norm=Norm(bias=True), bias=False), "norm_gain")
    assert not fold.folds_bias


@pytest.mark.parametrize("heads", [7, 3, 1, None])
def test_heads_are_read_off_the_computation_whatever_the_configuration_says(heads: int | None) -> None:
    model = Model()
    model.config.num_attention_heads = heads
    found = find_symmetries(model, inputs())
    assert found == handmade()
    assert {p.copies for p in found.pairs} == {4}


def test_projections_inside_other_modules_are_found_where_their_parameters_are() -> None:
    model = Model()
    model.attention.q_proj = nn.Sequential(model.attention.q_proj, nn.Identity())
    found = find_symmetries(model, inputs())
    assert kinds(found) == {"qk": "GL(6)", "vo": "GL(6)"}
    assert "attention.q_proj.0.weight" in found.parameters
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_attention_that_is_not_called_is_not_claimed() -> None:
    model = Model()
    model.idle = Model().attention
    found = find_symmetries(model, inputs())
    assert {p.module for p in found.pairs} == {"attention"}
    assert not found.dropped


def test_one_module_called_twice_is_one_site() -> None:
    model = Model()
    once = model.attention
    model.again = once
    forward = model.forward
    model.forward = lambda x: forward(x + 0.1 * once(model.norm(x)))  # type: ignore[method-assign]
    found = find_symmetries(model, inputs())
    assert len(found.pairs) == 2
    assert verify(model, found, [inputs(1)]).map == found


def test_an_exception_in_the_forward_pass_leaves_weights_and_modes_as_they_were() -> None:
    model = Model()
    model.train()
    before = state(model)
    model.head.register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        find_symmetries(model, inputs())
    assert identical(model, before)
    assert all(m.training for m in model.modules())


def _fail(module: nn.Module, args: Any) -> None:
    raise RuntimeError("on purpose")


# -------------------------------------------------------------------------------------------------------- robustness


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_fresh_model_has_the_symmetries_of_a_trained_one(name: str, maps: dict[str, SymmetryMap]) -> None:
    """Weights of one, biases of zero and flat attention look more symmetric than they are."""
    torch.manual_seed(0)
    model = BY_NAME[name].make()
    found = find_symmetries(model, batch_of(name, torch.float32))
    assert found == maps[name]


@pytest.mark.parametrize("factor", [1e-3, 1e2])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tiny_and_huge_weights_do_not_change_what_is_found(
    name: str, factor: float, maps: dict[str, SymmetryMap]
) -> None:
    model = build(name)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.ndim > 1 and "emb" not in n and "wte" not in n:
                p.mul_(factor)
    assert find_symmetries(model, batch_of(name)) == maps[name]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_one_token_claims_nothing_that_does_not_hold(name: str) -> None:
    model, batch = build(name), batch_of(name)
    short = {k: v[:, :1] if v.ndim == 2 else v for k, v in batch.items()}
    found = find_symmetries(model, short, preset="attention")
    assert verify(model, found, [batch]).map == found


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_tokens_that_are_all_alike_claim_nothing_that_does_not_hold(name: str) -> None:
    model, batch = build(name), batch_of(name)
    alike = {**batch, "input_ids": torch.full_like(batch["input_ids"], 7)}
    found = find_symmetries(model, alike, preset="attention")
    assert verify(model, found, [batch]).map == found


@each_family
def test_a_frozen_model_has_the_same_symmetries_and_stays_frozen(family: Family, maps: dict[str, SymmetryMap]) -> None:
    model = build(family.name).requires_grad_(False)
    assert find_symmetries(model, batch_of(family.name)) == maps[family.name]
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_what_is_found_does_not_depend_on_whether_gradients_are_on(context: Any) -> None:
    model = Residual(Fused("s n h"))
    expected = find_symmetries(model, inputs())
    with context():
        assert find_symmetries(model, inputs()) == expected


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_how_attention_is_computed_does_not_change_what_is_found(
    name: str, implementation: str, maps: dict[str, SymmetryMap]
) -> None:
    config = BY_NAME[name].config()
    config._attn_implementation = implementation
    model = BY_NAME[name].make(config).double()
    randomise(model, 0)
    assert find_symmetries(model, batch_of(name)) == maps[name]


# ---------------------------------------------------------------------------- what a score makes of what was found

MODULES = {
    "attention": lambda: Projected(),
    "rotary": lambda: Projected(lambda m, x, q, k, v: attend(half(q), half(k), v)),
    "three maps with relus": lambda: Chain(torch.relu, 20, 18),
    "three maps in a row": lambda: Chain(lambda x: x, 20, 18),
    "a unit gated by relu": lambda: Mlp(torch.relu, gated=True),
    "keys and values of a latent": lambda: Latent(),
    "one weight for queries and keys": _one_weight,
    "adapters on values": lambda: _Adapter(),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_the_coordinates_of_a_score_are_those_of_the_same_function(name: str, metric: str) -> None:
    """Pairs that have entries in common would overwrite each other's."""
    model = Residual(MODULES[name]())
    base, found = outputs(model, inputs()), find_symmetries(model, inputs())
    with borrow(model) as borrowed:
        chart = Chart(borrowed, found, Geometry(metric, "second"))
        chart.write(chart.space.zeros())
        assert change(model, inputs(), base) < 1e-12


def test_whoever_waits_hears_that_it_searches() -> None:
    heard: list[None] = []
    find_symmetries(build("bert"), batch_of("bert"), cached=False, alive=lambda: heard.append(None))
    assert len(heard) > 3


class Checkpointed(nn.Module):
    """Attention whose values are computed anew in the backward pass, which no derivative goes through twice."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

    def attend(self, x: Tensor) -> Tensor:
        return self.o(torch.softmax(self.q(x) @ self.k(x).mT, dim=-1) @ self.v(x))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.utils.checkpoint.checkpoint(self.attend, x, use_reentrant=False)
        return x + result


def test_a_model_that_cannot_be_taken_apart_is_named() -> None:
    model, inputs = Checkpointed().double(), {"x": torch.rand(2, 15, 6, dtype=torch.float64)}
    found = find_symmetries(model, inputs)
    assert found.dimension == 0
    (note,) = found.unrecognised
    assert note.startswith("Checkpointed: it cannot be taken apart (CheckpointError: ")


def test_a_model_that_does_not_run_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        find_symmetries(Checkpointed().double(), {"x": torch.rand(2, 15, 5, dtype=torch.float64)})


def test_a_trial_that_cannot_be_run_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a model without symmetries."""

    def broken(*args: Any, **options: Any) -> Any:
        raise AttributeError("no such thing")

    monkeypatch.setattr(probe.LocalTwin, "run", broken)
    found = find_symmetries(Residual(Projected()), inputs(), cached=False)
    assert not found.pairs
    sides = [text.partition(": ")[2] for text in found.unrecognised if ".qk: " in text or ".vo: " in text]
    assert sides == ["it could not be tried by itself (AttributeError: no such thing)"] * 2


class Drawing(nn.Module):
    """A model that draws numbers in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual(Projected())

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y + 0 * torch.rand_like(y)  # type: ignore[no-any-return]


def test_a_search_leaves_the_random_numbers_as_they_were() -> None:
    model, batch = Drawing(), inputs()
    state = torch.get_rng_state()
    assert find_symmetries(model, batch, cached=False).pairs
    assert torch.equal(torch.get_rng_state(), state)


def test_another_preset_is_refused_before_anything_is_done() -> None:
    with pytest.raises(UsageError, match="preset is 'ful'; it is one of full, attention, paper"):
        find_symmetries(nn.Linear(1, 1), preset="ful")


class Packed(NamedTuple):
    """What a module hands on to the next."""

    last_hidden_state: Tensor
    length: int


class Unpacking(Projected):
    """Attention to what is packed."""

    def forward(self, packed: Any) -> Tensor:
        return super().forward(packed.last_hidden_state)


class Packing(nn.Module):
    """Packs its input for the module inside."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.pack, self.attention = pack, Unpacking()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.pack(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "pack",
    [lambda x: Packed(x, x.shape[1]), lambda x: BaseModelOutput(last_hidden_state=x)],
    ids=["a named tuple", "an output of transformers"],
)
def test_a_module_is_run_by_itself_on_what_it_was_given_in_a_container_of_its_own_kind(
    pack: Callable[[Tensor], Any],
) -> None:
    plain = find_symmetries(Residual(Projected()), inputs())
    found = find_symmetries(Residual(Packing(pack)), inputs())
    assert found.dimension == plain.dimension > 0
    assert not found.unrecognised


def _in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.skipif(TORCH < (2, 6), reason="torch can be told to run code as it was written from 2.6 on")
@pytest.mark.parametrize(
    "compiled",
    [_in_place, lambda module: torch.compile(module, backend="eager")],
    ids=["in place", "in a module around it"],
)
def test_a_part_that_is_compiled_is_searched_like_one_that_is_not(compiled: Callable[[nn.Module], nn.Module]) -> None:
    """What looks into its calls is not compiled along with it."""
    model = Residual(Projected(), Mlp(torch.relu))
    plain = find_symmetries(model, inputs())
    model.parts[0] = compiled(model.parts[0])
    found = find_symmetries(model, inputs())
    assert [(p.kind, p.group, p.copies) for p in found.pairs] == [(p.kind, p.group, p.copies) for p in plain.pairs]
    assert not found.unrecognised
    base = outputs(model, inputs(1))
    found.apply(model, found.random_element(model, seed=1, condition=30.0))
    assert change(model, inputs(1), base) < 1e-11
