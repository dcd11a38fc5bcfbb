"""Leaving out embedding rows that a batch does not look up changes nothing but the time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp.geometry.space import Tangent
from hf_geosharp.sharpness.ascent import auto_pgd
from hf_geosharp.sharpness.ball import loss_at
from hf_geosharp.sharpness.borrow import Borrowed, borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.objective import Objective, Reach
from hf_geosharp.symmetry.find import find_symmetries
from tests.families import batch_of, build


@pytest.fixture(autouse=True)
def embeddings_of_tiny_models_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they are bundled with the biases, and a bundle is always in focus."""
    monkeypatch.setattr("hf_geosharp.sharpness.loose._SMALL", 64)


def focused(chart: Chart, borrowed: Borrowed, objective: Objective) -> tuple[float, Tangent]:
    """The base point as a score takes it: loss and gradient in the space of what the batch can reach."""
    chart.widen()
    with Reach(borrowed.model) as reach:
        loss = objective.evaluate(True)
    names = {id(leaf.members[0][0]): name for name, leaf in borrowed.leaves.items()}
    chart.focus({names[key]: rows for key, rows in reach.rows.items()})
    return loss, chart.pull()


def climb(name: str, seeds: list[int], with_focus: bool) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Rises and sizes of the space for several batches one after the other, and the weights they leave behind."""
    model = build(name)
    rises, sizes = [], []
    with borrow(model) as borrowed:
        chart = Chart(borrowed, find_symmetries(model, batch_of(name)), Geometry("inv", "second"))
        for seed in seeds:
            objective = Objective(model, batch_of(name, seed=seed))
            given = focused(chart, borrowed, objective) if with_focus else None
            found = auto_pgd(chart.space, partial(loss_at, chart, objective), 0.1, 6, given=given)
            rises.append(found.rise)
            sizes.append(chart.space.size)
        chart.widen()
        left = {n: leaf.tensor.clone() for n, leaf in borrowed.leaves.items()}
    return rises, sizes, left


@pytest.mark.parametrize("name", ["bert", "t5", "llama", "vit"])
def test_the_score_is_the_same_with_and_without_rows_that_no_token_looks_up(name: str) -> None:
    plain, whole, base = climb(name, [0, 1, 0], with_focus=False)
    short, sizes, left = climb(name, [0, 1, 0], with_focus=True)
    assert short == pytest.approx(plain, rel=1e-9)
    assert short[0] == short[2]  # nothing of a batch stays behind for the next
    assert all(torch.equal(left[n], base[n]) for n in base)
    looked_up = name in ("bert", "llama")  # an image model has no embedding; in T5 the head is tied to it
    assert all(size < full for size, full in zip(sizes, whole, strict=True)) or not looked_up


def test_a_row_that_is_out_of_focus_is_not_perturbed_and_one_in_focus_is() -> None:
    model, batch = build("bert"), batch_of("bert")
    with borrow(model) as borrowed:
        chart = Chart(borrowed, find_symmetries(model, batch), Geometry("inv", "second"))
        name = "bert.embeddings.word_embeddings.weight"
        before = borrowed.leaves[name].tensor.clone()
        _, g = focused(chart, borrowed, Objective(model, batch))
        chart.write(g.mul_(0.1 / chart.space.norm(g)))
        moved = borrowed.leaves[name].tensor.ne(before).any(1)
        used = torch.zeros_like(moved)
        used[batch["input_ids"].unique()] = True
        assert not (moved & ~used).any()
        assert (moved & used).sum() > 3


def test_an_embedding_that_is_also_the_output_layer_stays_whole() -> None:
    model, batch = build("gpt2"), batch_of("gpt2")
    with borrow(model) as borrowed:
        chart = Chart(borrowed, find_symmetries(model, batch), Geometry("inv", "second"))
        focused(chart, borrowed, Objective(model, batch))
        tied = next(part for part in chart.space.parts if "wte" in part.name)
        assert tied.numel >= model.transformer.wte.weight.numel()  # type: ignore[union-attr,operator]


class _Places(nn.Embedding):
    """Looks up by the shape of the input, as sinusoidal tables do."""

    def forward(self, shape: torch.Size) -> Tensor:  # type: ignore[override]
        return super().forward(torch.arange(shape[-1]))


def test_embeddings_that_are_not_called_with_indices_are_left_out() -> None:
    by_index, by_shape, by_name = nn.Embedding(9, 2), _Places(9, 2), nn.Embedding(9, 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList([by_index, by_shape, by_name])

    ids = torch.tensor([[3, 1, 3]])
    with Reach(Model()) as reach:
        by_index(ids), by_shape(ids.shape), by_name(input=ids)
    assert {key: rows.tolist() for key, rows in reach.rows.items()} == {id(by_index.weight): [1, 3]}
