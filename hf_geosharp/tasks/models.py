"""Loading a model so that the score is that of its trained weights: all of them present, in full precision."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hf_geosharp.errors import (
    GeosharpError,
    GeosharpWarning,
    HubError,
    ModelError,
    UnsupportedModelError,
    UsageError,
)
from hf_geosharp.tasks.hub import Source, fetch, fetch_optional, find_source, hub_error, is_hub_failure
from hf_geosharp.tasks.kinds import TASKS, Task, find_task, task_names, task_of
from hf_geosharp.tasks.quiet import quiet_transformers

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float64")
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_PROCESSORS = {"text": "AutoTokenizer", "image": "AutoImageProcessor"}
_SHOWN = 6


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be scored.

    Attributes:
        model: The model, in eval mode, in the asked dtype, on the asked device.
        processor: Its tokenizer or image processor; None if it comes with none (``processor_error`` says why).
        task: What it does.
        identity: What was loaded, for the result (JSON-able).
        card: The metadata of its model card; empty if it has none.
    """

    model: torch.nn.Module
    processor: Any
    task: Task
    identity: dict[str, Any]
    card: dict[str, Any] = field(default_factory=dict)
    processor_error: str | None = None


def load_model(
    model_id: str | os.PathLike[str],
    *,
    task: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    dtype: str = "float32",
    device: str = "auto",
    allow_missing: bool = False,
    params: str = "all",
) -> LoadedModel:
    """Loads a model with its processor and its card.

    Args:
        model_id: A folder, or the id of a model on the Hub. A folder never asks the network.
        task: A task's name, or ``"auto"``: the one of the config's architecture.
        revision: A branch, tag or commit of the Hub repository.
        token: The Hub token; None takes what the user logged in with.
        trust_remote_code: Whether code from the model's repository may run.
        dtype: ``"float32"`` or ``"float64"``, whatever the checkpoint holds: in 16 bits a small step moves few weights.
        device: A torch device, or ``"auto"``: a GPU if there is one.
        allow_missing: Whether weights that the checkpoint lacks may start at random (else they are an error).
        params: ``"lora"`` takes an adapter of PEFT, and loads its base as it is stored, in half precision or quantised.

    Raises:
        UsageError: An argument is not one of its choices, or the task cannot be told from the config.
        ModelError: The folder is not a model, or weights are missing or do not fit, or it needs code of its own.
        UnsupportedModelError: The checkpoint is quantised, or is an adapter.
        HubError: The Hub does not give it.
    """
    if dtype not in DTYPES:
        raise UsageError(f"The dtype {dtype!r} cannot be used: a score is taken in {' or '.join(DTYPES)}.")
    import transformers

    target = _device(device)
    source = find_source(model_id, revision, token)
    if params == "lora":
        if dtype != DTYPES[0]:
            raise UsageError(f"The dtype {dtype!r} does not go with params 'lora': the base stays as it is stored.")
        return _load_adapter(source, target, task, trust_remote_code, allow_missing)
    raw, source = _read_config(source)
    _refuse_quantised(source, raw)
    chosen = _task(source, raw, task)
    with quiet_transformers():
        config = _load_config(source, trust_remote_code)
        _refuse_quantised(source, getattr(config, "__dict__", {}))
        loader = getattr(transformers, chosen.auto_class)
        model, missing, _ = _load_weights(source, config, loader, dtype, trust_remote_code, allow_missing)
    model.eval()
    model.to(target)
    return _with_processor(
        source, model, chosen, _identity(source, raw, model, chosen, dtype, missing), trust_remote_code
    )


def _load_adapter(
    source: Source, target: torch.device, task: str, trust_remote_code: bool, allow_missing: bool
) -> LoadedModel:
    """An adapter on its base, which keeps the precision that it is stored in."""
    import transformers

    raw, source = _read_adapter(source)
    base = find_source(raw["base_model_name_or_path"], raw.get("revision"), source.token)
    config_of_base, base = _read_config(base)
    named = _TASKS_OF_PEFT.get(str(raw.get("task_type")))
    chosen = _task(base, config_of_base, named if task == "auto" and named is not None else task)
    with quiet_transformers():
        config = _load_config(base, trust_remote_code)
        loader = getattr(transformers, chosen.auto_class)
        # What the adapter brings along (a classifier, say) is no loss.
        brought = bool(raw.get("modules_to_save"))
        model, missing, _ = _load_weights(
            base, config, loader, "auto", trust_remote_code, allow_missing, silent=brought
        )  # fmt: skip
        adapted = _with_adapter(source, model)
    missing = [name for name in missing if not any(f".{part}." in f".{name}." for part in raw["modules_to_save"] or ())]
    if missing and brought:
        _missing(base, missing, [], type(model).__name__, allow_missing)
    adapted.eval()
    if getattr(model, "hf_quantizer", None) is None:
        # Where quantised weights lie is decided when they are loaded.
        adapted.to(target)
    dtype = str(config_of_base.get("dtype") or config_of_base.get("torch_dtype") or "float32")
    identity = _identity(source, config_of_base, model, chosen, dtype, missing)
    loaded = _with_processor(base, adapted, chosen, identity | {"base": base.id, "base_revision": base.revision},
                             trust_remote_code)  # fmt: skip
    return replace(loaded, card=_read_card(source))


_TASKS_OF_PEFT = {"SEQ_CLS": "text-classification", "CAUSAL_LM": "causal-lm", "SEQ_2_SEQ_LM": "seq2seq-lm"}
"""What adapter_config.json says of the task, where it says something."""


def _read_adapter(source: Source) -> tuple[dict[str, Any], Source]:
    """The raw adapter_config.json, and the source pinned to the commit it came from."""
    path = fetch(source, "adapter_config.json")
    if path is None:
        where = "the folder" if source.folder is not None else "the repository"
        raise UsageError(
            f"{source.id} is no adapter: {where} has no adapter_config.json. --params lora scores an adapter on its "
            "base; leave it out to score all weights of a model."
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{source.id}: adapter_config.json is not valid JSON ({error}).") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("base_model_name_or_path"), str):
        raise ModelError(
            f"{source.id}: adapter_config.json does not name the model that the adapter belongs to "
            "(base_model_name_or_path)."
        )
    raw.setdefault("modules_to_save", None)
    return raw, source.at(path.parent.name)


def _with_adapter(source: Source, model: Any) -> Any:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UsageError(f"{source.id} is an adapter, which needs the package peft: pip install peft.") from error
    try:
        return PeftModel.from_pretrained(model, source.place, **source.options())
    except Exception as error:
        if source.folder is None and is_hub_failure(error):
            raise hub_error(error, f"adapter {source.id!r}") from error
        raise ModelError(
            f"{source.id}: the adapter does not fit its base: {type(error).__name__}: {str(error).strip()}"
        ) from error


@dataclass(frozen=True)
class Network:
    """A model of whatever class its config names, which need not do a task that can be scored.

    Attributes:
        model: The model, in eval mode, in the asked dtype, on the asked device.
        task: What it does, if that is one of ours.
        identity: What was loaded or built, for the result (JSON-able).
        unexpected: Weights of the checkpoint that the model has no place for.
        source, trust_remote_code: Where its processor comes from, and whether code from there may run.
    """

    model: torch.nn.Module
    task: Task | None
    identity: dict[str, Any]
    unexpected: tuple[str, ...]
    source: Source
    trust_remote_code: bool

    def for_data(self) -> LoadedModel:
        """The same with the processor that data need.

        Raises:
            UsageError: It does none of the tasks whose data can be read.
        """
        if self.task is None:
            raise UsageError(
                f"{self.source.id} is a {type(self.model).__name__}, which does none of the tasks whose data can be "
                f"read: {task_names()}."
            )
        return _with_processor(self.source, self.model, self.task, self.identity, self.trust_remote_code)


def load_network(
    model_id: str | os.PathLike[str],
    *,
    task: str = "auto",
    random_init: bool = False,
    seed: int = 0,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    dtype: str = "float32",
    device: str = "auto",
    allow_missing: bool = False,
) -> Network:
    """Loads a model of any class, or builds it from its config alone.

    The class is that of ``task``; without one what the config names (``architectures``); else the one of AutoModel.

    Args:
        model_id: A folder (with nothing but config.json for ``random_init``), or the id of a model on the Hub.
        task: A task's name, or ``"auto"``.
        random_init: Whether to build it with random weights, which takes no checkpoint. They are not those that a
            training starts from: biases and norms are random too, and attention depends on its input.
        seed: Of the random weights.
        revision, token, trust_remote_code, dtype, device, allow_missing: As for `load_model`.

    Raises:
        GeosharpError: As for `load_model`; ModelError where the config belongs to no class of models.
    """
    if dtype not in DTYPES:
        raise UsageError(f"The dtype {dtype!r} cannot be used: it is {' or '.join(DTYPES)}.")
    target = _device(device)
    source = find_source(model_id, revision, token)
    raw, source = _read_config(source)
    chosen = find_task(task) if task != "auto" else _task_of_config(raw)
    with quiet_transformers():
        config = _load_config(source, trust_remote_code)
        loader = _loader(source, raw, config, chosen if task != "auto" else None)
        missing: list[str] = []
        unexpected: list[str] = []
        if random_init:
            model = _build(source, config, loader, seed, dtype, trust_remote_code)
        else:
            _refuse_quantised(source, raw)
            _refuse_quantised(source, getattr(config, "__dict__", {}))
            model, missing, unexpected = _load_weights(source, config, loader, dtype, trust_remote_code, allow_missing)
    model.eval()
    model.to(target)
    identity = _identity(source, raw, model, chosen, dtype, missing)
    if random_init:
        identity |= {"checkpoint_dtype": None, "random_init": True, "seed": seed}
    return Network(model, chosen, identity, tuple(unexpected), source, trust_remote_code)


def _task_of_config(raw: Mapping[str, Any]) -> Task | None:
    architectures = raw.get("architectures") or []
    return (task_of(architectures[0]) if architectures else None) or _task_of_remote_code(raw)


def _loader(source: Source, raw: Mapping[str, Any], config: Any, task: Task | None) -> Any:
    """The class of transformers that makes the model."""
    import transformers

    architecture = next(iter(raw.get("architectures") or ()), "")
    named = getattr(transformers, architecture, None) if architecture and task is None else None
    if named is not None and hasattr(named, "from_pretrained"):
        return named
    # Code of the repository's own is reached through the auto class that its config names for it.
    own = {auto: str(reference).rpartition(".")[2] for auto, reference in (raw.get("auto_map") or {}).items()}
    for auto, name in own.items():
        if task is None and name == architecture and hasattr(transformers, auto):
            return getattr(transformers, auto)
    if architecture and task is None:
        warnings.warn(
            f"{source.id}: its config.json names {architecture}, a class that transformers does not have and the "
            "repository has no code for; taken as the model without a head. Pass --task for another class.",
            GeosharpWarning,
            stacklevel=2,
        )
    auto, mapping = (task.auto_class, task.mapping) if task is not None else ("AutoModel", "MODEL_MAPPING_NAMES")
    # Asked here, for transformers' own answer takes ten seconds and lists every model there is.
    if auto not in own and type(config) not in getattr(transformers, mapping.removesuffix("_NAMES")):
        kind = f" for {task.name}" if task is not None else ""
        raise ModelError(
            f"{source.id}: transformers has no model{kind} that takes a {type(config).__name__}. Pass another --task, "
            "or name the model's class in architectures of its config.json."
        )
    return getattr(transformers, auto)


def _build(source: Source, config: Any, loader: Any, seed: int, dtype: str, trust_remote_code: bool) -> Any:
    """A model with random weights."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if hasattr(loader, "from_config"):
                model = loader.from_config(config, trust_remote_code=trust_remote_code)
            else:
                model = loader(config)
        except Exception as error:
            if not trust_remote_code and "trust_remote_code" in str(error):
                raise _needs_code(source) from error
            raise ModelError(
                f"{source.id} cannot be built from its config.json: {type(error).__name__}: {str(error).strip()}"
            ) from error
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    _rouse(parameter)
    return model.to(getattr(torch, dtype))


def _rouse(parameter: torch.Tensor) -> None:
    """Moves a parameter off its initial values, where a model looks symmetric although it is not.

    Vectors (ones and zeros in norms and biases) get noise, zeros become noise, and matrices that are too small for
    attention to depend on its input grow to one over the root of what they read.
    """
    import torch

    if parameter.ndim < 2 or parameter.numel() < 2:
        parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter))
        return
    wanted = parameter[0].numel() ** -0.5
    spread, mean = float(parameter.std()), abs(float(parameter.mean()))
    if spread == 0 and mean == 0:
        parameter.copy_(wanted * torch.randn(parameter.shape))
    elif mean < spread / 2 and spread < wanted:
        parameter.mul_(wanted / spread)


def _with_processor(
    source: Source, model: Any, task: Task, identity: dict[str, Any], trust_remote_code: bool
) -> LoadedModel:
    with quiet_transformers():
        processor, reason = _load_processor(source, task, trust_remote_code)
    if task.modality == "text" and processor is not None:
        _set_pad_token(source, model, processor)
    return LoadedModel(
        model=model,
        processor=processor,
        task=task,
        identity=identity,
        card=_read_card(source),
        processor_error=reason,
    )


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"There is no device {name!r}: pass auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"There is no device {name!r} here ({torch.cuda.device_count()} GPUs): pass auto or cpu.")
    return device


def _read_config(source: Source) -> tuple[dict[str, Any], Source]:
    """The raw config.json, and the source pinned to the commit it came from."""
    path = fetch(source, "config.json")
    # Adapters may carry a config.json too, and from_pretrained would load base and adapter without a word.
    if fetch_optional(source, "adapter_config.json") is not None:
        raise UnsupportedModelError(
            f"{source.id} is an adapter (adapter_config.json), not a model. Merge the adapter first "
            "(PEFT's merge_and_unload, then save_pretrained) and pass the merged model, or score the adapter alone: "
            "--params lora."
        )
    if path is None:
        where = "the folder" if source.folder is not None else "the repository"
        raise ModelError(f"{source.id} is not a model: {where} has no config.json.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{source.id}: config.json is not valid JSON ({error}).") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{source.id}: config.json holds no object but a {type(raw).__name__}.")
    # On the Hub's cache the file lies in snapshots/<commit>/.
    return raw, source.at(path.parent.name)


def _refuse_quantised(source: Source, config: Mapping[str, Any]) -> None:
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
        raise UnsupportedModelError(
            f"{source.id} is quantised ({method or 'quantization_config in its config.json'}): its weights cannot be "
            "perturbed. Score the model it was made from."
        )


def _task(source: Source, raw: Mapping[str, Any], name: str) -> Task:
    if name != "auto":
        return find_task(name)
    architectures = raw.get("architectures") or []
    if not architectures:
        raise UsageError(
            f"{source.id}: its config.json names no architecture, so its task is not known. "
            f"Pass --task with one of: {task_names()}."
        )
    found = task_of(architectures[0]) or _task_of_remote_code(raw)
    if found is None:
        raise ModelError(
            f"{source.id} is a {architectures[0]}, which does none of the tasks that can be scored: {task_names()}. "
            "If its weights have such a head all the same, name it with --task."
        )
    return found


def _task_of_remote_code(raw: Mapping[str, Any]) -> Task | None:
    auto_map = raw.get("auto_map") or {}
    return next((task for task in TASKS if task.auto_class in auto_map), None)


def _load_config(source: Source, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        # Always said explicitly: None would ask the user on the terminal.
        return AutoConfig.from_pretrained(source.place, trust_remote_code=trust_remote_code, **source.options())
    except Exception as error:
        raise _load_error(source, error, trust_remote_code, weights=False) from error


def _load_weights(
    source: Source, config: Any, loader: Any, dtype: str, trust_remote_code: bool, allow_missing: bool,
    *, silent: bool = False,
) -> tuple[Any, list[str], list[str]]:  # fmt: skip
    """The model, the weights that the checkpoint lacks, and those that the model has no place for.

    With ``silent`` the caller deals with those that are missing. The dtype "auto" is that of the checkpoint.
    """
    import torch

    try:
        model, report = loader.from_pretrained(
            source.place,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            # Reported below, by name; transformers' own error is a wall of text.
            ignore_mismatched_sizes=True,
            **source.options(),
        )
    except Exception as error:
        raise _load_error(source, error, trust_remote_code) from error
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in report["mismatched_keys"])
    if mismatched:
        raise ModelError(
            f"{source.id}: the shapes of {len(mismatched)} weights do not fit its config.json: {_some(mismatched)}. "
            "Correct the config (number of labels, sizes) or pass the checkpoint that belongs to it."
        )
    if report.get("error_msgs"):
        raise ModelError(f"{source.id}: weights do not load: {'; '.join(map(str, report['error_msgs']))}.")
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing and not silent:
        _missing(source, missing, unexpected, type(model).__name__, allow_missing)
    return model, missing, unexpected


def _missing(source: Source, missing: list[str], unexpected: list[str], name: str, allowed: bool) -> None:
    text = f"{source.id}: the checkpoint lacks {len(missing)} weights of {name}: {_some(missing)}."
    if unexpected:
        text += f" It has {len(unexpected)} that {name} has no place for: {_some(unexpected)}."
    if not allowed:
        raise ModelError(
            f"{text} They would be random numbers. Pass the fine-tuned model, or the --task that the checkpoint was "
            "trained for, or allow it (allow_missing=True)."
        )
    warnings.warn(f"{text} They are random numbers.", GeosharpWarning, stacklevel=4)


def _needs_code(source: Source) -> ModelError:
    return ModelError(
        f"{source.id} needs Python code from its own repository. Read that code; if you trust it, "
        "pass --trust-remote-code."
    )


def _load_error(source: Source, error: Exception, trusted: bool, *, weights: bool = True) -> GeosharpError:
    """What to tell of a failure to load; ``weights`` says whether weights were needed at all."""
    if isinstance(error, GeosharpError):
        return error
    if not trusted and "trust_remote_code" in str(error):
        return _needs_code(source)
    if source.folder is None and is_hub_failure(error):
        return hub_error(error, f"model {source.id!r}")
    text = str(error).strip()
    try:
        found = not weights or any(fetch(source, name) is not None for name in _WEIGHT_FILES)
    except HubError as unreachable:
        # transformers takes weights that it cannot reach for weights that are not there.
        return unreachable
    if not found:
        return ModelError(f"{source.id} has a config.json but no weights ({' or '.join(_WEIGHT_FILES)}).")
    return ModelError(f"{source.id} does not load: {type(error).__name__}: {text or 'no message'}")


def _load_processor(source: Source, task: Task, trust_remote_code: bool) -> tuple[Any, str | None]:
    import transformers

    try:
        loader = getattr(transformers, _PROCESSORS[task.modality])
        processor = loader.from_pretrained(source.place, trust_remote_code=trust_remote_code, **source.options())
    except Exception as error:
        # Whether that matters depends on the data: batches that are already encoded need no processor.
        return None, f"{type(error).__name__}: {str(error).strip()}"
    if task.modality == "text" and len(processor) <= len(processor.all_special_ids):
        # transformers 5 makes an empty tokenizer where there are no files for one.
        return None, "its tokenizer has no words: the vocabulary file is missing"
    return processor, None


def _set_pad_token(source: Source, model: Any, tokenizer: Any) -> None:
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


def _identity(
    source: Source, raw: Mapping[str, Any], model: Any, task: Task | None, dtype: str, missing: list[str]
) -> dict[str, Any]:
    identity = {
        "id": source.id,
        "revision": source.revision,
        "class": type(model).__name__,
        "task": task.name if task else None,
        "checkpoint_dtype": raw.get("dtype") or raw.get("torch_dtype"),
        "dtype": dtype,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    return {**identity, "missing": missing} if missing else identity


def _read_card(source: Source) -> dict[str, Any]:
    path = fetch_optional(source, "README.md")
    if path is None:
        return {}
    from huggingface_hub import metadata_load

    try:
        data = metadata_load(path)
    except Exception as error:
        warnings.warn(f"{source.id}: the metadata of its model card cannot be read ({error}).", GeosharpWarning, 3)
        return {}
    return data if isinstance(data, dict) else {}


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
