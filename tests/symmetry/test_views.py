"""Views against plain indexing: what they read, where they write, and that they never copy the parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from hf_geosharp.symmetry.views import View, parse, read, shape_of, write

N, G, H, I = 3, 2, 4, 5  # noqa: E741
SIZES = {"n": N, "g": G, "h": H, "i": I, "s": 3}


def view(pattern: str, rows: tuple[str, ...] = ("i",), **select: int) -> View:
    return View.pattern("p", parse(pattern), SIZES, ("n",), ("h",), rows, select=select)


def rotary(base: View, axes: tuple[str, str]) -> View:
    split = base.split("h", axes, {"c": 2, "f": H // 2})
    return replace(split, copies=("n", "f"), dim=(), field="c")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _separate(p: Tensor) -> Tensor:
    return torch.stack([p[n * H : (n + 1) * H] for n in range(N)])


def _fused_transposed(p: Tensor) -> Tensor:
    keys = p[:, N * H : 2 * N * H]
    return torch.stack([keys[:, n * H : (n + 1) * H].T for n in range(N)])


def _grouped(p: Tensor) -> Tensor:
    heads = [[p[(n * G + g) * H : (n * G + g + 1) * H] for g in range(G)] for n in range(N)]
    return torch.stack([torch.cat(group, dim=1) for group in heads])


def _bias(p: Tensor) -> Tensor:
    return p.reshape(N, H, 1)


def _rotary_half(p: Tensor) -> Tensor:
    heads = _separate(p)
    return torch.complex(heads[:, : H // 2], heads[:, H // 2 :]).reshape(N * H // 2, 1, I)


def _rotary_interleaved(p: Tensor) -> Tensor:
    heads = _separate(p)
    return torch.complex(heads[:, 0::2], heads[:, 1::2]).reshape(N * H // 2, 1, I)


def _narrowed(p: Tensor) -> Tensor:
    return torch.stack([p[2 + n * H : 2 + (n + 1) * H] for n in range(N)])


@dataclass(frozen=True)
class Case:
    """A view, the shape of its parameter, and what it shows written with plain slices."""

    name: str
    view: View
    shape: tuple[int, ...]
    plain: object

    def expected(self, p: Tensor) -> Tensor:
        return self.plain(p)  # type: ignore[operator, no-any-return]

    def __str__(self) -> str:
        return self.name


SEPARATE = view("(n h) i")
CASES = [
    Case("separate", SEPARATE, (N * H, I), _separate),
    Case("fused and transposed", view("i (s n h)", s=1), (I, 3 * N * H), _fused_transposed),
    Case("grouped queries stacked", view("(n g h) i", ("g", "i")), (N * G * H, I), _grouped),
    Case("bias as a row", view("(n h)", ()), (N * H,), _bias),
    Case("rotary, halves paired", rotary(SEPARATE, ("c", "f")), (N * H, I), _rotary_half),
    Case("rotary, neighbours paired", rotary(SEPARATE, ("f", "c")), (N * H, I), _rotary_interleaved),
    Case("narrowed", replace(SEPARATE, start=(2, 0)), (N * H + 3, I), _narrowed),
]
each = pytest.mark.parametrize("case", CASES, ids=str)


def empty(case: Case) -> Tensor:
    dtype = torch.complex128 if case.view.field else torch.float64
    return torch.full(shape_of([case.view]), float("nan"), dtype=dtype)


@each
def test_reading_a_view_gives_what_plain_slices_give(case: Case) -> None:
    p = random(*case.shape)
    assert torch.equal(read([case.view], {"p": p}, empty(case)), case.expected(p))


@each
def test_writing_changes_the_storage_of_the_parameter_and_nothing_outside_the_view(case: Case) -> None:
    p = random(*case.shape)
    before, address = p.clone(), p.data_ptr()
    value = torch.randn_like(case.expected(p))
    write([case.view], {"p": p}, value)
    assert p.data_ptr() == address
    assert torch.equal(case.expected(p), value)
    inside = torch.zeros_like(p, dtype=torch.bool)
    case.view.of(inside).fill_(True)
    assert torch.equal(p[~inside], before[~inside])
    assert int(inside.sum()) == value.numel() * (2 if case.view.field else 1)


@each
def test_writing_back_what_was_read_changes_nothing(case: Case) -> None:
    p = random(*case.shape)
    before = p.clone()
    write([case.view], {"p": p}, read([case.view], {"p": p}, empty(case)))
    assert torch.equal(p, before)


@each
def test_a_view_works_in_place_on_a_parameter_that_is_not_contiguous(case: Case) -> None:
    storage = random(*reversed(case.shape), 2)
    p = storage[..., 1].permute(*reversed(range(len(case.shape))))
    assert not p.is_contiguous()
    assert torch.equal(read([case.view], {"p": p}, empty(case)), case.expected(p))
    neighbour, value = storage[..., 0].clone(), torch.randn_like(case.expected(p))
    write([case.view], {"p": p}, value)
    assert torch.equal(case.expected(p), value)
    assert torch.equal(storage[..., 0], neighbour)


@each
def test_the_window_of_a_view_shares_the_storage_of_its_tensor(case: Case) -> None:
    p = random(*case.shape)
    window = case.view.of(p)
    assert window.untyped_storage().data_ptr() == p.untyped_storage().data_ptr()
    assert list(window.shape) == case.view.shape()


def test_the_rows_of_several_views_stack_in_their_order() -> None:
    w, b = random(N * H, I), random(N * H)
    views = [SEPARATE, replace(view("(n h)", ()), parameter="b")]
    factor = read(views, {"p": w, "b": b}, torch.empty(shape_of(views), dtype=torch.float64))
    assert torch.equal(factor, torch.cat([_separate(w), _bias(b)], dim=2))
    write(views, {"p": w, "b": b}, 2 * factor)
    assert torch.equal(torch.cat([_separate(w), _bias(b)], dim=2), 2 * factor)


def test_a_conjugated_factor_is_written_as_its_values_not_as_its_memory() -> None:
    case = CASES[4]
    p = random(*case.shape)
    value = torch.randn_like(case.expected(p))
    write([case.view], {"p": p}, value.conj())
    assert torch.equal(case.expected(p), value.conj().resolve_conj())


def test_a_transposed_factor_may_be_written() -> None:
    p = random(N * H, I)
    value = random(N, I, H)
    write([SEPARATE], {"p": p}, value.mT)
    assert torch.equal(_separate(p), value.mT)


def test_reading_widens_and_writing_narrows_to_the_dtype_of_the_parameter() -> None:
    p = random(N * H, I).float()
    factor = read([SEPARATE], {"p": p}, torch.empty(N, H, I, dtype=torch.float64))
    assert torch.equal(factor, _separate(p).double())
    write([SEPARATE], {"p": p}, factor / 3)
    assert torch.equal(_separate(p), (factor / 3).float())


def test_views_that_disagree_in_copies_or_dimension_are_refused_and_named() -> None:
    other = replace(SEPARATE, parameter="other", copies=("h",), dim=("n",))
    with pytest.raises(ValueError, match="other"):
        shape_of([SEPARATE, other])


def test_patterns_name_the_axes_of_each_dimension() -> None:
    assert parse("(n g h) i") == (("n", "g", "h"), ("i",))
    assert parse("i (s n h)") == (("i",), ("s", "n", "h"))


def partial_views() -> Iterator[tuple[View, frozenset[int]]]:
    """Views of parts of a (12, 4), split and picked in every way, each with the entries that it covers."""
    entries = torch.arange(48).view(12, 4)
    for sizes in ((12,), (2, 6), (6, 2), (3, 4), (4, 3), (2, 2, 3), (2, 3, 2), (3, 2, 2)):
        names = "abc"[: len(sizes)]
        for chosen in product(*((None, *range(n)) for n in sizes)):
            select = {name: at for name, at in zip(names, chosen, strict=True) if at is not None}
            rows = (*(name for name in names if name not in select), "i")
            found = View.pattern(
                "p", (tuple(names), ("i",)), {**dict(zip(names, sizes, strict=True)), "i": 4}, (), (), rows,
                select=select,
            )  # fmt: skip
            yield found, frozenset(found.of(entries).flatten().tolist())


def test_views_have_one_region_exactly_if_they_cover_the_same_entries() -> None:
    covered: dict[object, set[frozenset[int]]] = {}
    regions: dict[frozenset[int], set[object]] = {}
    for found, seen in partial_views():
        covered.setdefault(found.region, set()).add(seen)
        regions.setdefault(seen, set()).add(found.region)
    assert all(len(held) == 1 for held in (*covered.values(), *regions.values()))


def test_views_meet_exactly_if_they_have_an_entry_in_common() -> None:
    views = [*partial_views()]
    columns = [view.pick("i", n) for view, _ in views[::7] for n in range(4)]
    views += [(view, frozenset(view.of(torch.arange(48).view(12, 4)).flatten().tolist())) for view in columns]
    for (first, one), (second, other) in combinations(views, 2):
        assert first.meets(second) == second.meets(first) == bool(one & other)
    assert not views[0][0].meets(replace(views[0][0], parameter="q"))
