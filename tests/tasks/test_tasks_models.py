"""Loading a model: the right class, all weights, full precision; else a message that names what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from hf_geosharp import score_pretrained
from hf_geosharp.errors import GeosharpWarning, HubError, ModelError, UnsupportedModelError, UsageError
from hf_geosharp.scoring import load_pretrained
from hf_geosharp.tasks.kinds import TASKS, find_task, task_of, task_of_model, weight
from hf_geosharp.tasks.models import load_model
from tests.tasks.tiny import bert_config, edit_config, make_tokenizer, save


def load(folder, **options):
    return load_model(folder, **{"device": "cpu", **options})


def test_tasks_have_names_and_aliases():
    assert find_task("Fill_Mask").name == "masked-lm"
    assert find_task("text2text-generation").name == "seq2seq-lm"
    with pytest.raises(UsageError, match=r"dancing.*causal-lm"):
        find_task("dancing")


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("BertForSequenceClassification", "text-classification"),
        ("ViTForImageClassification", "image-classification"),
        ("GPT2LMHeadModel", "causal-lm"),
        ("LlamaForCausalLM", "causal-lm"),
        ("DistilBertForMaskedLM", "masked-lm"),
        ("T5ForConditionalGeneration", "seq2seq-lm"),
        ("BartForConditionalGeneration", "seq2seq-lm"),
    ],
)
def test_task_of_an_architecture(architecture, name):
    assert task_of(architecture).name == name


def test_task_of_a_live_model_is_that_of_its_class_its_parents_or_of_what_is_adapted():
    peft = pytest.importorskip("peft")
    from transformers import GPT2Config, GPT2LMHeadModel

    class Own(GPT2LMHeadModel):
        pass

    class Other(GPT2LMHeadModel):
        def forward(self, input_ids, labels=None):
            return super().forward(input_ids)

    model = Own(GPT2Config(vocab_size=9, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    assert task_of_model(model).name == "causal-lm"
    config = peft.LoraConfig(target_modules=["c_attn"], r=1, task_type="CAUSAL_LM", fan_in_fan_out=True)
    assert task_of_model(peft.get_peft_model(model, config)).name == "causal-lm"
    assert task_of_model(torch.nn.Linear(2, 2)) is None
    # What a forward pass of its own makes of labels, nobody knows.
    assert task_of_model(Other(model.config)) is None
    assert weight(find_task("causal-lm"), {"input_ids": torch.zeros(3, 4), "labels": torch.zeros(3)}) == 3


def test_no_task_of_other_architectures():
    assert task_of("BertForQuestionAnswering") is None
    assert task_of("BertForPreTraining") is None


def test_weight_without_a_task():
    assert weight(None, {"input_ids": torch.ones(3, 4), "labels": torch.zeros(3, dtype=torch.long)}) == 3
    assert weight(None, {"labels": torch.tensor([[1, -100], [2, 3]])}) == 3
    with pytest.raises(UsageError, match="no tensor"):
        weight(None, {})


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_task_has_its_mapping_and_class(task):
    import transformers
    from transformers.models.auto import modeling_auto

    assert getattr(modeling_auto, task.mapping)
    assert hasattr(transformers, task.auto_class)


def test_a_bf16_checkpoint_is_scored_in_float32_and_recorded(tmp_path):
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(bert_config()).to(torch.bfloat16)
    loaded = load(save(model, tmp_path / "half", make_tokenizer()))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert loaded.identity["checkpoint_dtype"] == "bfloat16"
    assert loaded.identity["dtype"] == "float32"
    assert load(tmp_path / "half", dtype="float64").model.classifier.weight.dtype == torch.float64


def test_identity_counts_tied_weights_once(mlm_folder):
    loaded = load(mlm_folder)
    assert loaded.identity["parameters"] == sum({p.data_ptr(): p.numel() for p in loaded.model.parameters()}.values())
    assert json.dumps(loaded.identity)


def test_the_card_is_read(bert_folder):
    assert load(bert_folder).card == {}
    (bert_folder / "README.md").write_text("---\ndatasets:\n- glue\n---\n# Model\n")
    assert load(bert_folder).card == {"datasets": ["glue"]}
    (bert_folder / "README.md").write_text("---\na: [\n---\n# Model\n")
    with pytest.warns(GeosharpWarning, match="model card"):
        assert load(bert_folder).card == {}


@pytest.mark.parametrize(("options", "culprit"), [({"dtype": "bfloat16"}, "bfloat16"), ({"device": "tpu9"}, "tpu9")])
def test_wrong_arguments(bert_folder, options, culprit):
    with pytest.raises(UsageError, match=culprit):
        load(bert_folder, **options)


def test_a_folder_that_is_not_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path)
    with pytest.raises(ModelError, match="no folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load(tmp_path)
    with pytest.raises(ModelError, match="is a file"):
        load(tmp_path / "config.json")


def test_a_folder_without_weights(bert_folder):
    (bert_folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights.*safetensors"):
        load(bert_folder)


def test_a_broken_weight_file(bert_folder):
    (bert_folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="does not load"):
        load(bert_folder)


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


def test_a_missing_head_is_an_error_unless_allowed(mlm_folder):
    with pytest.raises(ModelError, match=r"classifier\.weight.*allow_missing"):
        load(mlm_folder, task="text-classification")
    with pytest.warns(GeosharpWarning, match=r"classifier\.weight"):
        loaded = load(mlm_folder, task="text-classification", allow_missing=True)
    assert "classifier.weight" in loaded.identity["missing"]


def test_weights_that_do_not_fit_the_config(bert_folder):
    edit_config(bert_folder, id2label={str(i): str(i) for i in range(5)}, label2id={str(i): i for i in range(5)})
    with pytest.raises(ModelError, match=r"shapes.*classifier\.bias"):
        load(bert_folder)


def test_quantised_checkpoints(bert_folder):
    edit_config(bert_folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match=r"quantised \(gptq\)"):
        load(bert_folder)


def test_adapters(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="Merge the adapter"):
        load(tmp_path)


@pytest.fixture
def adapter_folder(bert_folder, tmp_path):
    """An adapter on the classifier, whose checkpoint is in half precision; and the model with it."""
    from transformers import AutoModelForSequenceClassification

    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    base = AutoModelForSequenceClassification.from_pretrained(bert_folder, dtype=torch.bfloat16)
    base.save_pretrained(bert_folder)
    config = peft.LoraConfig(
        r=2, target_modules=["query", "value"], task_type="SEQ_CLS", init_lora_weights=False
    )  # fmt: skip
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", adapted


def test_an_adapter_is_loaded_on_its_base_as_that_is_stored(adapter_folder, bert_folder):
    folder, adapted = adapter_folder
    loaded = load(folder, params="lora")
    there = dict(adapted.named_parameters())
    here = dict(loaded.model.named_parameters())
    assert set(here) == set(there)
    assert all(torch.equal(here[name], there[name]) for name in there)
    assert {p.dtype for name, p in here.items() if "lora" not in name and "classifier" not in name} == {torch.bfloat16}
    assert not loaded.model.training
    assert loaded.processor is not None
    assert loaded.task.name == "text-classification"
    expected = {"id": str(folder), "base": str(bert_folder), "class": "BertForSequenceClassification"}
    assert {name: loaded.identity[name] for name in expected} == expected
    assert loaded.identity["dtype"] == "bfloat16"


@pytest.mark.filterwarnings("ignore:the adapter's base stays in bfloat16")
def test_an_adapter_is_scored_by_its_name(adapter_folder, text_csv):
    folder, _ = adapter_folder
    how = {"data": str(text_csv), "device": "cpu", "steps": 3, "samples": 8, "batch_size": 8}
    result = score_pretrained(str(folder), params="lora", **how)
    assert (result.params, result.model["id"], result.model["task"]) == ("lora", str(folder), "text-classification")
    assert set(result.pairs.by_kind) == {"lora GL(2)"}
    assert all("lora" in name or "classifier" in name for name in result.share)
    loaded = load_pretrained(str(folder), params="lora", device="cpu")
    del how["device"]
    assert score_pretrained(loaded, params="lora", **how).geodesic_sharpness == result.geodesic_sharpness


def test_an_adapter_brings_its_classifier_along(mlm_folder, tmp_path):
    from transformers import AutoModelForSequenceClassification

    peft = pytest.importorskip("peft")
    base = AutoModelForSequenceClassification.from_pretrained(mlm_folder)
    config = {"r": 1, "target_modules": ["query"], "task_type": "SEQ_CLS"}
    both = peft.LoraConfig(**config, modules_to_save=["pooler", "classifier"])
    peft.get_peft_model(base, both).save_pretrained(tmp_path / "both")
    loaded = load(tmp_path / "both", params="lora")
    saved = dict(loaded.model.named_parameters())["base_model.model.classifier.modules_to_save.default.weight"]
    assert torch.equal(saved, dict(base.named_parameters())["classifier.modules_to_save.default.weight"])
    # What neither of the two has would be random numbers.
    base = AutoModelForSequenceClassification.from_pretrained(mlm_folder)
    peft.get_peft_model(base, peft.LoraConfig(**config)).save_pretrained(tmp_path / "without")
    with pytest.raises(ModelError, match=r"lacks 2 weights .* bert\.pooler\.dense\.bias"):
        load(tmp_path / "without", params="lora")


def test_what_is_no_adapter_or_none_that_fits(bert_folder, adapter_folder, tmp_path):
    folder, _ = adapter_folder
    with pytest.raises(UsageError, match="is no adapter: the folder has no adapter_config"):
        load(bert_folder, params="lora")
    with pytest.raises(UsageError, match="stays as it is stored"):
        load(folder, params="lora", dtype="float64")
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    for base, error, message in (
        (None, ModelError, "does not name the model"),
        (str(tmp_path / "nowhere"), ModelError, "There is no folder"),
    ):
        path.write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(error, match=message):
            load(folder, params="lora")
    path.write_text(json.dumps(config | {"target_modules": ["nothing"]}))
    with pytest.raises(ModelError, match="does not fit its base"):
        load(folder, params="lora")


def test_no_architecture(bert_folder):
    edit_config(bert_folder, architectures=None)
    with pytest.raises(UsageError, match="--task"):
        load(bert_folder)


def test_an_architecture_of_no_task(bert_folder):
    edit_config(bert_folder, architectures=["BertForQuestionAnswering"])
    with pytest.raises(ModelError, match=r"BertForQuestionAnswering.*causal-lm"):
        load(bert_folder)


def test_code_of_the_repository_is_not_run(bert_folder):
    edit_config(
        bert_folder,
        model_type="mine",
        auto_map={"AutoConfig": "mine.Config", "AutoModelForSequenceClassification": "mine.Model"},
        architectures=["Mine"],
    )
    (bert_folder / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load(bert_folder)


def test_an_unknown_model_type(bert_folder):
    edit_config(bert_folder, model_type="mine")
    with pytest.raises(ModelError, match="mine"):
        load(bert_folder)


def test_a_model_without_tokenizer_loads_and_says_so(tmp_path):
    from transformers import BertForSequenceClassification

    loaded = load(save(BertForSequenceClassification(bert_config()), tmp_path / "bare"))
    assert loaded.processor is None
    assert loaded.processor_error
