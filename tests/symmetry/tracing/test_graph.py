"""What a tensor is made by, against graphs written out by hand."""

from __future__ import annotations

import torch

from hf_geosharp.symmetry.tracing.graph import Behind, leaf_at, leaves_behind, nodes_behind


def test_each_node_is_met_once_and_before_those_that_it_reads() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    z = y * y.sin()
    found = [node.name() for node in nodes_behind(z)]
    assert sorted(found) == ["ExpBackward0", "MulBackward0", "SinBackward0", "torch::autograd::AccumulateGrad"]
    assert found[0] == "MulBackward0"
    assert list(nodes_behind(x)) == []


def test_what_a_node_reads_is_met_unless_it_is_the_end() -> None:
    x, w = (torch.ones(2, requires_grad=True) for _ in range(2))
    y = x.exp()
    z = y * w
    ends = {y.grad_fn}
    found = [node.name() for node in nodes_behind(z, y, beyond=lambda node: node not in ends)]
    assert sorted(found) == ["ExpBackward0", "MulBackward0", "torch::autograd::AccumulateGrad"]
    # The end may be met by another way first, and is not passed there either.
    assert [node for node in nodes_behind(y, z, beyond=lambda node: node not in ends) if node in ends] == [y.grad_fn]


def stream(layers: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What each of many layers reads of a sum that all before have written to, two leaves each; and the leaves."""
    leaves: list[torch.Tensor] = []
    x, read = torch.ones(3), []
    for _ in range(layers):
        own = [torch.ones(3, requires_grad=True) for _ in range(2)]
        leaves += own
        x = x + own[0].sin() * own[1]
        read.append(x.exp() * x)
    return read, leaves


def test_leaves_are_those_of_the_graph_whatever_was_asked_before() -> None:
    read, leaves = stream(20)
    for order in (range(20), reversed(range(20)), (7, 3, 7, 19, 0)):
        behind = Behind(leaf_at)
        for layer in order:
            found = behind.listed(behind.of(read[layer]))
            assert {id(x) for x in found} == {id(x) for x in leaves[: 2 * layer + 2]}
            assert {id(x) for x in found} == {id(x) for x in leaves_behind(read[layer])}
    assert behind.of(leaves[0]) == 0
    assert leaves_behind(leaves[0]) == [leaves[0]]
    assert leaves_behind(torch.ones(1)) == []


def test_what_many_are_made_of() -> None:
    read, leaves = stream(20)
    behind = Behind(leaf_at)
    for most in (0, 4, 19, 20):
        often = behind.listed(behind.of_many(read, most))
        # Layer n, from 0 on, is behind 20 - n of them.
        assert {id(x) for x in often} == {id(x) for x in leaves[: 2 * (20 - most)]}


def test_each_node_is_looked_at_once() -> None:
    read, _ = stream(50)
    seen = []
    behind = Behind(lambda node: seen.append(node))
    for x in read:
        behind.of(x)
    assert len(seen) == len({id(node) for node in seen}) == len(list(nodes_behind(*read)))


def test_other_things_than_leaves_can_be_looked_for() -> None:
    x = torch.ones(2, requires_grad=True)
    products = [x * 2, x * 3]
    nodes = {p.grad_fn for p in products}
    behind = Behind(lambda node: node if node in nodes else None)
    assert behind.listed(behind.of(products[0].sin())) == [products[0].grad_fn]
    assert set(behind.listed(behind.of(products[0] + products[1]))) == nodes
    assert behind.of(products[1]) & behind.bits([products[0].grad_fn]) == 0
