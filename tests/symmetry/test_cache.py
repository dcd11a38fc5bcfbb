"""Finds on disk: read back as they were, for the same architecture only, and never a reason to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import tiny
from hf_geosharp.symmetry import cache, find
from hf_geosharp.symmetry.find import find_symmetries
from hf_geosharp.symmetry.inputs import synthetic
from tests.families import Family, batch_of, build, each_family


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "finds"
    monkeypatch.setenv(cache.ENVIRONMENT, str(place))
    return place


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were searched, not looked up."""
    searched: list[nn.Module] = []
    search = find._find

    def counted(model: nn.Module, *args: Any) -> Any:
        searched.append(model)
        return search(model, *args)

    monkeypatch.setattr(find, "_find", counted)
    return searched


@each_family
def test_what_is_read_back_is_what_was_found(family: Family) -> None:
    found = find_symmetries(build(family.name), batch_of(family.name), cached=False)
    assert cache.decode(json.loads(json.dumps(cache.encode(found)))) == found


def test_the_second_model_of_an_architecture_is_not_searched(folder: Path, searches: list[nn.Module]) -> None:
    first = find_symmetries(build("llama", seed=1))
    again = find_symmetries(build("llama", seed=2))
    assert again == first
    assert len(searches) == 1
    assert len(list(folder.glob("*.json"))) == 1
    assert find_symmetries(build("llama", seed=2), cached=False) == first
    assert len(searches) == 2


def test_a_find_is_for_one_state_of_the_code(tmp_path: Path) -> None:
    """Between two releases a version says nothing."""
    assert cache.versions()[0] == ("code of hf-geosharp", cache.of_package(cache.PACKAGE))
    digests = []
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("deeper/b.py", ""), ("notes.txt", "unread")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        cache.of_package.cache_clear()
        digests.append(cache.of_package(tmp_path))
    assert len(set(digests)) == 3
    assert digests[2] == digests[3]


def test_a_find_is_for_one_preset_one_shape_one_setting_and_one_kind_of_proof() -> None:
    model, batch = build("bert"), batch_of("bert")
    known = cache.key(model, "full", batch)
    assert cache.key(build("bert", seed=3), "full", batch) == known
    other = build("bert")
    other.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    changed = build("bert")
    changed.config.hidden_act = "relu"  # type: ignore[union-attr]
    named = build("bert")
    named.config.id2label = {0: "bad", 1: "good", 2: "odd"}  # type: ignore[union-attr]
    assert cache.key(named, "full", batch) == known
    keys = [
        known,
        cache.key(model, "attention", batch),
        cache.key(model, "full", {**batch, "token_type_ids": batch["input_ids"]}),
        cache.key(model, "full", batch, proved=False),
        cache.key(other, "full", batch),
        cache.key(changed, "full", batch),
        cache.key(build("roberta"), "full", batch),
    ]
    assert len(set(keys)) == len(keys)


def test_a_find_knows_which_parameters_are_one() -> None:
    """The configuration does not tell: layers that were made one afterwards are other symmetries."""
    plain, tied, aliased = build("bert"), build("bert"), build("bert")
    for model in (tied, aliased):
        first, second = (layer.attention.self.query for layer in model.bert.encoder.layer)  # type: ignore[union-attr]
        second.weight = first.weight if model is tied else nn.Parameter(first.weight.data)
    batch = batch_of("bert")
    keys = [cache.key(model, "full", batch) for model in (plain, tied, aliased)]
    assert keys[0] not in keys[1:]
    # One parameter under two names and two on one piece of memory are the same to a find.
    assert keys[1] == keys[2]


def test_a_find_is_for_one_code() -> None:
    """Of a class that is no library's, and of what was put in place of a module's forward or hooked to it."""
    batch, keys = batch_of("bert"), []
    for factor in (1.0, 2.0, 2.0):
        kind = type("Own", (type(build("bert")),), {"scaled": eval(f"lambda self, x: x * {factor}")})
        model = build("bert")
        model.__class__ = kind
        keys.append(cache.key(model, "full", batch))
    assert keys[0] != keys[1] == keys[2] != cache.key(build("bert"), "full", batch)
    patched, hooked = build("bert"), build("bert")
    patched.bert.pooler.forward = lambda x: x[:, 0]  # type: ignore[union-attr]
    hooked.bert.pooler.register_forward_hook(lambda module, args, output: output)  # type: ignore[union-attr]
    keys += [cache.key(model, "full", batch) for model in (build("bert"), patched, hooked)]
    assert len(set(keys)) == 5


@pytest.mark.slow
def test_the_digest_of_code_is_the_same_in_every_process() -> None:
    """Python orders sets anew in each."""
    program = (
        "from torch import nn\n"
        "from hf_geosharp.symmetry import fingerprint\n"
        "class Own(nn.Linear):\n"
        "    def named(self, x):\n"
        "        return x in {'first', 'second', 'third', 'fourth', 'fifth', 'sixth'}\n"
        "digest = fingerprint.of_code(nn.Sequential(Own(2, 2)))\n"
    )
    own = f"own = {{'__name__': 'own'}}; exec(compile({program!r}, 'own', 'exec', dont_inherit=True), own)"
    here: dict[str, Any] = {}
    exec(own, here)
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", f"{own}; print(own['digest'])"]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert there.strip() == here["own"]["digest"]


def test_a_model_without_a_configuration_is_searched_every_time(folder: Path) -> None:
    assert cache.key(nn.Linear(2, 2), "full", {}) is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"schema": 0}', json.dumps({"schema": cache.SCHEMA, "pairs": [{"=": "os"}]})]
)
def test_what_cannot_be_read_counts_as_not_there(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "known.json").write_text(content)
    assert cache.load("known") is None
    assert cache.load("unknown") is None


def test_an_empty_name_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENVIRONMENT, "")
    assert cache.folder() is None
    cache.store("any", find_symmetries(build("bert"), batch_of("bert")))
    assert cache.load("any") is None


def test_by_default_it_is_with_the_other_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.ENVIRONMENT)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "hf-geosharp" / "symmetries"


def test_a_folder_that_cannot_be_made_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "file" / "finds"))
    assert find_symmetries(build("bert")).pairs


def test_a_write_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.store("any", find_symmetries(build("bert"), batch_of("bert"), cached=False))
    assert list(folder.iterdir()) == []


_WRITER = """
from hf_geosharp.symmetry import cache
known = cache.load("known")
for _ in range(40):
    cache.store("shared", known)
    assert cache.load("shared") == known != None
"""


@pytest.mark.slow
def test_processes_share_a_folder(folder: Path) -> None:
    cache.store("known", find_symmetries(build("bert"), batch_of("bert"), cached=False))
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER], stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]  # fmt: skip
    assert [(w.communicate()[1][-500:], w.returncode) for w in writers] == [("", 0)] * 4
    assert {p.name for p in folder.iterdir()} == {"known.json", "shared.json"}


def of_zeros(batch: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """A model that attends to zeros."""
    model = build("bert")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model, batch


def of_one_token(batch: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """There no query and no key can be told apart."""
    return build("bert"), {k: v[:, :1] for k, v in batch.items() if v.ndim == 2}


@pytest.mark.parametrize("poor", [of_zeros, of_one_token])
def test_a_find_of_what_does_not_show_is_not_for_others(
    poor: Callable[[dict[str, Any]], tuple[nn.Module, dict[str, Any]]], folder: Path, searches: list[nn.Module]
) -> None:
    batch = batch_of("bert")
    missed = find_symmetries(*poor(batch))
    assert missed.missed
    assert not list(folder.glob("*.json"))
    found = find_symmetries(build("bert"), batch)
    assert found == find_symmetries(build("bert"), batch, cached=False)
    assert found.dimension > missed.dimension
    assert len(searches) == 3
    # From then on it is known.
    assert find_symmetries(build("bert", seed=2), batch) == found
    assert len(searches) == 3


def test_a_find_that_misses_something_is_for_its_own_inputs(folder: Path, searches: list[nn.Module]) -> None:
    model = tiny.build("convbert")
    batches = [synthetic(model, tokens=n) for n in (9, 19)]
    found = find_symmetries(model, batches[0])
    assert found.missed
    assert find_symmetries(model, batches[0]) == found
    assert len(searches) == 1
    assert find_symmetries(model, batches[1]) == found
    assert len(searches) == 2


def test_a_find_with_claims_that_are_refuted_is_for_its_own_inputs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of("bert")
    with monkeypatch.context() as patch:
        patch.setattr(find, "_less", lambda found, proof, rounding: found.without({found.pairs[0].name: "refuted"}))
        refuted = find_symmetries(build("bert"), batch)
    assert refuted.dropped
    assert find_symmetries(build("bert"), batch) == refuted
    other = {k: v[:1] for k, v in batch.items()}
    assert find_symmetries(build("bert"), other) == find_symmetries(build("bert"), other, cached=False)
