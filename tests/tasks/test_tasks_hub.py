"""Folders and the Hub: where a model is from, and what is said where it is out of reach."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hf_geosharp.errors import HubError, UsageError
from tests.tasks.tiny import load


def test_the_hub_without_a_network():
    with pytest.raises(HubError, match=r"someone/model.*network"):
        load("someone/model")
    with pytest.raises(HubError, match="neither a folder"):
        load("no such id!")


@pytest.mark.parametrize(
    ("name", "culprit"),
    [
        ("GatedRepoError", "someone/model.*gated"),
        ("RepositoryNotFoundError", "someone/model.*does not exist"),
        ("RevisionNotFoundError", "someone/model.*no such revision"),
        ("HfHubHTTPError", "someone/model.*cannot be reached"),
    ],
)
def test_what_the_hub_answers(monkeypatch, name, culprit):
    import huggingface_hub

    kind = getattr(huggingface_hub.errors, name)

    def answer(*args, **options):
        # Made without its constructor, which differs between releases.
        raise kind.__new__(kind, "the Hub's answer")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", answer)
    with pytest.raises(HubError, match=culprit):
        load("someone/model")


def test_a_model_in_the_cache_of_the_hub(bert_folder):
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = Path(constants.HF_HUB_CACHE) / "models--geosharp-test--bert"
    try:
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        shutil.copytree(bert_folder, repository / "snapshots" / commit)
        loaded = load("geosharp-test/bert")
        assert loaded.identity["id"] == "geosharp-test/bert"
        assert loaded.identity["revision"] == commit
        assert loaded.processor is not None
        (repository / "snapshots" / commit / "model.safetensors").unlink()
        with pytest.raises(HubError, match="geosharp-test/bert"):
            load("geosharp-test/bert")
    finally:
        shutil.rmtree(repository, ignore_errors=True)


def test_a_folder_has_no_revision(bert_folder):
    with pytest.raises(UsageError, match="'v2'"):
        load(bert_folder, revision="v2")
