"""What a tensor is made by, against graphs written out by hand."""

from __future__ import annotations

import torch

from hf_geosharp.symmetry.graph import nodes_behind


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
