"""The metric in evaluate: that it gives the numbers of ``score``, and that it keeps evaluate's contract."""

from __future__ import annotations

import copy
import json
import pickle
import threading
import types
from pathlib import Path
from typing import Any

import datasets
import evaluate
import numpy as np
import pytest
import torch
from evaluate.loading import import_main_class

import hf_geosharp
from hf_geosharp import GeodesicSharpness, SharpnessResult, scoring
from hf_geosharp.errors import DataError, GeosharpError, ModelError, UsageError
from tests.metrics.caches import ACCURACY, put_metric
from tests.tasks.tiny import SIZES, bert_config, make_images, make_tokenizer, save, sentence

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"steps": 2, "batch_size": 4, "reproducibility": False}
QUICK_ID = {"steps": 2, "batch_size": 4, "device": "cpu"}


@pytest.fixture(scope="module")
def bert() -> Any:
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    config = bert_config(id2label={0: "NEG", 1: "POS"}, label2id={"NEG": 0, "POS": 1})
    return BertForSequenceClassification(config).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def bert_folder(bert: Any, tokenizer: Any, tmp_path: Path) -> str:
    return str(save(bert, tmp_path / "bert", tokenizer))


@pytest.fixture(scope="module")
def rows() -> datasets.Dataset:
    rng = np.random.default_rng(0)
    return datasets.Dataset.from_dict({"text": [sentence(rng, 2) for _ in range(8)], "label": [0, 1] * 4})


def value(result: dict[str, Any] | None) -> float:
    assert result is not None
    return result["geodesic_sharpness"]


class TestLoading:
    def test_by_its_name_from_anywhere(self, metric: Any) -> None:
        assert type(metric) is GeodesicSharpness
        assert metric.name == "geodesic_sharpness"
        assert metric.module_type == "metric"
        assert isinstance(metric, evaluate.Metric)

    @pytest.mark.parametrize("path", ["metrics/geodesic_sharpness", "metrics/geodesic_sharpness/geodesic_sharpness.py"])
    def test_from_a_checkout(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        assert type(evaluate.load(path)) is GeodesicSharpness

    def test_from_the_folder_that_is_installed(self) -> None:
        assert type(evaluate.load(hf_geosharp.metric_path())) is GeodesicSharpness

    def test_as_a_metric_only(self, metric: Any) -> None:
        assert type(evaluate.load("geodesic_sharpness", module_type="metric")) is GeodesicSharpness
        with pytest.raises(TypeError, match="comparison"):
            evaluate.load("geodesic_sharpness", module_type="comparison")

    @pytest.mark.parametrize("module", ["metric", "metrics.geodesic_sharpness.geodesic_sharpness"])
    def test_the_first_metric_that_evaluate_finds_in_a_module_is_ours(self, module: str) -> None:
        assert import_main_class(f"hf_geosharp.{module}") is GeodesicSharpness

    def test_describes_itself(self, metric: Any) -> None:
        assert "arXiv 2505.05409" in metric.description
        assert "da Silva" in metric.citation
        assert "model_id" in metric.inputs_description
        assert "model_id" in metric.compute.__doc__
        assert metric.compute.__doc__.count("Examples:") == 1

    def test_says_so_where_python_has_dropped_the_docstrings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flags = types.SimpleNamespace(optimize=2)
        monkeypatch.setattr("hf_geosharp.metric.sys", types.SimpleNamespace(flags=flags))
        with pytest.raises(UsageError, match="Use python -O"):
            GeodesicSharpness()

    def test_config_name_is_the_task(self, bert_folder: str, rows: Any, metric: Any) -> None:
        (Path(bert_folder) / "config.json").write_text(
            json.dumps(json.loads((Path(bert_folder) / "config.json").read_text()) | {"architectures": None})
        )
        call = {"model_id": bert_folder, "data": rows, "samples": 8, **QUICK_ID}
        with pytest.raises(UsageError, match="names no architecture"):
            metric.compute(**call)
        assert value(evaluate.load("geodesic_sharpness", "text-classification").compute(**call)) > 0


class TestNumbers:
    """Against hf_geosharp.score, which has its own tests."""

    def test_of_a_model_and_data(self, metric: Any, bert: Any, tokenizer: Any, rows: Any) -> None:
        expected = hf_geosharp.score(bert, rows, processor=tokenizer, samples=8, rho=[0.05, 0.1], **QUICK)
        found = metric.compute(model=bert, data=rows, processor=tokenizer, samples=8, rho=[0.05, 0.1], **QUICK)
        assert found == {"geodesic_sharpness": expected.geodesic_sharpness, "stderr": expected.stderr}
        assert all(type(number) is float for number in found.values())

    def test_of_a_model_and_batches(self, metric: Any, bert: Any, tokenizer: Any, rows: Any) -> None:
        batch = {
            **tokenizer(rows[:]["text"], padding=True, return_tensors="pt"),
            "labels": torch.tensor(rows[:]["label"]),
        }
        expected = hf_geosharp.score(bert, [batch], steps=2, metric="mix")
        found = metric.compute(model=bert, data=[batch], steps=2, metric="mix")
        assert found == {"geodesic_sharpness": expected.geodesic_sharpness, "stderr": None}

    def test_of_a_name_and_a_file(self, metric: Any, bert_folder: str, rows: Any, tmp_path: Path) -> None:
        file = tmp_path / "rows.csv"
        rows.to_csv(str(file))
        expected = hf_geosharp.score_pretrained(bert_folder, data=str(file), samples=8, **QUICK_ID)
        assert value(metric.compute(model_id=bert_folder, data=str(file), samples=8, **QUICK_ID)) == (
            expected.geodesic_sharpness
        )
        # A path for an instance is a name.
        assert value(metric.compute(model=Path(bert_folder), data=file, samples=8, **QUICK_ID)) == (
            expected.geodesic_sharpness
        )

    @pytest.mark.parametrize(
        "labels",
        [
            [0, 1] * 4,
            ["neg", "POS"] * 4,
            np.array([0, 1] * 4),
            torch.tensor([0, 1] * 4),
            (0.0, 1.0) * 4,
            [False, True] * 4,
        ],
        ids=lambda labels: type(labels).__name__ + str(type(labels[0]).__name__),
    )
    def test_of_texts_and_labels(
        self, metric: Any, bert: Any, bert_folder: str, tokenizer: Any, rows: Any, labels: Any
    ) -> None:
        expected = hf_geosharp.score(bert, rows, processor=tokenizer, samples=8, **QUICK).geodesic_sharpness
        texts = rows["text"]
        assert value(metric.compute(model_id=bert_folder, predictions=texts, references=labels, **QUICK_ID)) == expected
        assert value(metric.compute(model_id=bert_folder, inputs=texts, references=labels, **QUICK_ID)) == expected
        assert (
            value(metric.compute(model=bert, processor=tokenizer, predictions=texts, references=labels, **QUICK))
            == expected
        )

    def test_without_labels(self, metric: Any, bert: Any, bert_folder: str, tokenizer: Any, rows: Any) -> None:
        expected = hf_geosharp.score(bert, rows, processor=tokenizer, labels="model", samples=8, **QUICK)
        found = metric.compute(model_id=bert_folder, predictions=rows["text"], labels="model", **QUICK_ID)
        assert value(found) == expected.geodesic_sharpness

    @pytest.mark.parametrize("kind", ["images", "arrays", "planes", "paths"])
    def test_of_images(self, metric: Any, tmp_path: Path, kind: str) -> None:
        from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

        torch.manual_seed(0)
        config = ViTConfig(image_size=8, patch_size=4, num_channels=1, id2label={i: str(i) for i in range(3)}, **SIZES)
        processor = ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.5])
        model = ViTForImageClassification(config).eval()
        data = make_images(count=8)
        images, labels = data[:]["image"], data[:]["label"]
        expected = hf_geosharp.score(model, data, processor=processor, samples=8, **QUICK).geodesic_sharpness
        if kind == "arrays":
            images = np.stack([np.asarray(image) for image in images]).astype(np.int64)
        if kind == "planes":
            images = [torch.from_numpy(np.array(image))[..., None] for image in images]
        if kind == "paths":
            for number, image in enumerate(images):
                image.save(tmp_path / f"{number}.png")
            images = [str(tmp_path / f"{number}.png") for number in range(8)]
        folder = str(save(model, tmp_path / "vit", processor))
        assert value(metric.compute(model_id=folder, predictions=images, references=labels, **QUICK_ID)) == expected

    def test_an_image_counts_as_it_is_now_not_as_in_its_file(self, metric: Any, tmp_path: Path) -> None:
        from PIL import Image

        Image.new("L", (8, 8), 0).save(tmp_path / "black.png")
        opened = Image.open(tmp_path / "black.png")
        opened.paste(255, (0, 0, 8, 8))
        metric.add(prediction=opened, reference=0)
        gathered = evaluate.Metric.compute(metric)
        assert np.asarray(gathered["inputs"][0]).min() == 255

    def test_of_a_language_model_without_references(self, metric: Any, tmp_path: Path) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=22, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=5, eos_token_id=5
        )
        folder = str(save(GPT2LMHeadModel(config), tmp_path / "gpt", make_tokenizer("gpt")))
        texts = [sentence(np.random.default_rng(i), 3) for i in range(4)]
        data = datasets.Dataset.from_dict({"text": texts})
        expected = hf_geosharp.score_pretrained(folder, data=data, samples=4, **QUICK_ID)
        assert value(metric.compute(model_id=folder, predictions=texts, **QUICK_ID)) == expected.geodesic_sharpness
        with pytest.raises(UsageError, match="leave out references"):
            metric.compute(model_id=folder, predictions=texts, references=texts, **QUICK_ID)

    def test_of_a_seq2seq_model_with_target_texts(self, metric: Any, tmp_path: Path) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(0)
        sizes = {"vocab_size": 22, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
        config = T5Config(**sizes, decoder_start_token_id=0, eos_token_id=5)
        folder = str(save(T5ForConditionalGeneration(config), tmp_path / "t5", make_tokenizer("t5")))
        texts = [sentence(np.random.default_rng(i), 3) for i in range(8)]
        data = datasets.Dataset.from_dict({"source": texts[:4], "target": texts[4:]})
        expected = hf_geosharp.score_pretrained(folder, data=data, samples=4, **QUICK_ID)
        found = metric.compute(model_id=folder, predictions=texts[:4], references=texts[4:], **QUICK_ID)
        assert value(found) == expected.geodesic_sharpness
        assert expected.data["target"] == "column"

    def test_all_inputs_are_used_and_nothing_is_said(
        self, metric: Any, bert_folder: str, rows: Any, recwarn: pytest.WarningsRecorder
    ) -> None:
        call = {"model_id": bert_folder, "predictions": rows["text"], "references": rows["label"], **QUICK_ID}
        assert metric.compute(**call, details=True)["details"]["samples"] == 8
        assert metric.compute(**call, details=True, samples=4)["details"]["samples"] == 4
        assert not [w for w in recwarn if issubclass(w.category, hf_geosharp.errors.GeosharpWarning)]

    def test_details_and_save(self, metric: Any, bert: Any, tokenizer: Any, rows: Any, tmp_path: Path) -> None:
        found = metric.compute(model=bert, data=rows, processor=tokenizer, samples=8, details=True, **QUICK)
        assert SharpnessResult.from_dict(found["details"]).geodesic_sharpness == value(found)
        file = evaluate.save(tmp_path / "result.json", **found)
        saved = json.loads(Path(file).read_text())
        assert saved["geodesic_sharpness"] == value(found)
        assert saved["details"]["steps"] == 2


class TestGathering:
    def test_bit_by_bit_is_the_same(self, metric: Any, bert_folder: str, rows: Any) -> None:
        texts, labels = list(rows["text"]), list(rows["label"])
        expected = metric.compute(model_id=bert_folder, predictions=texts, references=labels, **QUICK_ID)
        metric.add(prediction=texts[0], reference=labels[0])
        metric.add(predictions=texts[1], references=labels[1])
        metric.add_batch(predictions=texts[2:5], references=labels[2:5])
        metric.add_batch(inputs=texts[5:7], references=labels[5:7])
        assert len(metric) == 7
        assert (
            metric.compute(model_id=bert_folder, predictions=texts[7:], references=labels[7:], **QUICK_ID) == expected
        )
        assert len(metric) == 0

    def test_in_memory(self, bert_folder: str, rows: Any, metric: Any) -> None:
        call = {"model_id": bert_folder, "predictions": rows["text"], "references": rows["label"], **QUICK_ID}
        assert evaluate.load("geodesic_sharpness", keep_in_memory=True).compute(**call) == metric.compute(**call)

    def test_a_failure_leaves_no_files_behind(self, metric: Any, bert_folder: str, rows: Any) -> None:
        call = {"model_id": bert_folder, "predictions": rows["text"], **QUICK_ID}
        with pytest.raises(DataError, match="out of range"):
            metric.compute(references=[7] * 8, **call)
        assert len(metric) == 0
        assert not list(Path(metric.data_dir).glob("*.arrow"))
        assert value(metric.compute(references=rows["label"], **call)) > 0

    def test_processes_gather_and_the_first_computes(self, bert_folder: str, rows: Any, metric: Any) -> None:
        texts, labels = list(rows["text"]), list(rows["label"])
        expected = metric.compute(model_id=bert_folder, predictions=texts, references=labels, **QUICK_ID)
        found: dict[int, Any] = {}

        def process(number: int) -> None:
            own = evaluate.load("geodesic_sharpness", num_process=2, process_id=number, experiment_id="two", timeout=60)
            part = slice(4 * number, 4 * number + 4)
            found[number] = own.compute(
                model_id=bert_folder, predictions=texts[part], references=labels[part], **QUICK_ID
            )

        threads = [threading.Thread(target=process, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert found == {0: expected, 1: None}

    def test_other_processes_compute_nothing_on_data(self, bert: Any, rows: Any, metric: Any) -> None:
        other = evaluate.load("geodesic_sharpness", num_process=2, process_id=1, model=bert, data=rows)
        assert other.compute(predictions=[1], references=[1]) is None
        assert other.compute() is None


class TestBound:
    @pytest.fixture
    def bound(self, metric: Any, bert: Any, tokenizer: Any, rows: Any) -> Any:
        return evaluate.load(
            "geodesic_sharpness", model=bert, data=rows, processor=tokenizer, samples=8, seed=3, **QUICK
        )

    @pytest.fixture
    def expected(self, bert: Any, tokenizer: Any, rows: Any) -> dict[str, float | None]:
        result = hf_geosharp.score(bert, rows, processor=tokenizer, samples=8, seed=3, **QUICK)
        return {"geodesic_sharpness": result.geodesic_sharpness, "stderr": result.stderr}

    def test_needs_no_arguments(self, bound: Any, expected: Any) -> None:
        assert bound.compute() == expected

    def test_a_call_says_more(self, bound: Any, bert: Any, tokenizer: Any, rows: Any) -> None:
        result = hf_geosharp.score(bert, rows, processor=tokenizer, samples=8, seed=5, **QUICK)
        assert value(bound.compute(seed=5)) == result.geodesic_sharpness

    def test_in_combine(self, bound: Any, expected: Any) -> None:
        put_metric("accuracy", ACCURACY)
        both = evaluate.combine(["accuracy", bound])
        assert both.compute(predictions=[1, 0], references=[1, 1]) == {"accuracy": 0.5, **expected}
        both.add(prediction=1, reference=1)
        both.add_batch(predictions=[0, 1], references=[1, 1])
        assert both.compute() == {"accuracy": pytest.approx(2 / 3), **expected}
        prefixed = evaluate.combine({"acc": evaluate.load("accuracy"), "sharp": bound}, force_prefix=True)
        assert "sharp_geodesic_sharpness" in prefixed.compute(predictions=[1, 0], references=[1, 1])

    def test_in_combine_by_name_of_the_model(self, metric: Any, bert_folder: str, rows: Any) -> None:
        put_metric("accuracy", ACCURACY)
        named = evaluate.load("geodesic_sharpness", model_id=bert_folder, data=rows, samples=8, **QUICK_ID)
        found = evaluate.combine([evaluate.load("accuracy"), named]).compute(predictions=[1], references=[1])
        assert value(found) == value(named.compute())

    @pytest.mark.parametrize("by_name", [False, True])
    def test_in_an_evaluator(
        self, bound: Any, expected: Any, bert: Any, bert_folder: str, tokenizer: Any, rows: Any, by_name: bool
    ) -> None:
        found = evaluate.evaluator("text-classification").compute(
            model_or_pipeline=bert_folder if by_name else bert,
            tokenizer=tokenizer,
            data=rows,
            metric=bound,
            label_mapping={"NEG": 0, "POS": 1},
        )
        assert {name: found[name] for name in expected} == expected

    def test_inputs_have_no_place(self, bound: Any) -> None:
        with pytest.raises(UsageError, match="one of the three"):
            bound.compute(inputs=["a film"])

    def test_the_model_alone_waits_for_inputs(self, metric: Any, bert: Any, tokenizer: Any, rows: Any) -> None:
        half = evaluate.load("geodesic_sharpness", model=bert, processor=tokenizer, **QUICK)
        whole = metric.compute(model=bert, data=rows, processor=tokenizer, samples=8, **QUICK)
        assert half.compute(predictions=rows["text"], references=rows["label"]) == whole
        with pytest.raises(UsageError, match="nothing to score the model on"):
            half.compute()

    def test_another_model_takes_its_place(self, bound: Any, bert_folder: str) -> None:
        bound._bound = {name: v for name, v in bound._bound.items() if name not in ("processor", "reproducibility")}
        assert value(bound.compute(model_id=bert_folder, device="cpu")) > 0

    def test_copies_by_pickle(self, bound: Any, expected: Any) -> None:
        assert pickle.loads(pickle.dumps(bound)).compute() == expected


class TestLoadsOnce:
    @pytest.fixture
    def loads(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        calls: list[Any] = []
        load = scoring.load_model

        def counted(*args: Any, **options: Any) -> Any:
            calls.append((args, options))
            return load(*args, **options)

        monkeypatch.setattr(scoring, "load_model", counted)
        return calls

    @pytest.mark.slow
    def test_for_one_model(self, metric: Any, bert_folder: str, rows: Any, loads: list[Any]) -> None:
        call = {"model_id": bert_folder, "samples": 8, **QUICK_ID}
        first = metric.compute(data=rows, **call)
        assert metric.compute(data=rows, **call) == first
        assert metric.compute(predictions=rows["text"], references=rows["label"], **call) == first
        metric.compute(data=rows, seed=1, metric="mix", **call)
        assert len(loads) == 1
        metric.compute(data=rows, dtype="float64", **call)
        assert len(loads) == 2

    def test_and_again_when_its_files_have_changed(
        self, metric: Any, bert: Any, bert_folder: str, rows: Any, loads: list[Any]
    ) -> None:
        call = {"model_id": bert_folder, "data": rows, "samples": 8, **QUICK_ID}
        first = metric.compute(**call)
        other = type(bert)(bert.config)
        other.save_pretrained(bert_folder)
        assert metric.compute(**call) != first
        assert len(loads) == 2

    def test_and_again_when_the_base_of_an_adapter_has_changed(
        self, metric: Any, bert: Any, bert_folder: str, rows: Any, tmp_path: Path
    ) -> None:
        from transformers import AutoModelForSequenceClassification

        peft = pytest.importorskip("peft")
        base = AutoModelForSequenceClassification.from_pretrained(bert_folder)
        config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS", init_lora_weights=False)
        peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
        call = {"model_id": str(tmp_path / "adapter"), "params": "lora", "data": rows, "samples": 8, **QUICK_ID}
        first = metric.compute(**call)
        assert metric.compute(**call) == first
        type(bert)(bert.config).save_pretrained(bert_folder)
        assert metric.compute(**call) != first

    def test_a_copy_is_made_after_a_computation_too(self, metric: Any, bert_folder: str, rows: Any) -> None:
        given = {"model_id": bert_folder, "predictions": rows["text"], "references": rows["label"], **QUICK_ID}
        expected = metric.compute(**given)
        assert pickle.loads(pickle.dumps(metric)).compute(**given) == copy.deepcopy(metric).compute(**given) == expected

    def test_a_copy_does_not_carry_it(self, metric: Any, bert_folder: str, rows: Any) -> None:
        metric.compute(model_id=bert_folder, data=rows, samples=8, **QUICK_ID)
        assert len(pickle.dumps(metric)) < 20_000


def test_the_model_comes_back_as_it_was(metric: Any, bert: Any, tokenizer: Any, rows: Any) -> None:
    before = {name: tensor.clone() for name, tensor in bert.state_dict().items()}
    call = {"model": bert, "processor": tokenizer, "samples": 8, **QUICK}
    metric.compute(data=rows, **call)
    with pytest.raises(GeosharpError):
        metric.compute(predictions=list(rows["text"]), references=[9] * 8, **call)
    assert all(torch.equal(before[name], tensor) for name, tensor in bert.state_dict().items())
    assert all(parameter.grad is None for parameter in bert.parameters())


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        ({}, UsageError, "There is no model"),
        ({"model_id": "a", "model": object()}, UsageError, "Give model_id, or model"),
        ({"model_id": "a", "model": "b"}, UsageError, "Give model_id, or model"),
        ({"model_id": ["a", "b"]}, UsageError, "model_id is of type list, not a name"),
        ({"model_id": "a", "rhoo": 1}, UsageError, "no option rhoo. The options are: .*rho, samples"),
        ({"model": object(), "device": "cpu"}, UsageError, "With model= there is no option device"),
        ({"model_id": "a", "revision": "x", "model_revision": "y"}, UsageError, "are the same"),
        ({"model_id": "a", "data": "b", "predictions": ["c"]}, UsageError, "or data; not both"),
        ({"model_id": "a", "inputs": ["b"], "predictions": ["c"]}, UsageError, "one of the three"),
        ({"model_id": "a", "references": [1]}, DataError, "predictions are missing"),
        ({"model_id": "a", "predictions": "a text", "references": [1]}, DataError, "of type str: pass"),
        ({"model_id": "a", "predictions": [], "references": []}, DataError, "empty"),
        ({"model_id": "a", "predictions": [1, 0], "references": [1, 0]}, DataError, r"\[0\] is of type int.*combine"),
        ({"model_id": "a", "predictions": np.array([1, 0])}, DataError, r"\[0\] is of type int64"),
        ({"model_id": "a", "predictions": ["a", 5]}, DataError, r"\[1\] is of type int among texts"),
        ({"model_id": "a", "predictions": ["a", None]}, DataError, r"\[1\] is missing among texts"),
        ({"model_id": "a", "predictions": [["a", "b"]]}, DataError, r"\[0\] is of type list"),
        ({"model_id": "a", "predictions": np.zeros((2, 4, 4))}, DataError, "not an image: arrays must be"),
        ({"model_id": "a", "predictions": np.full((2, 4, 4), 256)}, DataError, "not an image: arrays must be"),
        ({"model_id": "a", "predictions": [np.zeros((3, 8, 8), np.uint8)]}, DataError, r"of shape \(3, 8, 8\), is not"),
        ({"model_id": "a", "predictions": [np.zeros((0, 8), np.uint8)]}, DataError, r"of shape \(0, 8\), is not"),
        ({"model_id": "a", "predictions": [("a", "b")]}, DataError, "pairs of texts are two columns"),
        ({"model_id": "a", "predictions": ["a", "b"], "references": [1]}, DataError, "2 predictions and 1 references"),
        ({"model_id": "a", "predictions": ["a", "b"], "references": ["x", 1]}, DataError, r"references\[1\] is of"),
        ({"model_id": "a", "predictions": ["a"], "references": [[1]]}, DataError, r"references\[0\] is of type list"),
        ({"model_id": "./nowhere", "data": "x.csv"}, ModelError, "There is no folder"),
    ],
)
def test_what_is_wrong_is_said(metric: Any, call: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        metric.compute(**call)
    assert len(metric) == 0


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"predictions": ["a"], "references": [1]},
            {"predictions": ["b"], "references": ["POS"]},
            "numbers, or all names",
        ),
        (
            {"predictions": ["a"], "references": ["POS"]},
            {"predictions": ["b"], "references": [1]},
            "numbers, or all names",
        ),
        ({"predictions": ["a"]}, {"predictions": [np.zeros((4, 4), np.uint8)]}, "texts, or all images"),
        ({"predictions": [np.zeros((4, 4), np.uint8)]}, {"predictions": ["a"]}, "texts, or all images"),
    ],
)
def test_what_is_added_is_all_of_one_kind(metric: Any, first: Any, second: Any, message: str) -> None:
    metric.add_batch(**first)
    with pytest.raises(DataError, match=message):
        metric.add_batch(**second)


def test_errors_that_need_the_model(metric: Any, bert: Any, bert_folder: str, rows: Any) -> None:
    texts, labels = list(rows["text"]), list(rows["label"])
    with pytest.raises(UsageError, match="references are missing"):
        metric.compute(model_id=bert_folder, predictions=texts, **QUICK_ID)
    with pytest.raises(DataError, match=r"label is missing \(column 'label', row 3; rows count from 0\)"):
        metric.compute(model_id=bert_folder, predictions=texts, references=[0, 1, 0, None, 0, 1, 0, 1], **QUICK_ID)
    with pytest.raises(DataError, match="not a class of the model"):
        metric.compute(model_id=bert_folder, predictions=texts, references=["good"] * 8, **QUICK_ID)
    with pytest.raises(DataError, match="not a class of the model"):
        metric.compute(model_id=bert_folder, predictions=texts, references=[0.5] * 8, **QUICK_ID)
    with pytest.raises(DataError, match="fewer than one batch of 128"):
        metric.compute(model_id=bert_folder, predictions=texts, references=labels, device="cpu")
    with pytest.raises(UsageError, match="processor="):
        metric.compute(model=bert, predictions=texts, references=labels, **QUICK)
    with pytest.raises(UsageError, match="only for data that are given by name"):
        metric.compute(model_id=bert_folder, data=rows, split="test", **QUICK_ID)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (Path(bert_folder) / name).unlink(missing_ok=True)
    with pytest.raises(ModelError, match="has no tokenizer or image processor"):
        metric.compute(model_id=bert_folder, predictions=texts, references=labels, **QUICK_ID)


def test_an_option_that_is_not_there_is_told_at_load(metric: Any, bert: Any) -> None:
    with pytest.raises(UsageError, match="no option stepps"):
        evaluate.load("geodesic_sharpness", model=bert, stepps=3)


def test_the_revision_of_a_model_is_told_from_that_of_the_metric(
    metric: Any, bert_folder: str, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    load = scoring.load_model

    def recorded(place: str, **options: Any) -> Any:
        asked.append(options["revision"])
        return load(place, **{**options, "revision": None})

    monkeypatch.setattr(scoring, "load_model", recorded)
    bound = evaluate.load("geodesic_sharpness", model_id=bert_folder, data=rows, model_revision="abc")
    bound.compute(samples=8, **QUICK_ID)
    metric.compute(model_id=bert_folder, data=rows, revision="def", samples=8, **QUICK_ID)
    assert asked == ["abc", "def"]
