"""Scores of single parts: that nothing else moves, against models in which nothing else can."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp import SharpnessResult, score
from hf_geosharp.errors import GeosharpWarning, UsageError
from hf_geosharp.layers import layer_of
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.progress import Progress
from hf_geosharp.sharpness.result import PartScore
from hf_geosharp.sharpness.selection import Selection, heads_of, selections
from hf_geosharp.symmetry.find import find_symmetries
from tests.families import batch_of, build
from tests.sharpness.tiny import bert, bert_batches, randomise

SHORT: dict[str, Any] = {"steps": 6, "reproducibility": False}


def only(model: Any, prefix: str) -> Any:
    """A copy in which all parameters but those below a prefix are buffers, which no score knows as weights."""
    twin = copy.deepcopy(model)
    for name, module in twin.named_modules():
        for own, p in list(module._parameters.items()):
            if p is not None and not f"{name}.{own}".startswith(f"{prefix}."):
                del module._parameters[own]
                module.register_buffer(own, p.detach().clone())
    return twin


@pytest.mark.parametrize("metric", ["inv", "mix", "euclidean"])
@pytest.mark.slow
def test_a_layer_scores_as_a_model_in_which_only_it_has_weights(metric: str) -> None:
    model, batches = bert().double(), bert_batches(2)
    options = {**SHORT, "metric": metric, "symmetries": "attention"}
    parts = score(model, batches, per="layer", **options).per
    names = ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler", "classifier"]
    assert [part.part for part in parts] == names
    assert [part.layer for part in parts] == [None, 0, 1, None, None]
    for part in parts if metric == "euclidean" else parts[1:3]:
        alone = score(only(model, part.part), batches, **options)
        assert part.value == pytest.approx(alone.geodesic_sharpness, rel=1e-9)
        assert part.stderr == pytest.approx(alone.stderr, rel=1e-6)


def test_rotary_and_gated_layers_too() -> None:
    model, batches = build("llama"), [batch_of("llama")]
    part = score(model, batches, per="layer", **SHORT).per[1]
    assert part.part == "model.layers.0"
    alone = score(only(model, part.part), batches, **SHORT)
    # Stock Llama rounds to float32 inside.
    assert part.value == pytest.approx(alone.geodesic_sharpness, rel=1e-5)


@pytest.mark.parametrize("per", ["layer", "kind"])
def test_parts_are_the_same_whether_their_parameters_are_bundled_or_not(
    per: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a model of usual size are too large for it."""
    found = []
    for small in (0, 1 << 17):
        monkeypatch.setattr("hf_geosharp.sharpness.loose._SMALL", small)
        result = score(bert().double(), bert_batches(1), per=per, **SHORT)
        found.append({part.part: part.value for part in result.per} | result.share)
    assert list(found[0]) == list(found[1])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


WIDTH, HEAD = 6, 3


class TwoHeads(nn.Module):
    """Attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 2 * HEAD, bias=False) for _ in range(3))
        self.o = nn.Linear(2 * HEAD, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (2, HEAD)).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = torch.softmax(q @ k.mT / HEAD**0.5, -1) @ v
        return self.o(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class OneHead(nn.Module):
    """One head of two with weights of its own."""

    def __init__(self, whole: TwoHeads, head: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEAD, bias=False) for _ in range(3))
        self.o = nn.Linear(HEAD, WIDTH, bias=False)
        self.double()
        own = slice(head * HEAD, (head + 1) * HEAD)
        with torch.no_grad():
            for name in "qkv":
                getattr(self, name).weight.copy_(getattr(whole, name).weight[own])
            self.o.weight.copy_(whole.o.weight[:, own])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(torch.softmax(q @ k.mT / HEAD**0.5, -1) @ v)  # type: ignore[no-any-return]


class Reader(nn.Module):
    """Attention, what is ``beside`` it, and a readout."""

    def __init__(self, attention: nn.Module, beside: nn.Module | None = None) -> None:
        super().__init__()
        self.attention, self.beside = attention, beside
        self.readout = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.attention(x) if self.beside is None else self.attention(x) + self.beside(x)
        logits = self.readout(torch.tanh(x + y).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def one_head(model: Reader, head: int) -> Any:
    """The same function with the weights of one head alone; the other's, and the readout's, are constants."""
    assert isinstance(model.attention, TwoHeads)
    twin = Reader(OneHead(model.attention, head), OneHead(model.attention, 1 - head)).double()
    twin.readout.load_state_dict(model.readout.state_dict())
    return only(twin, "attention")


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_a_head_scores_as_a_model_in_which_only_it_has_weights(metric: str) -> None:
    model = randomise(Reader(TwoHeads()).double(), scale=0.8)
    generator = torch.Generator().manual_seed(4)
    batch = {
        "x": torch.randn(8, 5, WIDTH, generator=generator, dtype=torch.float64),
        "labels": torch.randint(3, (8,), generator=generator),
    }
    result = score(model, [batch], metric=metric, per="head", **SHORT)
    assert [part.part for part in result.per] == ["attention head 0", "attention head 1"]
    assert result.pairs.by_kind == {"qk GL(3)": 2, "vo GL(3)": 2}
    for part in result.per:
        assert part.head is not None
        alone = score(one_head(model, part.head), [batch], metric=metric, **SHORT)
        assert alone.pairs.by_kind == {"qk GL(3)": 1, "vo GL(3)": 1}
        assert part.value == pytest.approx(alone.geodesic_sharpness, rel=1e-9)
        assert part.value < result.geodesic_sharpness


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_parts_do_not_meet_and_only_heads_leave_something_out(family: str) -> None:
    model = build(family)
    with borrow(model) as borrowed:
        chart = Chart(borrowed, find_symmetries(model, batch_of(family)), Geometry())
        u = chart.space.random(torch.Generator().manual_seed(0))
        for by in ("layer", "kind", "head"):
            pieces = [part.within(chart.space).project_(u.clone()) for part in selections(chart, by)]
            moved = sum((piece.flat() != 0).int() for piece in pieces)
            assert isinstance(moved, Tensor)
            assert int(moved.max()) == 1
            assert bool((moved[u.flat() != 0] == 1).all()) == (by != "head")
            # What is projected stays horizontal: parts are not coupled.
            for piece in pieces:
                again = chart.space.horizontal_(piece.clone())
                assert torch.allclose(again.flat(), piece.flat(), rtol=0, atol=1e-12)


def test_outside_of_a_layer_the_weights_stay_where_they_are() -> None:
    model, batch = bert().double(), bert_batches(1)[0]
    with borrow(model) as borrowed:
        chart = Chart(borrowed, find_symmetries(model, batch, preset="attention"), Geometry())
        chart.write(chart.space.zeros())
        base = {name: leaf.tensor.clone() for name, leaf in borrowed.leaves.items()}
        layer = selections(chart, "layer")[2]
        space = layer.within(chart.space)
        chart.write(space.random(torch.Generator().manual_seed(1)))
        moved = {name for name, leaf in borrowed.leaves.items() if not torch.equal(leaf.tensor, base[name])}
    assert moved
    assert all(name.startswith("bert.encoder.layer.1.") for name in moved)


def test_what_is_not_finite_elsewhere_stays_out() -> None:
    model, batch = bert().double(), bert_batches(1)[0]
    with borrow(model) as borrowed:
        chart = Chart(borrowed, find_symmetries(model, batch), Geometry())
        space = selections(chart, "head")[0].within(chart.space)
        u = space.zeros()
        for piece in u.pieces:
            piece.fill_(float("nan"))
        flat = space.project_(u).flat()
    assert 0 < int(flat.isnan().sum()) < len(flat)
    assert bool((flat.isnan() | (flat == 0)).all())


def test_heads_that_share_a_key_are_one_and_their_frequencies_stay_together() -> None:
    pairs = find_symmetries(build("llama"), batch_of("llama")).pairs
    qk, vo = (next(p for p in pairs if p.kind == kind) for kind in ("qk", "vo"))
    assert heads_of(qk).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]  # two key heads of four frequencies
    assert heads_of(vo).tolist() == [[0], [1]]
    whole = selections_of("llama", "head")
    assert [(part.layer, part.head) for part in whole] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def selections_of(family: str, by: str) -> tuple[Selection, ...]:
    model = build(family)
    with borrow(model) as borrowed:
        return selections(Chart(borrowed, find_symmetries(model, batch_of(family)), Geometry()), by)


def test_kinds_are_those_of_the_pairs_and_of_the_rest() -> None:
    kinds = {part.kind for part in selections_of("llama", "kind")}
    assert kinds == {"qk", "vo", "mlp", "embeddings", "matrices"}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("bert.encoder.layer.3.attention.self.query.weight", ("bert.encoder.layer.3", 3)),
        ("transformer.h.11.attn.c_attn.bias", ("transformer.h.11", 11)),
        ("encoder.block.2.layer.0.SelfAttention.q.weight", ("encoder.block.2", 2)),
        ("0.weight", ("0", 0)),
        ("bert.embeddings.word_embeddings.weight", None),
        ("classifier.weight", None),
    ],
)
def test_the_layer_of_a_name(name: str, layer: tuple[str, int] | None) -> None:
    assert layer_of(name) == layer


def test_a_part_of_zeros_cannot_move() -> None:
    model = bert().double()
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.zero_()
    parts = {part.part: part.value for part in score(model, bert_batches(1), per="layer", **SHORT).per}
    assert parts["classifier"] == 0.0


@pytest.mark.slow
def test_the_score_itself_is_the_same_with_and_without_parts() -> None:
    model, batches = bert().double(), bert_batches(2)
    plain = score(model, batches, **SHORT)
    with_parts = score(model, batches, rho=[0.1, 0.05], per="kind", **SHORT)
    assert with_parts.geodesic_sharpness == pytest.approx(plain.geodesic_sharpness, rel=1e-2)
    assert plain.per == ()
    # At the first radius, whatever the others are; and no part rises higher than all together.
    assert all(0 <= part.value <= with_parts.geodesic_sharpness for part in with_parts.per)
    alone = score(model, batches, per="kind", **SHORT)
    assert alone.to_dict() | {"per": [], "seconds": 0} == plain.to_dict() | {"seconds": 0}
    assert alone.per == with_parts.per


def test_parts_go_through_json() -> None:
    result = score(bert(), bert_batches(2), per="head", **SHORT)
    stored = json.loads(result.to_json())
    assert list(stored["per"][0]) == [
        "part", "by", "layer", "head", "kind", "value", "stderr", "reproducible", "spread",
    ]  # fmt: skip
    assert stored["per"][3] == {
        "part": "bert.encoder.layer.1.attention head 1", "by": "head", "layer": 1, "head": 1, "kind": None,
        "value": result.per[3].value, "stderr": result.per[3].stderr, "reproducible": None, "spread": None,
    }  # fmt: skip
    assert SharpnessResult.from_dict(stored) == result
    assert isinstance(result.per[0], PartScore)
    first = [{k: v for k, v in part.items() if k not in ("reproducible", "spread")} for part in stored["per"]]
    assert SharpnessResult.from_dict({**stored, "per": first}) == result
    older = {name: value for name, value in stored.items() if name not in ("per", "profile", "params")}
    read = SharpnessResult.from_dict(older)
    assert (read.per, read.profile, read.params) == ((), None, "all")


def test_each_part_says_whether_it_repeats() -> None:
    """The whole may repeat while a part is no larger than a hundred roundings of the loss, about 1e-5."""
    model, batches = bert(), bert_batches(2)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.zero_()
    found = score(model, batches, per="layer", steps=6, metric="euclidean")
    # With a classifier of zeros nothing else reaches the loss.
    assert [part.part for part in found.per if part.reproducible is not None] == ["classifier"]

    found = score(bert(), batches, per="layer", steps=6, rho=3e-5)
    assert found.reproducible.ok
    small = [part for part in found.per if part.value < 8e-6]
    large = [part for part in found.per if part.value > 2e-5]
    assert small
    assert large
    assert not any(part.reproducible for part in small)
    assert all(part.reproducible and part.spread is not None and part.spread < 0.01 for part in large)
    odd = [part.part for part in found.per if part.reproducible is False]
    (note,) = (w for w in found.warnings if "parts are not reproducible" in w)
    assert f"the scores of {len(odd)} of {len(found.per)} parts" in note
    assert note.endswith(f": {', '.join(odd)}")
    # In double precision they repeat.
    wide = score(bert(), batches, per="layer", steps=6, rho=3e-5, dtype="float64")
    assert all(part.reproducible for part in wide.per)
    assert not any("parts are not" in w for w in wide.warnings)


def test_the_second_run_of_a_part_is_of_that_part_alone(tmp_path: Path) -> None:
    """From weights that are moved a little it gives nearly the same, of each part its own, and a journal keeps it."""
    model, batches = bert(), bert_batches(2)
    how: dict[str, Any] = {"steps": 6, "dtype": "float64", "per": "head", "output": tmp_path}
    found = score(model, batches, **how)
    lines = [json.loads(line) for line in _lines(tmp_path)]
    worst: dict[str, float] = {}
    for line in lines:
        if line["job"]["stage"] == "part":
            part, ((_, own),) = line["job"]["part"], line["scores"]
            worst[part] = max(worst.get(part, 0.0), own["value"])
    again = {line["job"]["part"]: line["scores"][0][1]["value"] for line in lines
             if line["job"]["stage"] == "reproducibility" and line["job"]["part"]}  # fmt: skip
    assert set(again) == set(worst)
    assert again == pytest.approx(worst, rel=1e-5)
    assert len(set(again.values())) == len(found.per) == 4
    assert score(model, batches, **how).per == found.per
    assert len(_lines(tmp_path)) == len(lines)


@pytest.mark.slow
def test_a_finished_run_goes_on_with_parts(tmp_path: Path) -> None:
    model, batches = bert(), bert_batches(2)
    first = score(model, batches, output=tmp_path, **SHORT)
    again = score(model, batches, output=tmp_path, per="layer", **SHORT)
    kinds = score(model, batches, output=tmp_path, per="kind", **SHORT)
    assert again.geodesic_sharpness == kinds.geodesic_sharpness == first.geodesic_sharpness
    stages = [json.loads(line)["job"]["stage"] for line in _lines(tmp_path)]
    assert stages == ["score"] * 2 + ["part"] * 2 * (len(again.per) + len(kinds.per))
    assert score(model, batches, output=tmp_path, per="layer", **SHORT).per == again.per
    assert len(_lines(tmp_path)) == len(stages)


def _lines(folder: Path) -> list[str]:
    return (folder / "journal-0.jsonl").read_text().splitlines()[1:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per": "block"}, "per is 'block'; it is one of layer, head, kind"),
        ({"per": "head", "metric": "adaptive"}, "the metric adaptive does not distinguish heads: use inv or mix"),
        ({"per": "layer", "average": True}, "per, profile, starts and ascent are available only for the worst case"),
        ({"profile": True, "average": True}, "per, profile, starts and ascent are available only for the worst case"),
        ({"average": True, "steps": 3}, "steps is 3: .* an even number is needed"),
        ({"params": "adapter"}, "params is 'adapter'; it is one of all, lora"),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        score(bert(), bert_batches(1), **options)


@pytest.mark.filterwarnings("ignore:no attention symmetry")
def test_heads_of_a_model_without_attention_are_refused_before_anything_is_run() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.readout = nn.Linear(4, 2)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.readout(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    told: list[Progress] = []
    batch = {"x": torch.randn(6, 4), "labels": torch.arange(6) % 2}
    with pytest.raises(UsageError, match="no attention heads were found"):
        score(Plain(), [batch], per="head", progress=told.append, **SHORT)
    assert {state.stage for state in told} == {"verify"}


@pytest.mark.parametrize("options", [{"per": "head"}, {"damping": 0.01}])
def test_baselines_come_with_what_they_do_not_know(options: dict[str, Any]) -> None:
    """A baseline has no heads and nothing to damp; the score beside it has."""
    plain = score(bert(), bert_batches(1), steps=2, rho=0.1, baselines=["adaptive"], reproducibility=False)
    found = score(bert(), bert_batches(1), steps=2, rho=0.1, baselines=["adaptive"], reproducibility=False, **options)
    assert found.baselines == plain.baselines
    assert bool(found.per) == ("per" in options)


def test_without_pairs_nothing_is_damped() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    batch = {"input": torch.eye(3)}
    with pytest.warns(GeosharpWarning, match="no attention symmetry was found"):
        result = score(model, [batch], damping=0.01, steps=2, loss=lambda y, _: y.square().mean(1))
    assert (result.metric, result.damping) == ("adaptive", 0.0)
