"""What can be scored: tasks by name, by class and by model, and how many terms the loss of a batch has."""

from __future__ import annotations

import pytest
import torch

from hf_geosharp.errors import UsageError
from hf_geosharp.tasks.kinds import TASKS, find_task, task_of, task_of_model, weight


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
