"""Finding and opening data, from every kind of source; and what is said where there are none."""

from __future__ import annotations

import json
from importlib import resources

import datasets
import pytest

from hf_geosharp.errors import DataError, DataWarning, GeosharpWarning, HubError, UsageError
from hf_geosharp.tasks.columns import Columns, choose
from hf_geosharp.tasks.data import CardData, card_data, load_data
from hf_geosharp.tasks.kinds import find_task
from tests.tasks.tiny import make_images

CLASSIFICATION, MASKED, SEQ2SEQ = (find_task(name) for name in ("text-classification", "masked-lm", "seq2seq-lm"))
ROWS = {"text": ["good", "bad"], "label": [1, 0]}


def load(source, task=CLASSIFICATION, **options):
    return load_data(source, task=task, **options)


@pytest.mark.parametrize("ending", ["csv", "tsv", "json", "jsonl", "parquet", "txt", "arrow"])
def test_files(tmp_path, ending):
    rows = datasets.Dataset.from_dict(ROWS)
    path = tmp_path / f"rows.{ending}"
    if ending == "arrow":
        rows.save_to_disk(str(tmp_path / "saved"))
        next((tmp_path / "saved").glob("*.arrow")).rename(path)
    elif ending == "txt":
        path.write_text("good\nbad\n")
    elif ending in ("csv", "tsv"):
        separator = "," if ending == "csv" else "\t"
        path.write_text(
            "\n".join(separator.join(map(str, row)) for row in [("text", "label"), ("good", 1), ("bad", 0)])
        )
    elif ending == "parquet":
        rows.to_parquet(str(path))
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    dataset, identity = load(path)
    assert dataset["text"][:] == ["good", "bad"]
    assert identity["id"] == str(path)
    assert identity["split"] == "train"
    assert identity["rows"] == 2
    assert identity["chosen"] == "argument"
    assert json.dumps(identity)


def test_folders(tmp_path):
    rows = datasets.Dataset.from_dict(ROWS)
    rows.save_to_disk(str(tmp_path / "one"))
    assert load(tmp_path / "one")[1]["split"] is None
    with pytest.raises(DataError, match="no split 'test'"):
        load(tmp_path / "one", split="test")
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(str(tmp_path / "splits"))
    assert load(tmp_path / "splits")[1]["rows"] == 2
    (tmp_path / "files" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        rows.to_parquet(str(tmp_path / "files" / "data" / f"{split}.parquet"))
    assert load(tmp_path / "files")[1]["split"] == "train"
    assert load(tmp_path / "files", split="train[:1]")[1]["rows"] == 1


def test_another_split_is_recorded_and_said(tmp_path):
    rows = datasets.Dataset.from_dict(ROWS)
    datasets.DatasetDict(test=rows).save_to_disk(str(tmp_path / "test"))
    datasets.DatasetDict(dev=rows, test=rows).save_to_disk(str(tmp_path / "both"))
    with pytest.warns(DataWarning, match="'test'"):
        assert load(tmp_path / "test")[1]["split"] == "test"
    with pytest.raises(DataError, match=r"no split 'train'.*dev, test"):
        load(tmp_path / "both")
    with pytest.raises(DataError, match=r"no split 'nosuch'.*dev, test"):
        load(tmp_path / "both", split="nosuch")


def test_an_unknown_split_of_files(text_csv):
    with pytest.raises(DataError, match=r"no split 'test'.*train"):
        load(text_csv, split="test")


def test_bad_sources(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder .*nowhere\.csv"):
        load(tmp_path / "nowhere.csv")
    with pytest.raises(DataError, match="no file or folder"):
        load("nowhere.csv")
    (tmp_path / "rows.docx").write_text("x")
    with pytest.raises(DataError, match=r"cannot read a \.docx"):
        load(tmp_path / "rows.docx")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(DataError, match=r"empty\.csv is empty"):
        load(tmp_path / "empty.csv")
    (tmp_path / "header.csv").write_text("text,label\n")
    with pytest.raises(DataError, match=r"header\.csv.*is empty"):
        load(tmp_path / "header.csv")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="folder cannot be read"):
        load(tmp_path / "folder")


def test_the_cause_of_a_failed_build_is_shown(tmp_path):
    (tmp_path / "broken.json").write_text('{"text": "good"}\n{"text": \n')
    with pytest.raises(DataError, match=r"broken\.json cannot be read.*JSON"):
        load(tmp_path / "broken.json")


def test_files_of_other_columns_are_told(tmp_path):
    for name, column in (("a", "text"), ("b", "words")):
        (tmp_path / f"{name}.csv").write_text(f"{column},label\ngood film,1\n")
    with pytest.raises(DataError, match=r"cannot be read:.*(different|same columns).*words"):
        load(tmp_path)


def test_names_that_are_patterns(tmp_path):
    folder = tmp_path / "part[1]"
    folder.mkdir()
    (folder / "rows*.csv").write_text("text,label\ngood film,1\n")
    (folder / "rows1.csv").write_text("text,label\nbad film,0\n")
    dataset, _ = load(folder / "rows*.csv")
    assert dataset["text"] == ["good film"]
    with pytest.raises(DataError, match="its path holds one of"):
        load(folder)


def test_files_of_several_kinds_are_told(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\ngood film,1\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "bad film", "label": 0}\n')
    with pytest.warns(DataWarning, match=r"several kinds \(csv, json\)"):
        load(tmp_path)


def test_fields_without_a_name_are_told(tmp_path):
    """The first field of each row becomes the row's name, so "text" holds what stands behind the first comma."""
    (tmp_path / "rows.csv").write_text("text,label\nfine, if long,1\ndull, so dull,0\n")
    for place in (tmp_path / "rows.csv", tmp_path):
        with pytest.warns(GeosharpWarning, match=r"more fields than its first line has names.*quotes"):
            dataset, _ = load(place)
        assert dataset["text"][:] == [" if long", " so dull"]


def test_files_that_cannot_be_read_come_with_advice(tmp_path, capfd):
    (tmp_path / "latin.csv").write_bytes("text,label\ncaf\xe9,1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"(data|byte)\. Save the file as UTF-8"):
        load(tmp_path / "latin.csv")
    (tmp_path / "semicolons.csv").write_text("text;label\nfine;1\ndull, long, and old;0\n")
    with pytest.raises(DataError, match=r"saw 3\. Fields are separated by commas in a \.csv file"):
        load(tmp_path / "semicolons.csv")
    # The library logs them too.
    assert "Failed to read" not in capfd.readouterr().err


def test_a_cache_that_cannot_be_written_is_told_from_data_that_cannot_be_read(text_csv, tmp_path, monkeypatch):
    (tmp_path / "no-folder").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "no-folder" / "cache")
    with pytest.raises(DataError, match=r"cannot be put into the cache of datasets \(.*no-folder.*Set HF_HOME"):
        load(str(text_csv))


def test_scripts_are_not_run(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(DataError, match=r"mine is .*Python script"):
        load(tmp_path / "mine")


def test_the_hub_without_a_network():
    with pytest.raises(HubError, match=r"data set 'someone/data'.*network"):
        load("someone/data")


def result(kind, name, task="text-classification", config=None):
    return {"task": {"type": task}, "dataset": {"type": kind, "name": name, "config": config}}


def test_what_a_card_names():
    assert card_data({"datasets": "imdb"}, CLASSIFICATION) == [CardData("imdb")]
    both = {
        "datasets": ["nyu-mll/glue"],
        "model-index": [
            {"name": "m", "results": [result("glue", "GLUE", config="sst2"), result("other/qa", "QA", "qa")]}
        ],
    }
    assert card_data(both, CLASSIFICATION) == [CardData("nyu-mll/glue", "sst2")]
    measured = {"model-index": [{"name": "m", "results": [result("glue", "GLUE", config="mnli")]}]}
    assert card_data(measured, CLASSIFICATION) == [CardData("glue", "mnli")]
    assert card_data(measured, MASKED) == []
    several = {"datasets": ["imdb", "glue"], **measured}
    assert card_data(several, CLASSIFICATION) == [CardData("glue", "mnli")]
    assert len(card_data({"datasets": ["imdb", "yelp"]}, CLASSIFICATION)) == 2
    assert card_data({"datasets": ["imagefolder"], "model-index": "odd"}, CLASSIFICATION) == []


def test_data_of_the_card(text_csv):
    dataset, identity = load(None, card={"datasets": [str(text_csv)]})
    assert identity["chosen"] == "model card"
    assert len(dataset) == 40


def test_no_data_at_all(text_csv):
    with pytest.raises(UsageError, match=r"names none.*--data"):
        load(None)
    with pytest.raises(UsageError, match=r"imdb, yelp.*--data"):
        load(None, card={"datasets": ["imdb", "yelp"]})
    with pytest.raises(HubError, match=r"model card names .* imdb.*--data"):
        load(None, card={"datasets": ["imdb"]})


def test_the_shipped_text(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    with pytest.raises(DataError, match="not installed"):
        load(None, MASKED)
    folder = tmp_path / "demos" / "text" / "data"
    folder.mkdir(parents=True)
    datasets.Dataset.from_dict({"text": ["a film"]}).to_parquet(str(folder / "train.parquet"))
    identity = load(None, MASKED)[1]
    assert identity["id"] == "shipped text"
    assert identity["chosen"] == "shipped text"
    # A card's data that cannot be used are passed over, and said.
    (tmp_path / "numbers.csv").write_text("x\n1\n")
    with pytest.warns(GeosharpWarning, match=r"numbers\.csv"):
        assert load(None, MASKED, card={"datasets": [str(tmp_path / "numbers.csv")]})[1]["chosen"] == "shipped text"


def test_a_configuration_of_what_has_none_is_refused(tmp_path):
    rows = datasets.Dataset.from_dict(ROWS)
    rows.to_csv(str(tmp_path / "rows.csv"))
    rows.save_to_disk(str(tmp_path / "saved"))
    for name in ("rows.csv", "saved"):
        with pytest.raises(UsageError, match=rf"{name} has no configurations.*--data-config"):
            load(str(tmp_path / name), config="mnli")


@pytest.mark.parametrize("asked", [{"config": "mnli"}, {"split": "test"}])
def test_the_shipped_text_has_no_parts_to_choose_from(asked):
    (name,) = asked
    with pytest.raises(UsageError, match=f"--(data-)?{name}.*the text that ships with this package has one part"):
        load(None, MASKED, **asked)


@pytest.mark.parametrize(
    ("names", "task", "expected"),
    [
        (["text", "label"], CLASSIFICATION, Columns(text="text", label="label")),
        (["sentence", "labels"], CLASSIFICATION, Columns(text="sentence", label="labels")),
        (["question", "sentence", "label"], CLASSIFICATION, Columns("question", "sentence", label="label")),
        (["sentence1", "sentence2", "target"], CLASSIFICATION, Columns("sentence1", "sentence2", label="target")),
        (["text", "label"], MASKED, Columns(text="text")),
        (["article", "highlights"], SEQ2SEQ, Columns(text="article", label="highlights")),
        (["text"], SEQ2SEQ, Columns(text="text")),
    ],
)
def test_columns_by_name(names, task, expected):
    assert choose(datasets.Dataset.from_dict({name: ["x"] for name in names}), task) == expected


def test_columns_by_choice():
    rows = datasets.Dataset.from_dict({name: ["x"] for name in ("text", "title", "label", "mood")})
    assert choose(rows, CLASSIFICATION, Columns(text="title")) == Columns(text="title", label="label")
    assert choose(rows, CLASSIFICATION, Columns(text_pair="title", label="mood")) == Columns(
        "text", "title", None, "mood"
    )
    assert choose(rows, SEQ2SEQ, Columns(label="title")) == Columns(text="text", label="title")
    assert choose(rows, CLASSIFICATION, need_label=False).label is None


@pytest.mark.parametrize(
    ("task", "chosen", "culprit"),
    [
        (CLASSIFICATION, Columns(image="text"), r"image column is 'text' \(--image-column.*text-classification"),
        (MASKED, Columns(label="label"), r"--label-column.*masked-lm"),
        (MASKED, Columns(text_pair="title"), r"--text-pair-column.*masked-lm"),
        (SEQ2SEQ, Columns(text_pair="title"), r"--text-pair-column.*seq2seq-lm"),
        (find_task("image-classification"), Columns(text="text"), r"--text-column.*image-classification"),
    ],
)
def test_columns_that_a_task_does_not_read(task, chosen, culprit):
    rows = datasets.Dataset.from_dict({name: ["x"] for name in ("text", "title", "label")})
    with pytest.raises(UsageError, match=culprit):
        choose(rows, task, chosen)


def test_a_label_column_is_for_labels_from_the_data():
    rows = datasets.Dataset.from_dict({"text": ["x"], "mood": [1], "title": ["y"]})
    with pytest.raises(UsageError, match=r"--label-column.*labels 'model' reads none"):
        choose(rows, CLASSIFICATION, Columns(label="mood"), need_label=False)
    assert choose(rows, SEQ2SEQ, Columns(label="title"), need_label=False).label == "title"


def test_columns_by_kind():
    rows = make_images().rename_columns({"image": "scan", "label": "digit"})
    assert choose(rows, find_task("image-classification")) == Columns(image="scan", label="digit")


def test_columns_that_are_not_there():
    rows = datasets.Dataset.from_dict({"body": ["x"], "mood": [1]})
    with pytest.raises(DataError, match=r"no column 'nosuch'.*--text-column.*body, mood"):
        choose(rows, CLASSIFICATION, Columns(text="nosuch"))
    with pytest.raises(DataError, match=r"body, mood.*--text-column"):
        choose(rows, CLASSIFICATION)
    with pytest.raises(DataError, match=r"body, mood.*--label-column"):
        choose(rows, CLASSIFICATION, Columns(text="body"))
