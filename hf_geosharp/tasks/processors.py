"""The tokenizer or image processor that comes with a model."""

from __future__ import annotations

from typing import Any

from hf_geosharp.errors import ModelError
from hf_geosharp.tasks.hub import Source
from hf_geosharp.tasks.kinds import Task

PROCESSORS = {"text": "AutoTokenizer", "image": "AutoImageProcessor"}


def load_processor(source: Source, task: Task, trust_remote_code: bool) -> tuple[Any, str | None]:
    """The processor that the task's inputs need; or None, and why there is none."""
    import transformers

    try:
        loader = getattr(transformers, PROCESSORS[task.modality])
        processor = loader.from_pretrained(source.place, trust_remote_code=trust_remote_code, **source.options())
    except Exception as error:
        # Whether that matters depends on the data: batches that are already encoded need no processor.
        return None, f"{type(error).__name__}: {str(error).strip()}"
    if task.modality == "text" and len(processor) <= len(processor.all_special_ids):
        # transformers 5 makes an empty tokenizer where there are no files for one.
        return None, f"its {type(processor).__name__} has no words: the vocabulary file that it reads is missing"
    return processor, None


def set_pad_token(source: Source, model: Any, tokenizer: Any) -> None:
    """Gives tokenizer and model a padding token, which they lack where single texts were enough.

    Raises:
        ModelError: The tokenizer has no token that could stand for it.
    """
    if tokenizer.pad_token is None:
        substitute = tokenizer.eos_token or tokenizer.unk_token
        if substitute is None:
            raise ModelError(
                f"{source.id}: its tokenizer has neither a padding nor an end token, so texts cannot be put in one "
                "batch. Set tokenizer.pad_token and save the tokenizer."
            )
        tokenizer.pad_token = substitute
    # Classifiers on decoders find the last token by it.
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = tokenizer.pad_token_id
