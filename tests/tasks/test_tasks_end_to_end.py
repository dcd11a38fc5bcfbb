"""From a folder and a local file to batches that the model takes, for every task."""

from __future__ import annotations

import warnings

import pytest
import torch

from hf_geosharp.errors import GeosharpWarning, UsageError
from hf_geosharp.symmetry.inputs import call
from hf_geosharp.tasks.columns import Columns
from hf_geosharp.tasks.kinds import weight
from hf_geosharp.tasks.models import load_model
from hf_geosharp.tasks.prepare import prepare
from tests.tasks.tiny import edit_config, make_images


def run(prepared):
    """The outputs of the first batch."""
    with torch.no_grad():
        return call(prepared.model, prepared.batches[0])


def go(folder, data, **options):
    of_model = {name: options.pop(name) for name in ("task", "dtype", "allow_missing") if name in options}
    loaded = load_model(folder, device="cpu", **of_model)
    return prepare(loaded, data=data, **{"samples": 16, "batch_size": 8, **options})


def test_text_classification(bert_folder, text_csv):
    prepared = go(bert_folder, text_csv)
    assert prepared.task.name == "text-classification"
    assert not prepared.model.training
    assert len(prepared.batches) == 2
    assert prepared.batches[0]["labels"].shape == (8,)
    assert set(prepared.batches[0]["labels"].tolist()) == {0, 1}
    assert weight(prepared.task, prepared.batches[0]) == 8
    assert torch.isfinite(run(prepared).loss)
    assert prepared.loss is None
    assert prepared.model_identity["class"] == "BertForSequenceClassification"
    assert prepared.model_identity["checkpoint_dtype"] == "float32"
    assert prepared.data_identity["columns"] == {"text": "text", "label": "label"}
    assert {"id", "config", "split", "fingerprint", "rows", "chosen"} <= set(prepared.data_identity)
    assert prepared.data_identity["split"] == "train"
    assert prepared.data_identity["chosen"] == "argument"
    assert prepared.data_identity["dropped"] == 0


def test_pairs_of_texts(bert_folder, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"premise": "good film", "hypothesis": "not bad", "label": 1}\n' * 8)
    batch = go(bert_folder, path, samples=8).batches[0]
    assert batch["token_type_ids"].max() == 1
    assert batch["input_ids"].shape == (8, 7)


def test_image_classification_makes_images_grey(vit_folder, tmp_path):
    for mode in ("L", "RGB"):
        path = tmp_path / f"{mode}.parquet"
        make_images(mode).to_parquet(str(path))
        prepared = go(vit_folder, path, samples=12, batch_size=6)
        assert prepared.batches[0]["pixel_values"].shape == (6, 1, 8, 8)
        assert prepared.batches[0]["pixel_values"].dtype == torch.float32
        assert torch.isfinite(run(prepared).loss)
        assert prepared.data_identity["labels"] == "names"


def test_image_folder(vit_folder, tmp_path):
    images = make_images()
    for i, row in enumerate(images):
        folder = tmp_path / "images" / str(row["label"])
        folder.mkdir(parents=True, exist_ok=True)
        row["image"].save(folder / f"{i}.png")
    prepared = go(vit_folder, tmp_path / "images", samples=12, batch_size=6)
    assert prepared.data_identity["rows"] == 12


def test_causal_lm(gpt_folder, text_file):
    prepared = go(gpt_folder, text_file)
    batch = prepared.batches[0]
    assert "token_type_ids" not in batch
    padding = batch["attention_mask"] == 0
    assert padding.any()
    assert (batch["labels"][padding] == -100).all()
    assert (batch["labels"][~padding] == batch["input_ids"][~padding]).all()
    assert prepared.model.config.pad_token_id == 5
    # One term a token but the first of each text.
    assert weight(prepared.task, batch) == int(batch["attention_mask"].sum()) - 8
    assert torch.isfinite(run(prepared).loss)


@pytest.mark.parametrize("name", ["gpt", "mlm", "t5"])
def test_padding_changes_neither_weight_nor_loss(name, request, text_file):
    prepared = go(request.getfixturevalue(f"{name}_folder"), text_file)
    whole = prepared.batches[0]
    total, terms = 0.0, 0.0
    for i in range(8):
        length = {key: int(whole["attention_mask"][i].sum()) for key in whole}
        if name == "t5":
            length["labels"] = int((whole["labels"][i] != -100).sum())
        one = {key: value[i : i + 1, : length[key]] for key, value in whole.items()}
        with torch.no_grad():
            total += weight(prepared.task, one) * float(prepared.model(**one).loss)
        terms += weight(prepared.task, one)
    assert terms == weight(prepared.task, whole)
    assert total / terms == pytest.approx(float(run(prepared).loss), rel=1e-5)


def test_masked_lm(mlm_folder, text_file):
    prepared = go(mlm_folder, text_file)
    for batch in prepared.batches:
        counted = batch["labels"] != -100
        assert counted.any(dim=1).all()
        assert not (counted & (batch["attention_mask"] == 0)).any()
        assert not torch.isin(batch["labels"][counted], torch.tensor([2, 3])).any()
        assert weight(prepared.task, batch) == int(counted.sum())
    assert torch.isfinite(run(prepared).loss)


def test_seq2seq_with_targets(t5_folder, tmp_path):
    path = tmp_path / "targets.csv"
    path.write_text("document,summary\n" + "the film was good,good\na plot and a cast so dull,dull plot\n" * 4)
    prepared = go(t5_folder, path, samples=8)
    batch = prepared.batches[0]
    assert prepared.data_identity["target"] == "column"
    assert weight(prepared.task, batch) == 4 * 2 + 4 * 3
    assert torch.isfinite(run(prepared).loss)


def test_seq2seq_from_halves_of_a_text(t5_folder, text_file):
    prepared = go(t5_folder, text_file)
    assert prepared.data_identity["target"] == "second half of the words"
    assert torch.isfinite(run(prepared).loss)


@pytest.mark.parametrize("name", ["bert", "vit", "gpt", "mlm", "t5"])
def test_without_labels(name, request, tmp_path, text_csv):
    folder, data = request.getfixturevalue(f"{name}_folder"), text_csv
    if name == "vit":
        data = tmp_path / "images.parquet"
        make_images().remove_columns("label").to_parquet(str(data))
    prepared = go(folder, data, samples=8, labels="model")
    batch = prepared.batches[0]
    losses = prepared.loss(run(prepared), batch)
    assert losses.shape == (weight(prepared.task, batch),)
    assert losses.abs().max() < 1e-5
    assert ("labels" in batch) == (name == "t5")
    with torch.no_grad():
        for parameter in prepared.model.parameters():
            parameter.mul_(1.5)
    assert prepared.loss(run(prepared), batch).mean() > 0


def test_labels_is_one_of_two(bert_folder):
    with pytest.raises(UsageError, match="everyone"):
        go(bert_folder, None, labels="everyone")


@pytest.mark.parametrize("name", ["bert", "mlm"])
def test_seeds_reproduce(name, request, text_csv):
    folder = request.getfixturevalue(f"{name}_folder")
    first, again, other = (go(folder, text_csv, seed=seed).batches for seed in (3, 3, 4))
    for one, two in zip(first, again, strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert any(
        one["input_ids"].shape != two["input_ids"].shape or not torch.equal(one["input_ids"], two["input_ids"])
        for one, two in zip(first, other, strict=True)
    )


def test_an_incomplete_batch_is_dropped_and_recorded(bert_folder, text_csv):
    prepared = go(bert_folder, text_csv, samples=20)
    assert prepared.data_identity["dropped"] == 4
    assert prepared.data_identity["samples"] == 16
    with pytest.warns(GeosharpWarning, match="40 rows"):
        prepared = go(bert_folder, text_csv, samples=1024, batch_size=16)
    assert prepared.data_identity["batches"] == 2


def test_texts_are_cut_to_what_the_model_takes(gpt_folder, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("\n".join(["good film " * 30] * 8))
    assert go(gpt_folder, path, samples=8).batches[0]["input_ids"].shape == (8, 16)
    assert go(gpt_folder, path, samples=8, max_length=5).batches[0]["input_ids"].shape == (8, 5)


def test_roberta_keeps_the_reserved_positions_free(tmp_path, text_csv):
    from transformers import RobertaConfig, RobertaForMaskedLM

    from tests.tasks.tiny import SIZES, make_tokenizer, save

    config = RobertaConfig(vocab_size=22, max_position_embeddings=10, pad_token_id=1, type_vocab_size=1, **SIZES)
    folder = save(RobertaForMaskedLM(config), tmp_path / "roberta", make_tokenizer())
    path = tmp_path / "long.txt"
    path.write_text("\n".join(["good film " * 30] * 8))
    prepared = go(folder, path, samples=8)
    assert prepared.batches[0]["input_ids"].shape == (8, 8)
    assert torch.isfinite(run(prepared).loss)


def test_regression(tmp_path):
    from transformers import BertForSequenceClassification

    from tests.tasks.tiny import bert_config, make_tokenizer, save

    folder = save(BertForSequenceClassification(bert_config(num_labels=1)), tmp_path / "bert", make_tokenizer())
    path = tmp_path / "scores.csv"
    path.write_text("text,label\n" + "good film,0.5\nbad film,2\n" * 4)
    prepared = go(folder, path, samples=8)
    assert prepared.batches[0]["labels"].dtype == torch.float32
    assert prepared.data_identity["labels"] == "regression"
    assert torch.isfinite(run(prepared).loss)
    with pytest.raises(UsageError, match="regression"):
        go(folder, path, samples=8, labels="model")


def test_fractions_have_the_precision_of_the_model(vit_folder, tmp_path):
    make_images().to_parquet(str(tmp_path / "images.parquet"))
    prepared = go(vit_folder, tmp_path / "images.parquet", samples=12, batch_size=6, dtype="float64", labels="model")
    assert prepared.batches[0]["pixel_values"].dtype == torch.float64
    assert prepared.loss(run(prepared), prepared.batches[0]).abs().max() < 1e-14


def test_a_classifier_on_a_decoder_finds_the_last_word(tmp_path, text_csv):
    from transformers import GPT2Config, GPT2ForSequenceClassification

    from tests.tasks.tiny import make_tokenizer, save

    config = GPT2Config(vocab_size=22, n_positions=16, n_embd=8, n_layer=1, n_head=2, eos_token_id=5)
    names = {"neg": 0, "pos": 1}
    config.id2label, config.label2id = {i: name for name, i in names.items()}, names
    model = GPT2ForSequenceClassification(config)
    prepared = go(save(model, tmp_path / "gpt", make_tokenizer("gpt")), text_csv)
    batch = prepared.batches[0]
    shortest = int(batch["attention_mask"].sum(1).argmin())
    length = int(batch["attention_mask"][shortest].sum())
    assert length < batch["input_ids"].shape[1]
    alone = {"input_ids": batch["input_ids"][shortest : shortest + 1, :length]}
    with torch.no_grad():
        torch.testing.assert_close(prepared.model(**alone).logits[0], run(prepared).logits[shortest])


def test_column_choices(bert_folder, tmp_path):
    path = tmp_path / "odd.csv"
    path.write_text("review,title,stars\n" + "good film,the cast,1\n" * 8)
    prepared = go(bert_folder, path, samples=8, columns=Columns(text="review", text_pair="title", label="stars"))
    assert prepared.data_identity["columns"] == {"text": "review", "text_pair": "title", "label": "stars"}


def test_a_usual_run_is_silent(bert_folder, text_csv, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeosharpWarning)
        go(bert_folder, text_csv)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_the_task_can_be_named(bert_folder, text_csv):
    edit_config(bert_folder, architectures=None)
    assert go(bert_folder, text_csv, task="sequence-classification").task.name == "text-classification"


def test_a_label_map_is_not_for_labels_of_the_model(bert_folder, tmp_path):
    with pytest.raises(UsageError, match="--label-map"):
        go(bert_folder, tmp_path / "unread.csv", labels="model", label_map={"bad": 0})
