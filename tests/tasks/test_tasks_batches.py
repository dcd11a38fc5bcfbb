"""What Python callers pass: raw and encoded data sets, loaders, and their own batches."""

from __future__ import annotations

import warnings

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from transformers import AutoModelForCausalLM

from benchmarks import tiny
from hf_geosharp import score
from hf_geosharp.errors import DataError, DataWarning, GeosharpWarning, ModelError, UsageError
from hf_geosharp.symmetry.inputs import call
from hf_geosharp.tasks.batches import make_batches
from hf_geosharp.tasks.collate import collate
from hf_geosharp.tasks.in_memory import batches_from
from hf_geosharp.tasks.kinds import find_task
from hf_geosharp.tasks.loaded import LoadedModel
from hf_geosharp.tasks.loss import (
    attach_model_targets,
    bernoulli_kl_to_model,
    check_next_token,
    divergence,
    kl_to_model,
)
from hf_geosharp.tasks.models import load_model
from tests.tasks.tiny import bert_config, make_images, make_tokenizer

TEXTS = datasets.Dataset.from_dict({"text": ["good film", "a bad plot", "the cast is fun"] * 4, "label": [0, 1, 0] * 4})
SIZES = {"samples": 12, "batch_size": 4}


@pytest.fixture(scope="module")
def model():
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(bert_config()).eval()


def encoded(**columns):
    tokenizer = make_tokenizer()
    rows = {"input_ids": [tokenizer(text)["input_ids"] for text in TEXTS["text"]], "label": TEXTS["label"][:]}
    return datasets.Dataset.from_dict(rows | columns)


def batch(**changes):
    return {"input_ids": torch.ones(4, 3, dtype=torch.long), "labels": torch.tensor([0, 1, 0, 1])} | changes


def test_a_raw_data_set(model):
    batches, identity = batches_from(TEXTS, model, processor=make_tokenizer(), **SIZES)
    assert len(batches) == 3
    assert identity["rows"] == 12
    assert torch.isfinite(model(**batches[0]).loss)
    with pytest.raises(UsageError, match="processor="):
        batches_from(TEXTS, model, **SIZES)
    with pytest.raises(UsageError, match="task="):
        batches_from(TEXTS, torch.nn.Linear(1, 1), processor=make_tokenizer(), **SIZES)


def test_an_encoded_data_set(model):
    batches, identity = batches_from(encoded(), model, processor=make_tokenizer(), **SIZES)
    assert set(batches[0]) == {"input_ids", "labels", "attention_mask"}
    assert identity["columns"] == {"encoded": ["input_ids", "label"]}
    assert torch.isfinite(model(**batches[0]).loss)
    with pytest.raises(DataError, match=r"'input_ids' differ.*processor="):
        batches_from(encoded(), model, samples=12, batch_size=12)
    formatted = encoded(extra=["x"] * 12).with_format("torch")
    again, _ = batches_from(formatted, model, processor=make_tokenizer(), **SIZES)
    assert all(torch.equal(one["input_ids"], two["input_ids"]) for one, two in zip(batches, again, strict=True))


def test_labels_beyond_the_classes_are_refused_whichever_rows_are_drawn(model, tmp_path):
    datasets.Dataset.from_dict({"text": ["good film"] * 400, "label": [1] * 399 + [2]}).save_to_disk(tmp_path)
    rows, files = datasets.load_from_disk(tmp_path), sorted(tmp_path.iterdir())
    for chosen in (rows, rows.select(range(100, 400))):
        with pytest.raises(DataError, match=r"'label' has labels up to 2.*num_labels = 2"):
            batches_from(chosen, model, processor=make_tokenizer(), samples=4, batch_size=4)
    # Where no such row is among them they may be what they say.
    batches_from(rows.select(range(100)), model, processor=make_tokenizer(), samples=4, batch_size=4)
    mapped = {"1": 0, "2": 1}
    batches_from(rows, model, processor=make_tokenizer(), samples=4, batch_size=4, label_map=mapped)
    # Nor is anything left beside the data.
    batches_from(rows.select(range(99, -1, -1)), model, processor=make_tokenizer(), samples=4, batch_size=4)
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize("tokens", [False, True])
def test_encoded_labels_of_other_numbers_than_the_models_are_told(tokens):
    from transformers import BertForSequenceClassification, BertForTokenClassification

    def read(*names):
        config = bert_config(id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})
        model = (BertForTokenClassification if tokens else BertForSequenceClassification)(config)
        return batches_from(rows, model, samples=4, batch_size=4)

    classes = datasets.ClassLabel(names=["positive", "negative", "mixed"])
    labels = [[0, 1, 2]] * 4 if tokens else [0, 1, 0, 2]
    rows = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7]] * 4, "label": labels})
    rows = rows.cast_column("label", datasets.Sequence(classes) if tokens else classes)
    with pytest.warns(DataWarning, match=r"'label'.*'positive' is number 0 there and class 1 of the model"):
        read("negative", "positive", "mixed")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        read("positive", "NEGATIVE", "neutral")


def test_padding_changes_no_loss_of_rows_that_are_encoded_without_a_mask(model):
    """A tokenizer that pads makes a mask, too."""
    tokenizer = make_tokenizer()
    (padded,), _ = batches_from(encoded(), model, processor=tokenizer, samples=12, batch_size=12)
    rows = [row[row != tokenizer.pad_token_id] for row in padded["input_ids"]]
    assert len({len(row) for row in rows}) > 1
    with torch.no_grad():
        alone = torch.cat([model(input_ids=row[None]).logits for row in rows])
        torch.testing.assert_close(model(**padded).logits, alone, rtol=1e-5, atol=1e-6)


def test_only_tokens_are_filled_with_the_token_of_padding():
    """Or a mask of another name, positions and fractions would say something of what is not there."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = "[MASK]"
    rows = [
        {
            "input_ids": [5] * n, "decoder_input_ids": [6] * n, "decoder_attention_mask": [1] * n,
            "global_attention_mask": [1] * n, "position_ids": list(range(n)), "input_values": [0.5] * n,
            "labels": [7] * n,
        }
        for n in (2, 3)
    ]  # fmt: skip
    found = {key: value[0, -1].item() for key, value in collate(rows, tokenizer).items()}
    token = tokenizer.pad_token_id
    assert token > 0
    assert found == {**dict.fromkeys(rows[0], 0), "input_ids": token, "decoder_input_ids": token, "labels": -100}


def test_token_labels_are_padded_on_the_tokenizers_side():
    from transformers import BertForMaskedLM

    model = BertForMaskedLM(bert_config()).eval()
    ids = encoded()["input_ids"][:]
    rows = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})
    tokenizer = make_tokenizer()
    for side in ("right", "left"):
        tokenizer.padding_side = side
        batches, _ = batches_from(rows, model, processor=tokenizer, samples=12, batch_size=12)
        padding = batches[0]["input_ids"] == 0
        assert padding[:, -1 if side == "right" else 0].any()
        assert ((batches[0]["labels"] == -100) == padding).all()


def test_texts_are_cut_to_the_length_that_is_asked_for(model):
    short, how = batches_from(TEXTS, model, processor=make_tokenizer(), max_length=4, **SIZES)
    assert max(b["input_ids"].shape[1] for b in short) == 4
    assert (how["max_length"], how["max_length_chosen"]) == (4, True)
    usual, how = batches_from(TEXTS, model, processor=make_tokenizer(), **SIZES)
    assert max(b["input_ids"].shape[1] for b in usual) > 4
    assert "max_length_chosen" not in how
    with pytest.raises(UsageError, match="at least 1 token"):
        batches_from(TEXTS, model, processor=make_tokenizer(), max_length=0, **SIZES)
    with pytest.raises(UsageError, match="adds 2 special tokens"):
        batches_from(TEXTS, model, processor=make_tokenizer(), max_length=2, **SIZES)


def test_a_length_beyond_the_models_limit_is_lowered_with_a_warning(model):
    limit = model.config.max_position_embeddings
    with pytest.warns(GeosharpWarning, match=f"max_length is {limit + 1}, but .* take {limit} tokens at most"):
        _, how = batches_from(TEXTS, model, processor=make_tokenizer(), max_length=limit + 1, **SIZES)
    assert how["max_length"] == limit
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeosharpWarning)
        batches_from(TEXTS, model, processor=make_tokenizer(), max_length=limit, **SIZES)


def test_a_length_is_of_texts_that_are_not_encoded_yet(model, vit_folder):
    for data in (encoded(), [batch()]):
        with pytest.raises(UsageError, match="not encoded yet"):
            batches_from(data, model, processor=make_tokenizer(), max_length=4, samples=4, batch_size=4)
    loaded = load_model(vit_folder, device="cpu")
    with pytest.raises(UsageError, match="the task image-classification has none"):
        batches_from(
            make_images(), loaded.model, processor=loaded.processor, max_length=4, samples=4, batch_size=4
        )  # fmt: skip


@pytest.mark.parametrize("chosen", [{"label_map": {"neg": 0}}, {"columns": {"text": "labels"}}])
def test_what_is_chosen_of_raw_columns_is_refused_where_there_are_none(model, chosen):
    (name,) = chosen
    for data in (encoded(), [batch()]):
        with pytest.raises(UsageError, match=f"{name} applies to data sets of raw columns"):
            batches_from(data, model, processor=make_tokenizer(), samples=4, batch_size=4, **chosen)


def test_a_label_map_is_for_classes(mlm_folder):
    loaded = load_model(mlm_folder, device="cpu")
    with pytest.raises(UsageError, match=r"--label-map.*masked-lm"):
        make_batches(TEXTS, loaded, samples=4, batch_size=4, label_map={"neg": 0})


def test_texts_for_language_models_are_padded_on_the_right_and_the_tokenizer_stays_as_it_is():
    from transformers import BertForMaskedLM

    model = BertForMaskedLM(bert_config()).eval()
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    before = {name: value for name, value in vars(tokenizer).items() if name != "_tokenizer"}
    batches, _ = batches_from(TEXTS, model, processor=tokenizer, task="masked-lm", **SIZES)
    padding = torch.cat([b["input_ids"][:, [0, -1]] == tokenizer.pad_token_id for b in batches])
    assert not padding[:, 0].any()
    assert padding[:, 1].any()
    assert tokenizer.padding_side == "left"
    assert {name: value for name, value in vars(tokenizer).items() if name != "_tokenizer"} == before


def test_images_in_memory(vit_folder):
    loaded = load_model(vit_folder, device="cpu")
    rows = make_images()
    arrays = datasets.Dataset.from_dict({"image": [list(map(list, [[1] * 8] * 8))] * 4, "label": ["0", "1", "2", "0"]})
    for data in (rows, arrays):
        batches, _ = batches_from(data, loaded.model, processor=loaded.processor, samples=4, batch_size=4)
        assert batches[0]["pixel_values"].shape == (4, 1, 8, 8)
    for odd in (1.5, 1, [[0.5] * 8] * 8, [[300] * 8] * 8):
        rows = datasets.Dataset.from_dict({"image": [odd] * 4, "label": ["0"] * 4})
        with pytest.raises(DataError, match=r"'image', row \d holds a \w+, not an image"):
            batches_from(rows, loaded.model, processor=loaded.processor, samples=4, batch_size=4)


def test_grey_images_of_three_rows_are_no_colours(vit_folder):
    """An image of one grey is that grey in any size."""
    loaded = load_model(vit_folder, device="cpu")
    data = datasets.Dataset.from_dict({"image": [[[200] * 8] * rows for rows in (3, 8)], "label": ["0", "1"]})
    ((batch,), _) = batches_from(data, loaded.model, processor=loaded.processor, samples=2, batch_size=2)
    torch.testing.assert_close(batch["pixel_values"], torch.full((2, 1, 8, 8), 2 * 200 / 255 - 1))


def test_loaders_and_lists(model):
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 10, "label": [0, 1] * 5}).with_format("torch")
    batches, identity = batches_from(DataLoader(rows, batch_size=4), model)
    assert [len(one["labels"]) for one in batches] == [4, 4]
    assert identity["dropped"] == 2
    assert len(batches_from(DataLoader(rows, batch_size=4), model, samples=4)[0]) == 1
    assert len(batches_from((batch() for _ in range(3)), model)[0]) == 3
    batches, identity = batches_from([batch(), batch(labels=torch.tensor([0, 0, 0, 0]))], model, samples=1)
    assert identity["batches"] == 2
    assert batches[0]["input_ids"].dtype == torch.int64


class Jittered(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows that are augmented as they are read."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {**self.rows[index], "input_ids": torch.randint(10, (3,))}


@pytest.mark.parametrize("kind", ["plain", "shuffle", "generator", "sampler", "augmented", "transform"])
def test_what_the_data_draw_is_the_same_each_time_and_moves_nothing_on(model, kind):
    """A second score of the same loader would else be of other rows, and training go on with other numbers."""
    plain = {"input_ids": [[1, 2, i] for i in range(10)], "label": [0, 1] * 5}
    rows = datasets.Dataset.from_dict(plain).with_format("torch")
    own = torch.Generator().manual_seed(3)

    def jitter(columns):
        return {**columns, "input_ids": [[int(np.random.randint(10)), *ids[1:]] for ids in columns["input_ids"]]}

    data = {
        "shuffle": lambda: DataLoader(rows, batch_size=4, shuffle=True),
        "generator": lambda: DataLoader(rows, batch_size=4, shuffle=True, generator=own),
        "sampler": lambda: DataLoader(rows, batch_size=4, sampler=RandomSampler(rows, generator=own)),
        "plain": lambda: DataLoader(rows, batch_size=4),
        "augmented": lambda: DataLoader(Jittered(rows), batch_size=4),
        "transform": lambda: datasets.Dataset.from_dict(plain).with_transform(jitter),
    }[kind]()

    def states():
        return [torch.get_rng_state(), own.get_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))]

    before = states()
    first, second, other = (batches_from(data, model, batch_size=4, seed=seed)[0] for seed in (1, 1, 2))
    assert all(map(torch.equal, before, states()))

    def same(a, b):
        return all(torch.equal(x[key], y[key]) for x, y in zip(a, b, strict=True) for key in x)

    assert same(first, second)
    assert same(first, other) == (kind in ("plain", "generator", "sampler"))


def test_an_accelerated_loop_steps_as_without_a_score_in_it(model):
    """A loader that is left before its end stays the one that accelerate accumulates gradients by."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    rows = [{"input_ids": torch.tensor([1, 2, i]), "labels": torch.tensor(i % 2)} for i in range(14)]

    def steps(samples):
        accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
        torch.manual_seed(1)
        loader = accelerator.prepare(DataLoader(rows, batch_size=2, shuffle=True))
        seen = []
        for _ in range(2):
            for i, batch in enumerate(loader):
                if samples and i in (1, 4):
                    batches_from(loader, model, samples=samples)
                with accelerator.accumulate(model):
                    seen.append((accelerator.sync_gradients, batch["input_ids"][:, 2].tolist()))
        return seen

    try:
        alone = steps(0)
        assert [synced for synced, _ in alone[:7]] == [False, False, True, False, False, True, True]
        assert steps(4) == steps(14) == alone
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_a_transform_of_a_data_set_is_applied(vit_folder):
    """As the model is trained on it, and told apart from others."""
    loaded = load_model(vit_folder, device="cpu")
    stored = datasets.Dataset.from_dict({"pixel_values": [[[[float(i)] * 8] * 8] for i in range(8)], "labels": [0] * 8})

    def halved(rows):
        return {"pixel_values": [torch.tensor(x) / 2 for x in rows["pixel_values"]], "label": rows["labels"]}

    plain, before = batches_from(stored, loaded.model, samples=8, batch_size=8)
    (half,), after = batches_from(stored.with_transform(halved), loaded.model, samples=8, batch_size=8)
    torch.testing.assert_close(half["pixel_values"], plain[0]["pixel_values"] / 2)
    assert torch.equal(half["labels"], plain[0]["labels"])
    assert "transform" not in before
    assert after["transform"] != batches_from(
        stored.with_transform(lambda rows: {**halved(rows)}), loaded.model, samples=8, batch_size=8
    )[1]["transform"]  # fmt: skip


def test_a_transform_that_does_not_encode_is_refused(model):
    upper = TEXTS.with_transform(lambda rows: {**rows, "text": [text.upper() for text in rows["text"]]})
    with pytest.raises(UsageError, match=r"has a transform, whose rows have \['text', 'label'\]"):
        batches_from(upper, model, processor=make_tokenizer(), **SIZES)


def test_batches_of_different_sizes_are_warned_of(model):
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 10, "label": [0, 1] * 5}).with_format("torch")
    with pytest.warns(GeosharpWarning, match="between 2 and 4 samples"):
        _, identity = batches_from(list(DataLoader(rows, batch_size=4)), model)
    assert (identity["batch_size"], identity["samples"]) == ([2, 4], 10)
    by_sampler = DataLoader(rows, batch_sampler=BatchSampler(SequentialSampler(rows), 4, drop_last=False))
    batches, identity = batches_from(by_sampler, model)
    assert [len(one["labels"]) for one in batches] == [4, 4]
    assert identity["dropped"] == 2


class ByTokens:
    """A sampler whose batch size counts tokens."""

    batch_size = 28

    def __iter__(self):
        return iter([[0, 1, 2, 3], [4, 5, 6, 7]])


def test_a_sampler_that_counts_something_else_than_rows_is_taken_as_it_is(model):
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 10, "label": [0, 1] * 5}).with_format("torch")
    batches, identity = batches_from(DataLoader(rows, batch_sampler=ByTokens()), model)
    assert [len(one["labels"]) for one in batches] == [4, 4]
    assert identity["batch_size"] == 4


def test_keys_for_the_loss_only(model):
    batches, _ = batches_from([batch(_weights=torch.ones(4, dtype=torch.float64))], model)
    assert batches[0]["_weights"].dtype == torch.float32
    assert set(batches[0]) == {"input_ids", "labels", "_weights"}
    assert call(model, batches[0]).logits.shape[0] == 4
    with pytest.raises(DataError, match=r"'weights'.*'_weights'"):
        batches_from([batch(weights=torch.ones(4))], model)


class Wrapper(torch.nn.Module):
    """Passes all on."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **given):
        return self.inner(**given)


class Forwarding(Wrapper):
    """The same, with a setting of its own, as DINOv2's code has it."""

    def forward(self, *args, is_training=False, **given):
        return self.inner(*args, **given)


def test_a_model_that_passes_on_what_it_is_given_takes_any_names(model):
    given = batch()
    assert batches_from([given], Forwarding(model))[0][0].keys() == given.keys()


def test_flags_are_taken_as_tensors_are(model):
    assert batches_from([batch(_weighted=False)], model)[0][0]["_weighted"] is False
    assert batches_from([batch(output_attentions=True)], Wrapper(model))[0][0]["output_attentions"] is True
    for name in ("labels", "label", "attention_mask"):
        with pytest.raises(DataError, match=f"'{name}' is a bool, not a tensor"):
            batches_from([{"input_ids": batch()["input_ids"], name: True}], model)
    with pytest.raises(DataError, match="takes no 'weighted'"):
        batches_from([batch(weighted=True)], model)


def test_labels_win_over_a_column_that_is_only_called_like_them(model):
    """As where a data set of a language model keeps the class of its texts."""
    for order in (["label", "labels"], ["labels", "label"]):
        rows = datasets.Dataset.from_dict(
            {"input_ids": [[1, 2, 3]] * 4} | {name: [name == "labels"] * 4 for name in order}
        )
        (one,), identity = batches_from(rows, model, samples=4, batch_size=4)
        assert one["labels"].tolist() == [1, 1, 1, 1]
        assert "label" not in identity["columns"]["encoded"]


def test_fractions_have_the_dtype_that_will_be_computed_in(model):
    weights = {"_weights": torch.ones(4, dtype=torch.float32)}
    assert batches_from([batch(**weights)], model, floating=torch.float64)[0][0]["_weights"].dtype == torch.float64


def test_tensors_of_inference_mode_can_be_differentiated_through(model):
    with torch.inference_mode():
        made = batch()
    (one,), _ = batches_from([made], model)
    model(**one).loss.backward()
    model.zero_grad()


def test_a_loss_that_is_not_about_the_next_token_is_refused_for_texts():
    """Labels made from a text would be the very tokens that the model reads."""
    from transformers import BartConfig, BartForCausalLM

    sizes = {"vocab_size": 22, "d_model": 8, "max_position_embeddings": 16}
    sides = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    decoder = BartForCausalLM(BartConfig(**sizes, **sides, encoder_ffn_dim=8, decoder_ffn_dim=8))
    texts, tokenizer = TEXTS.select_columns(["text"]), make_tokenizer()
    with pytest.raises(ModelError, match="BartForCausalLM compares its output at a position with the label there"):
        batches_from(texts, decoder, processor=tokenizer, **SIZES)
    assert len(batches_from(texts, decoder, processor=tokenizer, with_labels=False, **SIZES)[0]) == 3
    assert decoder.training


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"labels": torch.full((4,), -100)}, r"All labels are -100 \(batch 1\)"),
        ({"labels": torch.tensor([0, 1, -1, 0])}, r"-1 \(batch 1, row 2\).*0 to 1"),
        ({"labels": torch.tensor([0, 1, 2, 0])}, r"2 \(batch 1, row 2\).*num_labels = 2"),
        ({"labels": torch.tensor([0, float("nan"), 2, 0])}, "NaN"),
        ({"input_ids": torch.full((4, 3), 22)}, r"input_ids hold 22 .*0 to 21"),
        ({"input_ids": ["good"] * 4}, "'input_ids' is a list"),
        ({"labels": torch.tensor([0, 1])}, "different numbers of samples: 'input_ids' 4 and 'labels' 2"),
        ({"label": torch.tensor([1, 1, 1, 1])}, "takes no 'label'"),
    ],
)
def test_bad_batches(model, changes, culprit):
    with pytest.raises(DataError, match=culprit):
        batches_from([batch(), batch(**changes)], model)


def test_labels_that_are_not_wanted_are_not_checked(model):
    batches, _ = batches_from([batch(labels=torch.full((4,), -1))], model, with_labels=False)
    assert set(batches[0]) == {"input_ids"}


def test_bad_token_labels(mlm_folder):
    model = load_model(mlm_folder, device="cpu").model
    for value, culprit in ((-1, "-1 .*row 0"), (22, "0 to 21"), (-100, "All labels")):
        with pytest.raises(DataError, match=culprit):
            batches_from([batch(labels=torch.full((4, 3), value))], model)


@pytest.mark.parametrize(
    ("data", "error", "culprit"),
    [
        ([], DataError, "no batch"),
        ([(1, 2)], DataError, "Batch 0 is a tuple"),
        ([{"input_ids": torch.ones(0, 3, dtype=torch.long)}], DataError, "Batch 0 is empty"),
        ("train", UsageError, "str"),
        (3, UsageError, "int"),
        (datasets.DatasetDict(train=TEXTS), UsageError, r"data\['train'\]"),
        (TEXTS.to_iterable_dataset(), UsageError, "streaming"),
        (TEXTS.select([]), DataError, "empty"),
    ],
)
def test_bad_data(model, data, error, culprit):
    with pytest.raises(error, match=culprit):
        batches_from(data, model)


def test_too_few_rows(model):
    with pytest.raises(DataError, match=r"12 samples, fewer than one batch of 128.*Lower the batch size"):
        batches_from(TEXTS, model, processor=make_tokenizer())
    with pytest.raises(UsageError, match="at least 1"):
        batches_from(TEXTS, model, batch_size=0)
    with pytest.warns(DataWarning, match="12 rows"):
        batches_from(TEXTS, model, processor=make_tokenizer(), batch_size=4)


def test_columns_and_processors_that_do_not_fit(model):
    numbers = datasets.Dataset.from_dict({"text": [1, 2], "label": [0, 1]})
    with pytest.raises(DataError, match=r"'text', row \d holds a value of type int"):
        batches_from(numbers, model, processor=make_tokenizer(), samples=2, batch_size=2)
    missing = datasets.Dataset.from_dict({"text": ["a film", None], "label": [0, 1]})
    with pytest.raises(DataError, match=r"'text', row 1 holds no text \(null\)"):
        batches_from(missing, model, processor=make_tokenizer(), samples=2, batch_size=2)
    bare = LoadedModel(model, None, find_task("text-classification"), {}, processor_error="no file")
    with pytest.raises(ModelError, match=r"tokenizer.*no file"):
        make_batches(TEXTS, bare, **SIZES)
    unmasked = make_tokenizer("t5")
    with pytest.raises(ModelError, match="mask token"):
        batches_from(TEXTS, model, processor=unmasked, task="masked-lm", **SIZES)
    with pytest.raises(UsageError, match="padding token"):
        batches_from(TEXTS, model, processor=make_tokenizer("gpt"), **SIZES)


def test_kl_is_that_of_the_distributions(model):
    batches = attach_model_targets(model, [batch()], find_task("text-classification"))
    assert "labels" not in batches[0]
    base = batches[0]["_target_logits"]
    moved = base + torch.tensor([1.0, -1.0])
    expected = torch.nn.functional.kl_div(
        moved.log_softmax(-1), base.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(kl_to_model({"logits": moved}, batches[0]), expected)
    with pytest.raises(ModelError, match="no logits"):
        attach_model_targets(model.bert, [batch(labels=torch.zeros(4))], None)


def test_several_labels_a_sample_are_several_distributions():
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(bert_config(num_labels=4, problem_type="multi_label_classification")).eval()
    (one,) = attach_model_targets(model, [batch()], None)
    base, moved = one["_target_logits"], one["_target_logits"] + torch.tensor([0.5, -1.0, 2.0, 3.0])
    p, q = (torch.distributions.Bernoulli(logits=x) for x in (base, moved))
    expected = torch.distributions.kl_divergence(p, q).sum(-1)
    assert divergence(model) is bernoulli_kl_to_model
    torch.testing.assert_close(bernoulli_kl_to_model({"logits": moved}, one), expected)


def test_outputs_that_are_no_distribution_over_a_known_axis_are_refused(model):
    from transformers import BertForSequenceClassification

    numbers = BertForSequenceClassification(bert_config(num_labels=4, problem_type="regression")).eval()
    with pytest.raises(UsageError, match="regression"):
        attach_model_targets(numbers, [batch()], None)

    class Dense(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.map = torch.nn.Conv2d(1, 3, 1)

        def forward(self, pixel_values):
            return {"logits": self.map(pixel_values)}

    with pytest.raises(UsageError, match=r"shape \(2, 3, 4, 5\), in which the axis of the classes is not known"):
        attach_model_targets(Dense(), [{"pixel_values": torch.zeros(2, 1, 4, 5)}], None)


def test_padded_frames_of_sound_do_not_count():
    import transformers

    config = transformers.Wav2Vec2Config(
        vocab_size=12, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, conv_dim=(8, 8),
        conv_stride=(4, 2), conv_kernel=(4, 2), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config).eval()
    mask = torch.ones(2, 320, dtype=torch.long)
    mask[1, 80:] = 0
    (one,) = attach_model_targets(model, [{"input_values": torch.randn(2, 320), "attention_mask": mask}], None)
    lengths = model._get_feat_extract_output_lengths(mask.sum(-1))
    assert one["_target_mask"].sum(-1).tolist() == lengths.tolist()
    assert lengths[1] < lengths[0]

    class Halving(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.map = torch.nn.Linear(1, 3)

        def forward(self, input_values, attention_mask):
            return {"logits": self.map(input_values[:, ::2, None])}

    with pytest.raises(UsageError, match=r"which of the logits of shape \(2, 160, 3\) are padding is not known"):
        attach_model_targets(Halving(), [{"input_values": torch.randn(2, 320), "attention_mask": mask}], None)


def test_targets_are_made_as_the_score_runs_the_model(model):
    """In full precision whatever the caller has switched on, and with the same random numbers."""
    alone = attach_model_targets(model, [batch()], None)
    with torch.autocast("cpu", torch.bfloat16):
        cast = attach_model_targets(model, [batch()], None)
    assert torch.equal(alone[0]["_target_logits"], cast[0]["_target_logits"])
    state = torch.get_rng_state()
    attach_model_targets(model, [batch()], None)
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_that_draws_numbers_is_no_further_from_itself_than_it_is_moved():
    """Whatever was drawn before: the targets and the score draw the same."""

    class Drawing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

        def forward(self, x):
            y = self.linear(x)
            return {"logits": y + torch.randn(y.shape)}

    result = score(Drawing(), [{"x": torch.eye(3)}], labels="model", metric="adaptive", steps=1, reproducibility=False)
    assert result.base_loss == 0


def test_targets_of_a_decoder_that_reads_labels_count_where_these_do(t5_folder):
    model = load_model(t5_folder, device="cpu").model
    data = {"input_ids": torch.arange(6, 12).view(2, 3), "labels": torch.tensor([[7, 8, 5], [9, 5, -100]])}
    (found,) = attach_model_targets(model, [data], find_task("seq2seq-lm"))
    assert torch.equal(found["_target_mask"], (data["labels"] != -100).long())
    with torch.no_grad():
        assert kl_to_model(model(**data), found).tolist() == pytest.approx(5 * [0.0], abs=1e-6)


@pytest.fixture
def speech_to_text():
    """An encoder-decoder of none of the tasks."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    layers = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")}
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "max_source_positions": 6, "num_mel_bins": 4}
    tokens = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **layers, **tokens)).eval()


def test_labels_that_a_decoder_reads_stay_in_a_score_without_labels(speech_to_text):
    labels = torch.tensor([[7, 8, 5], [9, 5, -100]])
    data = {"input_features": torch.randn(2, 4, 12), "labels": labels}
    result = score(speech_to_text, [data], labels="model", steps=1, reproducibility=False)
    assert result.base_loss == pytest.approx(0, abs=1e-6)
    (found,) = attach_model_targets(speech_to_text, [data], None)
    assert torch.equal(found["_target_mask"], (labels != -100).long())
    # Where there is something else for the decoder, they are not read.
    decoded = {**data, "decoder_input_ids": labels.clamp(min=0)}
    (found,) = attach_model_targets(speech_to_text, [decoded], None)
    assert "labels" not in found


def test_targets_leave_the_model_as_it_was(model):
    model.train()
    try:
        attach_model_targets(model, [batch()], None)
        assert model.training
    finally:
        model.eval()


def test_booleans_stay_what_they_are():
    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x, mask, labels):
            y, _ = self.attention(x, x, x, key_padding_mask=mask, need_weights=False)
            return {"loss": (y.mean((1, 2)) - labels.float()).square()}

    mask = torch.tensor([[False, False, True], [False, True, True]])
    batch = {"x": torch.rand(2, 3, 4), "mask": mask, "labels": torch.tensor([True, False])}
    (found,), _ = batches_from([batch], Encoder())
    assert found["mask"].dtype == torch.bool
    assert found["labels"].dtype == torch.int64
    assert torch.isfinite(Encoder()(**found)["loss"]).all()
    rows = [{"mask": row.tolist(), "labels": label} for row, label in zip(mask, (True, False), strict=True)]
    assert {key: value.dtype for key, value in collate(rows, None).items()} == {
        "mask": torch.bool,
        "labels": torch.int64,
    }


def test_columns_may_be_a_mapping(model):
    rows = datasets.Dataset.from_dict({"body": TEXTS["text"], "stars": TEXTS["label"]})
    named = {"text": "body", "label": "stars"}
    batches, identity = batches_from(rows, model, processor=make_tokenizer(), columns=named, **SIZES)
    assert identity["columns"] == named
    assert len(batches) == 3
    for wrong in ({"words": "body"}, ["body"]):
        with pytest.raises(UsageError, match=r"a mapping from roles \(text, text_pair, image, label\)"):
            batches_from(rows, model, processor=make_tokenizer(), columns=wrong, **SIZES)


def test_an_image_that_cannot_be_opened_is_named_by_its_row(vit_folder, tmp_path):
    for i in range(4):
        make_images()[i]["image"].save(tmp_path / f"{i}.png")
    (tmp_path / "2.png").write_bytes(b"no image")
    files = {"image": [str(tmp_path / f"{i}.png") for i in range(4)], "label": ["0", "1", "2", "0"]}
    rows = datasets.Dataset.from_dict(files).cast_column("image", datasets.Image())
    loaded = load_model(vit_folder, device="cpu")
    with pytest.raises(DataError, match=r"Row 2 \(counted from 0\) cannot be opened \(UnidentifiedImageError"):
        batches_from(rows, loaded.model, processor=loaded.processor, samples=4, batch_size=4)


def test_the_check_of_next_tokens_runs_experts_in_double_precision():
    model = AutoModelForCausalLM.from_config(tiny.build("mixtral").config).double().eval()
    ids = torch.randint(3, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    check_next_token(model, {"input_ids": ids, "labels": ids.clone(), "_weights": torch.ones(2)})


def warned(texts, processor=None, model_class="BertForSequenceClassification", **options):
    """The warnings about 12 rows of these texts."""
    import transformers

    data = datasets.Dataset.from_dict({"text": texts * (12 // len(texts)), "label": [0, 1] * 6})
    live = getattr(transformers, model_class)(bert_config()).eval()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        batches_from(data, live, processor=processor or make_tokenizer(), **{**SIZES, **options})
    return [str(warning.message) for warning in seen if warning.category is GeosharpWarning]


def test_texts_that_the_tokenizer_does_not_know_are_told():
    (message,) = warned(["Good film", "a BAD plot", "the cast is fun"])
    assert "does not know 22% of the words" in message
    assert "[UNK]" in message
    (message,) = warned(["Good film", "a BAD plot", "the cast is fun"], model_class="BertForMaskedLM")
    assert "does not know" in message
    # One in eleven is a rare word.
    assert warned(["good film , a bad plot", "the cast is fun is it"]) == []


def test_texts_without_a_word_are_told_and_masks_are_words():
    (message,) = warned(["good film", "", "a bad plot", "the cast is fun"])
    assert "3 of the 12 texts" in message
    strange, blank = warned(["good film", "Nonesuch", "a bad plot", "the cast"])
    assert "12%" in strange
    assert "3 of the 12 texts" in blank
    # A language model has such texts left out.
    left = warned(["good", "", "bad", ""], model_class="BertForMaskedLM", samples=4, batch_size=2)
    assert not any("no word" in message for message in left)


def test_an_unknown_token_that_is_the_end_too_is_no_unknown_word():
    tokenizer = make_tokenizer()
    tokenizer.unk_token = tokenizer.sep_token
    assert warned(["good film", "a bad plot"], tokenizer) == []


def test_images_of_more_than_8_bits_are_refused(vit_folder):
    """Pillow cuts them off at 255: nearly all of a 16 bit image would be white."""
    from PIL import Image

    loaded = load_model(vit_folder, device="cpu")
    values = np.full((8, 8), 100)

    def batches(image):
        rows = {"image": [image] * 4, "label": ["0", "1", "2", "0"]}
        rows = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
        return batches_from(rows, loaded.model, processor=loaded.processor, samples=4, batch_size=4)[0]

    plain = batches(Image.fromarray(values.astype(np.uint8)))
    for kind in (np.uint16, np.int32):
        fits = batches(Image.fromarray(values.astype(kind)))
        assert torch.equal(fits[0]["pixel_values"], plain[0]["pixel_values"])
        with pytest.raises(DataError, match=r"'image', row \d holds an image of more than 8 bits .*1000"):
            batches(Image.fromarray((values * 10).astype(kind)))


def test_images_of_several_sizes_that_are_not_resized_are_told(vit_folder):
    loaded = load_model(vit_folder, device="cpu")
    loaded.processor.do_resize = False
    images = [np.zeros((8, 8), dtype=np.uint8).tolist(), np.zeros((8, 10), dtype=np.uint8).tolist()]
    rows = datasets.Dataset.from_dict({"image": images * 2, "label": ["0", "1", "2", "0"]})
    with pytest.raises(DataError, match=r"2 sizes \(8 x 8 and 8 x 10 pixels among them\).*do_resize"):
        batches_from(rows, loaded.model, processor=loaded.processor, samples=4, batch_size=4)


def test_one_token_is_too_short_for_a_causal_model():
    from transformers import BertLMHeadModel

    causal = BertLMHeadModel(bert_config(is_decoder=True)).eval()
    with pytest.raises(UsageError, match="from the second token on"):
        batches_from(TEXTS, causal, processor=make_tokenizer("t5"), max_length=1, **SIZES)
