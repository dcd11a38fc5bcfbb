"""Models sharded by fully_shard (FSDP2): the score is that of the whole model, and nothing is left over."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_geosharp import score
from hf_geosharp.errors import ModelError, UnsupportedModelError
from hf_geosharp.geometry.metrics import PairFrame
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.ball import loss_at
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.estimate import check_function
from hf_geosharp.sharpness.objective import Objective
from hf_geosharp.sharpness.secant import secant
from hf_geosharp.sharpness.selection import movable
from hf_geosharp.sharpness.settings import Settings
from hf_geosharp.sharpness.sharded import ShardedChart, sites_of
from hf_geosharp.sharpness.shards import Shards, whole_of, written_class
from hf_geosharp.symmetry.fold import KeyBias
from hf_geosharp.symmetry.map import SymmetryMap
from tests import worlds
from tests.sharpness.test_adapter import adapted
from tests.sharpness.tiny import (
    TinyAttention,
    attention_data,
    attention_map,
    bert,
    bert_batches,
    gpt2,
    gpt2_batches,
)
from tests.versions import needs_fully_shard

launch = partial(worlds.launch, module="tests.sharpness.test_sharded")
results = partial(worlds.results, module="tests.sharpness.test_sharded")

# It warns of linear layers that are units of their own.
pytestmark = [needs_fully_shard, pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")]


def sharded(model: Any, copies: int | None = None, **options: Any) -> Any:
    """As FSDP2 is meant to be used: each layer a unit, the rest another; or on a mesh of so many copies of shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if copies is not None:
        mesh = init_device_mesh("cpu", (copies, size // copies), mesh_dim_names=("copies", "rows"))
    units = ("Linear",) if isinstance(model, TinyAttention) else ("BertLayer", "GPT2Block")
    for module in model.modules():
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def state(model: Any) -> dict[str, Any]:
    """All of a model that a score may disturb, as this rank has it."""
    rows = {n: p.detach().to_local().clone() for n, p in model.named_parameters()}
    flags = {n: (p.requires_grad, p.grad is None) for n, p in model.named_parameters()}
    return {"rows": rows, "flags": flags, "modes": [m.training for m in model.modules()], "rng": torch.get_rng_state()}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """A world of one process: everything is sharded, and all of it lies here."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------- sites


def test_what_hangs_together_is_one_site_and_sites_are_spread_evenly() -> None:
    whole = attention_map()
    sizes = {"q.weight": 6, "q.bias": 2, "k.weight": 6, "v.weight": 6, "o.weight": 6, "readout.weight": 6}
    found = sites_of(whole, sizes, 2)
    assert [(s.owner, s.parameters) for s in found] == [
        (0, ("q.weight", "q.bias", "k.weight")), (1, ("v.weight", "o.weight")),
    ]  # fmt: skip
    qk = whole.pairs[0]
    bridge = KeyBias("fold", "", qk.g[1], whole.pairs[1].g[0])
    (one,) = sites_of(SymmetryMap(whole.pairs, (bridge,)), sizes, 2)
    assert one.parameters == ("q.weight", "q.bias", "k.weight", "v.weight", "o.weight")
    assert sites_of(SymmetryMap(), sizes, 3) == []


# --------------------------------------------------------------------------------------- the chart, against a plain one


GEOMETRIES = {
    "inv": Geometry("inv", "second"), "mix": Geometry("mix", "exact"), "euclidean": Geometry("euclidean", "first"),
}  # fmt: skip


class Mixed(TinyAttention):
    """With a key bias, which folds; an embedding, of which a batch reaches a part; parameters that few or none use."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.k = nn.Linear(3, 2).double()
        self.table = nn.Embedding(60_000, 3).double()
        self.idle = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.seldom = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        with torch.no_grad():
            for p in (*self.k.parameters(), *self.table.parameters(), self.idle, self.seldom):
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))

    def forward(self, ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.table(ids)
        if bool((hit := ids == 7).any()):
            # One sample has it, so one rank: as with the experts of a mixture.
            x = x + hit.unsqueeze(-1) * self.seldom
        return super().forward(x, labels)


def mixed_map() -> SymmetryMap:
    from hf_geosharp.symmetry.views import View

    qk, vo = attention_map().pairs
    bias = View.pattern("k.bias", (("n", "h"),), {"n": 1, "h": 2}, ("n",), ("h",), ())
    return SymmetryMap((qk, vo), (KeyBias("fold", "", bias, qk.h[0]),))


MODELS: dict[str, tuple[Callable[[], Any], SymmetryMap, dict[str, Tensor]]] = {
    "tiny": (TinyAttention, attention_map(), attention_data()),
    "mixed": (Mixed, mixed_map(), {
        "ids": torch.tensor([[1, 5, 59_999], [2, 5, 7], [30_001, 1, 1]]), "labels": torch.tensor([0, 1, 1]),
    }),
}  # fmt: skip


def walked(model: Any, data: dict[str, Tensor], chart_of: Callable[[Any], Chart], world: World) -> dict[str, Any]:
    """What can be told of a chart: a random direction, a gradient, inner products, a climb, shares."""
    with borrow(model) as borrowed:
        chart = chart_of(borrowed)
        objective = Objective(model, data, world=world, shards=borrowed.shards)
        chart.widen()
        base = objective.evaluate(True)
        chart.focus({"table.weight": data["ids"].unique()} if "ids" in data else {})
        g = chart.pull()
        space = chart.space
        r = space.random(torch.Generator().manual_seed(1))
        out = {"base": base, "dimension": space.dimension, "dots": space.dots((g, g), (r, g), (r, r))}
        evaluate = partial(loss_at, chart, objective)
        point = space.combine(space.empty(), (r, 0.05))
        out["there"] = evaluate(point, False)[0]
        # A forward pass that no backward pass follows leaves nothing behind.
        out["unwanted"] = evaluate(point, lambda _: False)[0]
        slope = evaluate(point, lambda _: True)[1]
        assert slope is not None
        out["slope"] = space.dots((slope, slope), (r, slope))
        climb = secant(space, evaluate, 0.2, 4, given=(base, g))
        chart.widen()
        wide = chart.space
        far = wide.random(torch.Generator().manual_seed(2))
        out |= {"rise": climb.rise, "share": chart.share(far), "wide": wide.dots((far, far))}
        return out | {"again": objective.evaluate(False)}


def compare_charts() -> list[str]:
    """Where a sharded chart and a plain one differ."""
    world, wrong = World.find("cpu"), []
    for name, (make, symmetries, data) in MODELS.items():
        for metric, geometry in GEOMETRIES.items():
            plain = walked(make(), data, lambda b: Chart(b, symmetries, geometry), World())  # noqa: B023
            model = sharded(make())
            if name == "mixed":
                model.readout.weight.requires_grad_(False)
            before = state(model)
            found = walked(model, data, lambda b: ShardedChart(b, symmetries, geometry, world), world)  # noqa: B023
            for key, expected in plain.items():
                rounding = 1e-5 if key == "rise" else 1e-9  # a climb makes more of it
                if found[key] != pytest.approx(expected, rel=rounding, abs=1e-12):
                    wrong.append(f"{name} {metric}: {key} is {found[key]}, not {expected}")
            if not same(before, state(model)):
                wrong.append(f"{name} {metric}: the model is another one afterwards")
            model(**data).loss.backward()
            if name == "mixed" and model.readout.weight.grad is not None:
                wrong.append(f"{metric}: what was frozen takes gradients afterwards")
    return wrong


def print_compared() -> None:
    dist.init_process_group("gloo")
    with World.find("cpu").together():
        print(json.dumps(compare_charts()))


@pytest.mark.slow
def test_a_chart_of_one_process_is_the_plain_one(world: None) -> None:
    assert compare_charts() == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_chart_of_several_processes_is_the_plain_one(size: int) -> None:
    # Heads of 2 rows and biases of 2 entries on 3 ranks: some have nothing of a parameter, or of a site.
    assert results(size, "print_compared") == [[]] * size


def count_entries() -> None:
    """Coordinates and whole matrices of each rank."""
    dist.init_process_group("gloo")
    model = sharded(bert(num_hidden_layers=6).double())
    from hf_geosharp.symmetry.find import find_symmetries

    found = find_symmetries(bert(num_hidden_layers=6).double(), bert_batches(1)[0], cached=False)
    world = World.find("cpu")
    with world.together(), borrow(model) as borrowed:
        chart = ShardedChart(borrowed, found, Geometry("inv", "second"), world)
        whole = sum(leaf.tensor.numel() for leaf in chart._borrowed.leaves.values() if not leaf.members)
        frames = sum(q.numel() for p in chart.space.parts if isinstance(p.frame, PairFrame) for q in p.frame.q)
        total = sum(p.numel() for p in model.parameters())
    print(json.dumps([chart.space.size / total, whole / total, frames / total]))


@pytest.mark.slow
def test_each_rank_has_its_part_of_the_state() -> None:
    for shares in results(3, "count_entries"):
        assert all(share < 0.45 for share in shares), shares


# ------------------------------------------------------------------------------------------------------------ the score


CASES: dict[str, dict[str, Any]] = {
    "several radii, evidence and baselines": {"rho": [0.2, 0.1], "baselines": ["adaptive", "euclidean"]},
    "average": {"average": True, "steps": 4},
    "padded texts, tied weights": {"text": True},
    "packed texts, of which no two samples tell what the loss is a mean over": {"text": True, "packed": True},
    "several starts": {"starts": 3, "rho": [0.2, 0.1]},
    "labels of the model": {"labels": "model", "steps": 2},
    "micro-batches": {"micro_batch": 2, "metric": "mix"},
    "fewer samples than ranks": {"size": 1, "steps": 2},
    "apgd": {"ascent": "apgd", "gradient_checkpointing": True},
    "rough balls": {"rho": 2.0, "steps": 14},
    "profile": {"profile": True, "steps": 2},
    "far from exact geodesics": {"metric": "mix", "geodesic": "second", "rho": 10.0, "steps": 2},
    "along exact geodesics": {"metric": "mix", "rho": 1.0, "steps": 2},
    "exact geodesics without an end": {"metric": "mix", "dead": True, "steps": 2, "reproducibility": False},
    "no symmetries": {"metric": "euclidean", "steps": 2},
    "half precision": {"dtype": "float64", "half": True, "steps": 2},
    "an adapter alone": {"adapter": True, "params": "lora", "steps": 2, "per": "layer"},
    "layers": {"per": "layer", "steps": 2, "reproducibility": False},
    "heads": {"per": "head", "steps": 2, "reproducibility": False},
    "kinds": {"per": "kind", "steps": 2, "reproducibility": False, "text": True},
}


UNEVEN = ("padded texts, tied weights", "fewer samples than ranks", "half precision", "an adapter alone", "heads")
"""What is tried where rows do not divide evenly."""

REPLICATED = ("several radii, evidence and baselines", "padded texts, tied weights", "heads")


def all_cases(shard: bool, copies: int | None = None, names: Sequence[str] = tuple(CASES)) -> dict[str, Any]:
    out = {}
    for name, case in ((name, CASES[name]) for name in names):
        options = {"steps": 3, **case}
        size = options.pop("size", 7)
        text = options.pop("text", False)
        packed, dead = options.pop("packed", False), options.pop("dead", False)
        model, batches = (gpt2(), gpt2_batches(2)) if text else (bert(), bert_batches(2, size=size))
        if packed:
            batches = [{"input_ids": b["input_ids"], "labels": b["input_ids"]} for b in batches]
        model = adapted() if options.pop("adapter", False) else model.double()
        if dead:
            attention = model.bert.encoder.layer[0].attention.self
            with torch.no_grad():
                for linear in (attention.query, attention.key):
                    linear.weight[:4] *= 1e-14
                    linear.bias[:4] *= 1e-14
        model = model.bfloat16() if options.pop("half", False) else model
        if shard:
            model = sharded(model, copies)
            before = state(model)
        found = score(model, batches, **options).to_dict()
        if shard:
            assert same(before, state(model)), name
        out[name] = json.loads(json.dumps(found | {"seconds": 0.0}))
    return out


def print_cases() -> None:
    dist.init_process_group("gloo")
    print(json.dumps(all_cases(True, names=tuple(CASES) if dist.get_world_size() == 2 else UNEVEN)))


def print_replicated() -> None:
    dist.init_process_group("gloo")
    print(json.dumps(all_cases(True, 2, REPLICATED)))


@cache
def whole_cases() -> dict[str, Any]:
    return all_cases(False)


@pytest.mark.slow
@pytest.mark.xdist_group("scores of the whole model")
@pytest.mark.parametrize(("size", "copies"), [(2, None), (3, None), (2, 2), (4, 2)])
def test_the_score_of_a_sharded_model_is_that_of_the_whole_one(size: int, copies: int | None) -> None:
    ranks = results(size, "print_cases" if copies is None else "print_replicated")
    assert all(found == ranks[0] for found in ranks)
    for name, found in ranks[0].items():
        expected = whole_cases()[name]
        # Language models take their loss in float32 whatever they are.
        floor = 1e-6 * expected["base_loss"] if "texts" in name else 1e-12
        for point, other in zip(found["curve"], expected["curve"], strict=True):
            assert point["geodesic_sharpness"] == pytest.approx(other["geodesic_sharpness"], rel=1e-5, abs=floor), name
        for key in ("base_loss", "baselines", "passes", "pairs", "model", "share", "profile", "per"):
            assert_close(found[key], expected[key], f"{name}: {key}")
        assert found["reproducible"]["ok"] == expected["reproducible"]["ok"]
        assert found["warnings"] == expected["warnings"]
        for told, case in (
            ("not close to the exact", "far from exact geodesics"),
            ("layer.0.attention.qk head 0 was not found beyond", "exact geodesics without an end"),
        ):
            assert any(told in text for text in found["warnings"]) is (name == case)


def assert_close(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            if key not in ("deviation", "control"):
                assert_close(found[key], value, f"{where}: {key}")
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, where)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("copies", [None, 1])
def test_a_sharded_model_of_one_process_has_the_score_of_the_whole_one(world: None, copies: int | None) -> None:
    whole = score(bert(), bert_batches(1), steps=2)
    model = sharded(bert(), copies)
    before = state(model)
    found = score(model, bert_batches(1), steps=2)
    assert same(before, state(model))
    assert found.geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=1e-5)
    assert found.model == whole.model
    assert found.pairs.count == whole.pairs.count


# ------------------------------------------------------------------------------------------------------ long runs, ends


def continued(folder: str) -> None:
    """A run that is continued from its journal, and one of the whole model that goes on with it."""
    dist.init_process_group("gloo")
    model, batches = sharded(bert().double()), bert_batches(2)
    first = score(model, batches, steps=2, output=folder)
    again = score(model, batches, steps=2, output=folder)
    print(json.dumps([first.to_dict() | {"seconds": 0.0}, again.to_dict() | {"seconds": 0.0}]))


@pytest.mark.slow
def test_a_journal_knows_the_weights_however_they_are_sharded(tmp_path: Path) -> None:
    ranks = results(2, "continued", str(tmp_path))
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == ranks[0][1]
    from hf_geosharp.sharpness.journal import Journal

    (file,) = tmp_path.glob("journal-*.jsonl")
    header = json.loads(file.read_text().splitlines()[0])
    from hf_geosharp.sharpness.journal import digest

    model = bert().double()
    weights = sorted((n, p) for n, p in model.named_parameters())
    buffers = [(f"buffer {n}", b) for n, b in model.named_buffers()]
    assert header["weights"] == digest([*weights, *buffers])
    assert Journal(tmp_path, {k: v for k, v in header.items() if k not in ("format", "schema")}).files


class Fails(nn.Module):
    """Fails on the second process only, after some passes, in the middle of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyAttention()
        self.count = 0

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        self.count += 1
        if self.count > 4 and dist.get_rank() == 1:
            raise ModelError("the fifth pass")
        return self.model(x, labels)


def failing(what: str) -> None:
    dist.init_process_group("gloo")
    model, options, data = sharded(Fails()), {}, attention_data()
    if what == "nan":
        with torch.no_grad():
            rows = model.model.q.weight.to_local()
            rows[: dist.get_rank()] = float("nan")
    if what == "world":
        options = {"world": World()}
    if what == "auto":
        options = {"micro_batch": "auto"}
    before = state(model)
    try:
        score(model, [data], steps=6, metric="adaptive", reproducibility=False, **options)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        intact = what == "nan" or same(before, state(model))
        print(json.dumps([message, intact]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("pass", r"ModelError: (rank 1: )?the fifth pass"),
        ("nan", r"ModelError: model.q.weight has 3 NaN or infinite entries out of 6"),
        ("world", r"UsageError: the weights are sharded over 2 processes.*leave world= out"),
        ("auto", r"UsageError: the model is sharded over processes.*micro_batch 'auto' \(give a number"),
    ],
)
def test_a_failure_is_everyone_s_and_the_rows_come_back(what: str, message: str) -> None:
    done = worlds.finished(launch(2, "failing", what))
    for _, out, err in done:
        told, intact = json.loads(out.splitlines()[-1]) if out.strip() else (err, True)
        assert re.search(message, told), (told, err)
        assert intact


def penalised(weight: str, kind: str) -> None:
    """A loss with a penalty on the weights of queries."""
    dist.init_process_group("gloo")
    model, batches = sharded(bert()), bert_batches(1)
    strength = float(weight)

    def loss(outputs: Any, batch: Any) -> Tensor:
        sizes = [whole_of(p).square().sum() for name, p in model.named_parameters() if "query" in name]
        return outputs.loss + strength * torch.stack(sizes).sum()

    before, message = state(model), ""
    try:
        if kind == "start":
            with World.find("cpu").together():
                check_function(model, batches, Settings(), loss=loss, world=World.find("cpu"))
        else:
            score(model, batches, loss=loss, steps=1, reproducibility=False)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    print(json.dumps([message, same(before, state(model))]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["start", "score"])
@pytest.mark.parametrize("strength", [0.0, 1e-3])
def test_a_penalty_on_sharded_weights_is_refused(strength: float, kind: str) -> None:
    """It was a number of the balanced weights' penalty, with a warning that rounding may be to blame."""
    for _, out, err in worlds.finished(launch(2, "penalised", str(strength), kind)):
        message, intact = json.loads(out.splitlines()[-1]) if out.strip() else (err, True)
        assert intact
        if strength:
            assert re.search("UsageError: .*depends on the weights themselves, as a penalty on them does", message), err
        else:
            assert not message


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(model: Any, match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        score(model, [attention_data()], steps=1)


def test_what_cannot_be_scored_is_refused_by_name(world: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    refused(sharded(TinyAttention().to("meta")), r"weight is on meta, not on cpu: load its weights")
    part = TinyAttention()
    fully_shard(part.q, mesh=mesh)
    refused(part, r"k.weight is not sharded, but other parameters are")
    model = sharded(TinyAttention())
    model.set_requires_gradient_sync(False)
    refused(model, "does not reduce its gradients")
    model.set_requires_gradient_sync(True)
    score(model, [attention_data()], steps=1, metric="adaptive")
    from torch.distributed.tensor import distribute_module

    refused(distribute_module(TinyAttention(), mesh), r"is sharded as .*only what fully_shard")


@pytest.mark.filterwarnings("ignore:half-precision weights are scored", "ignore:the weights are held in")
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, "float64"), (torch.float32, "float64")],
)
def test_what_is_sharded_in_another_precision_is_widened_and_comes_back(
    world: None, stored: torch.dtype, dtype: str | None
) -> None:
    """Training goes on as if nothing had been: the optimizer still has the parameters that it was given."""

    def train(measured: bool) -> tuple[dict[str, Any], list[Any]]:
        torch.manual_seed(0)
        model = sharded(bert().to(stored))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        found = []
        for _ in range(2):
            model(**bert_batches(1)[0]).loss.backward()
            if measured:
                parameters = list(model.parameters())
                gradients = [p.grad.to_local().clone() for p in parameters]
                before = state(model)
                found.append(score(model, bert_batches(1), steps=2, dtype=dtype))
                assert same(before, state(model))
                assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
                assert same(gradients, [p.grad.to_local() for p in parameters])
            optimizer.step()
            optimizer.zero_grad()
        return state(model), found

    (alone, _), (beside, scores) = train(False), train(True)
    assert same(alone["rows"], beside["rows"])
    whole = score(bert().to(stored), bert_batches(1), steps=2, dtype=dtype)
    assert scores[0].geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=1e-5)
    assert scores[0].model == whole.model
    assert scores[0].warnings == whole.warnings
    assert scores[0].pairs.count == whole.pairs.count


@pytest.mark.filterwarnings("ignore:half-precision weights are scored", "ignore:the weights are held in")
@pytest.mark.parametrize("copies", [None, 1])
def test_tied_weights_in_half_precision_are_widened_as_one(world: None, copies: int | None) -> None:
    whole = score(gpt2().bfloat16(), gpt2_batches(1), steps=2)
    model = sharded(gpt2().bfloat16(), copies)
    parameters, before = list(model.parameters()), state(model)
    found = score(model, gpt2_batches(1), steps=2)
    assert found.geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=1e-5)
    assert found.model == whole.model
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert same(before, state(model))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_another_way_to_keep_what_is_sharded_is_refused(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_geosharp.sharpness.shards._REPLACED_BY", ("set_on_modules",))
    refused(sharded(TinyAttention().to(torch.bfloat16)), r"q.weight is sharded in torch.bfloat16.*before fully_shard")


@pytest.mark.filterwarnings("ignore:half-precision weights are scored")
def test_what_is_sharded_in_half_precision_comes_back_after_an_error(world: None) -> None:
    model = sharded(bert().bfloat16())
    parameters, before = list(model.parameters()), state(model)
    with pytest.raises(ZeroDivisionError):
        score(model, bert_batches(1), steps=2, loss=lambda outputs, batch: 1 / 0)
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert same(before, state(model))
    assert model(**bert_batches(1)[0]).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("used", [False, True])
def test_a_mixed_precision_policy_is_left_out_meanwhile_and_comes_back(world: None, used: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    half = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, output_dtype=torch.bfloat16)
    whole = score(bert(), bert_batches(1), steps=2)
    model, data = sharded(bert(), mp_policy=half), bert_batches(1)[0]
    if used:
        model(**data).loss.backward()
        gradients = {n: p.grad.to_local().clone() for n, p in model.named_parameters()}
    found = score(model, bert_batches(1), steps=2)
    assert found.geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=1e-5)
    assert found.passes == whole.passes
    if used:
        assert same(gradients, {n: p.grad.to_local() for n, p in model.named_parameters()})
    model.zero_grad()
    outputs = model(**data)
    assert outputs.logits.dtype == torch.bfloat16
    if used:
        outputs.loss.backward()
        assert same(gradients, {n: p.grad.to_local() for n, p in model.named_parameters()})


@pytest.mark.parametrize("by", ["layer", "head", "kind"])
def test_the_parts_of_a_sharded_model_of_one_process_are_those_of_the_whole_one(world: None, by: str) -> None:
    options: dict[str, Any] = {"per": by, "steps": 1, "reproducibility": False}
    whole = score(bert(), bert_batches(1), **options).per
    found = score(sharded(bert()), bert_batches(1), **options).per
    assert [p.part for p in found] == [p.part for p in whole]
    assert len(whole) > 2
    for one, other in zip(found, whole, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-4, abs=1e-7)


def test_an_adapter_on_a_sharded_base_has_the_score_that_it_has_on_a_whole_one(world: None) -> None:
    whole = score(adapted(), bert_batches(2), params="lora", steps=2)
    model = sharded(adapted())
    before = state(model)
    found = score(model, bert_batches(2), params="lora", steps=2)
    assert same(before, state(model))
    assert found.geodesic_sharpness == pytest.approx(whole.geodesic_sharpness, rel=1e-5)
    assert found.pairs.by_kind == whole.pairs.by_kind == {"lora GL(2)": 4}
    # What does not move gets no gradients: they would be the size of the base.
    with borrow(model, None, movable(model, "lora")) as borrowed:
        Objective(model, bert_batches(1)[0], shards=borrowed.shards).evaluate(True)
        assert {n for n, p in model.named_parameters() if p.grad is not None} == set(borrowed.leaves)


@pytest.mark.parametrize("forgets", [True, False])
def test_a_gradient_that_is_not_wanted_leaves_nothing_behind(
    world: None, forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch cannot drop what a forward pass has noted, there is a backward pass all the same."""
    monkeypatch.setattr(Shards, "forgets", property(lambda _: forgets))
    seen: list[bool] = []
    model, batch = sharded(bert()), bert_batches(1)[0]
    with borrow(model) as borrowed:
        objective = Objective(model, batch, shards=borrowed.shards)
        loss = objective.evaluate(True)
        before = {n: leaf.gradient() for n, leaf in borrowed.leaves.items()}

        def unwanted(_: float) -> bool:
            seen.append(any(p.grad is not None for p in model.parameters()))
            return False

        assert objective.evaluate(unwanted) == loss
        assert seen == [not forgets]
        assert all(p.grad is None for p in model.parameters())
        assert objective.evaluate(True) == loss
        assert all(torch.equal(leaf.gradient(), before[n]) for n, leaf in borrowed.leaves.items())
        assert (objective.forwards, objective.backwards) == (3, 2)


def test_a_plain_model_has_no_shards_and_keeps_its_class() -> None:
    model = TinyAttention()
    assert Shards.of(model) is None
    assert written_class(model) is TinyAttention


def test_a_plain_copy_is_the_model_as_it_was_written(world: None) -> None:
    original = gpt2()
    model = sharded(gpt2())
    data = gpt2_batches(1)[0]
    expected = original(**data).loss
    assert torch.equal(model(**data).loss, expected)
    shards = Shards.of(model)
    assert shards is not None
    assert written_class(model) is type(original)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = shards.plain(True)
    assert shards.plain(False) is None
    assert copy is not None
    assert type(copy) is type(original)
    assert [type(m) for m in copy.modules()] == [type(m) for m in original.modules()]
    assert copy.lm_head.weight is copy.transformer.wte.weight
    assert same(dict(copy.named_parameters()), dict(original.named_parameters()))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in copy.modules())
    assert torch.equal(copy(**data).loss, expected)
    # The model itself still is sharded, and runs.
    assert type(model).__name__.startswith("FSDP")
    assert torch.equal(model(**data).loss, expected)
