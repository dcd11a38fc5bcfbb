"""A tiny model of any type that transformers knows: its default configuration with every size made small.

What is small is decided by the names of attributes, by rules that hold across families; where they do not, the
exceptions are data (``tiny.json``). Parameters are random throughout: nothing is degenerate because it is at its
initial value.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

PreTrainedConfig = getattr(transformers, "PreTrainedConfig", None) or transformers.PretrainedConfig

OVERRIDES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""By model type: attributes of the configuration (nested as dictionaries), ``_class`` the model's class."""

WIDTH, HEADS, KEY_HEADS, LAYERS, VOCABULARY = 32, 4, 2, 2, 120
FIRST_SPECIAL = 100
"""Token ids from here on stand for special tokens."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How small a model becomes."""

    width: int = WIDTH
    inner: int = 48
    head: int = 8
    layers: int = LAYERS

    @property
    def wanted(self) -> dict[str, int]:
        """Attributes that are worked out from others where they are not given, and are given here."""
        return {"num_key_value_heads": KEY_HEADS, "head_dim": self.head}


BACKBONE = {
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
"""The convolutional backbone that takes the place of one from another library."""

SPECIAL = re.compile(r"(token|pad|bos|eos|sep|cls|mask|unk|start|end|image|audio|video|blank).*_(id|ids|index|idx)$")

RULES: tuple[tuple[str, Any], ...] = (
    (r"^type_vocab|num_labels|chunk_size_feed_forward|scale_factor|spatial_scale|upscale", lambda v, s: v),
    (r"vocab|num_embeddings$|n_codes", lambda v, s: v if v <= 16 else VOCABULARY),
    (r"codebook_size", lambda v, s: min(v, 32)),
    (r"max_2d_position", lambda v, s: v),
    (r"max_source_positions", lambda v, s: min(v, 24)),
    (r"position_embedding|max_.*position|n_positions|n_ctx|max_seq|block_size", lambda v, s: min(v, 64)),
    (r"max_length|seq_len", lambda v, s: min(v, 64)),
    (r"(image|img|crop|input|train|pretrain)_?(image_)?size|resolution", lambda v, s: v if v <= 64 else 64),
    (r"temporal_patch|tubelet", lambda v, s: v),
    (r"patch_size", lambda v, s: 8 if v >= 8 else v),
    (r"sliding_window|attention_window|attention_chunk|local_attention|window_attention", lambda v, s: min(v, 8)),
    (r"window", lambda v, s: 32 if v >= 64 else min(v, 4)),  # in pixels, or in patches
    (r"buckets", lambda v, s: v),
    (r"right_context", lambda v, s: min(v, 2)),
    (r"chunk|block_length", lambda v, s: min(v, 8)),
    (r"kernel|stride|dilation|conv_l_cache|d_conv", lambda v, s: v if v <= 16 else 15 if v % 2 else 16),
    (r"per_tok|top_?k(?!_group)|moe_k", lambda v, s: min(v, 2)),
    (r"topk_group", lambda v, s: min(v, 1)),
    (r"^n_group|expert_group", lambda v, s: min(v, 2)),
    (r"shared_expert(?!.*size)|n_shared", lambda v, s: min(v, 1)),
    (r"expert(?!.*size)(?!.*dim)|num_local_experts", lambda v, s: min(v, 4)),
    (r"first_k_dense", lambda v, s: min(v, 1)),
    (r"rope_head_dim|rope_dim|rotary_dim", lambda v, s: 4),
    (r"lora_rank|_rank$", lambda v, s: min(v, 16)),
    (r"head_dim|d_kv|d_head|head_size|kv_channels|headdim", lambda v, s: s.head),
    (r"(key_value|kv).*head|kv_heads|num_query_groups", lambda v, s: min(v, KEY_HEADS)),
    (r"heads?$|heads_per|n_heads?|num_heads", lambda v, s: {1: 1, 2: 2}.get(v, HEADS)),
    (
        r"queries|query_num|num_latents|query_tokens|landmarks|num_query|detection_tokens|num_prompts",
        lambda v, s: min(v, 12),
    ),
    (r"feature_levels", lambda v, s: v),
    (r"(^|_)depths?$|layers?$|_layer$|num_blocks|layers_per|num_hidden_layers", lambda v, s: min(v, s.layers)),
    (r"mel|freq|feat_per_channel|n_fft", lambda v, s: min(v, 16)),
    (
        r"intermediate|ffn|d_ff|mlp_dim|mlp_hidden|feed_?forward|n_inner|inner_dim",
        lambda v, s: v if v <= 8 else s.inner,
    ),
    (r"group", lambda v, s: min(v, 4)),
    (
        r"size|dims?$|dim_|_dim|width|channel|features|d_model|n_embd|embd|hidden|units|filters|planes|d_inner|"
        r"conv_dim|in_planes|d_state|state",
        lambda v, s: s.width if v > 24 else v,
    ),
    (r"num_frames|frames|num_codebooks|quantizers|num_images|tokens_per", lambda v, s: min(v, 4)),
)
"""What becomes of a positive integer: the first rule whose pattern is found in the attribute's name.

A rule has the integer and the sizes."""


def build(
    model_type: str, seed: int = 0, dtype: torch.dtype = torch.float64, sizes: Sizes = Sizes(), **attributes: Any
) -> nn.Module:  # fmt: skip
    """A tiny model with random parameters; ``attributes`` are set in its configuration.

    Raises:
        Exception: whatever its configuration or its constructor raise.
    """
    own = {**OVERRIDES.get(model_type, {}), **attributes}
    name = own.pop("_class", None)
    config = shrink(CONFIG_MAPPING[model_type], own, sizes)
    torch.manual_seed(seed)
    model = model_class(model_type, type(config), name)(config).eval().to(dtype)
    randomise(model, seed)
    return model


def model_class(model_type: str, config_class: type, name: str | None = None) -> type[PreTrainedModel]:
    """The base model of a configuration, or else a model with a head, or any of its module.

    Raises:
        LookupError: there is none.
    """
    from transformers.models.auto import modeling_auto

    module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    if name is None:
        tables = ["MODEL_MAPPING_NAMES", *(n for n in vars(modeling_auto) if n.startswith("MODEL_FOR_"))]
        tables = [t for t in tables if t.endswith("_MAPPING_NAMES")]
        found = [getattr(modeling_auto, t).get(model_type) for t in tables]
        names = [n[0] if isinstance(n, (list, tuple)) else n for n in found if n]
        name = next((n for n in names if hasattr(module, n)), None)
    if name is not None:
        return getattr(module, name)  # type: ignore[no-any-return]
    for candidate in vars(module).values():
        if (
            inspect.isclass(candidate)
            and issubclass(candidate, PreTrainedModel)
            and candidate.config_class is config_class
            and candidate.__module__ == module.__name__
            and not candidate.__name__.endswith("PreTrainedModel")
        ):
            return candidate
    raise LookupError(f"transformers has no model class for {model_type}")


def randomise(model: nn.Module, seed: int) -> None:
    """Random parameters: weights of the size that keeps activations, gains about one, biases about zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if not p.is_floating_point():
                continue
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if p.ndim >= 2:
                spread = p[0].numel() if p.ndim > 3 else p.shape[-1]
                p.copy_(noise / spread**0.5)
            else:
                p.copy_((1.0 if float(p.double().mean()) > 0.5 else 0.0) + 0.3 * noise)


# ------------------------------------------------------------------------------------------------------ configurations


def shrink(
    cls: type, overrides: dict[str, Any] | None = None, sizes: Sizes = Sizes(), instance: Any = None, ids: Any = None
) -> Any:  # fmt: skip
    """A small configuration of a class, after the rules; ``overrides`` are set as they are."""
    overrides = dict(overrides or {})
    ids = {} if ids is None else ids
    usual = _defaults(cls)
    fresh = instance if instance is not None else cls(**_parts(cls, overrides))
    kwargs: dict[str, Any] = {}
    layers = next((v for n, v in vars(fresh).items() if re.search("num_hidden_layers|^n_layers?$", n)), None)
    for name, default in usual.items():
        value = _value(fresh, name, default)
        if isinstance(value, PreTrainedConfig) and value.model_type == "timm_backbone":
            stages = [f"stage{i}" for i in (value.out_indices or [4])]
            kwargs[name] = CONFIG_MAPPING["resnet"](**BACKBONE, out_features=stages)
        elif isinstance(value, PreTrainedConfig):
            given = overrides.pop(name, {})
            kwargs[name] = (
                given if isinstance(given, PreTrainedConfig) else shrink(type(value), given, sizes, value, ids)
            )
        elif (
            default is None
            and name in sizes.wanted
            and (value is None or name != "head_dim")
            and "kv_lora_rank" not in usual
        ):
            kwargs[name] = sizes.wanted[name]
        elif name == "num_key_value_heads" and value == _value(fresh, "num_attention_heads", None):
            kwargs[name] = HEADS
        elif default is None and name == "rope_parameters" and "mrope_section" in str(value):
            kwargs[name] = _small(name, value, layers, ids, sizes)
        elif default is None and not (instance is not None and _differs(type(fresh), name, value)):
            continue
        elif value is not None:
            new = _small(name, value, layers, ids, sizes)
            if new != default:
                kwargs[name] = new
    kwargs.update({n: v for n, v in overrides.items() if not isinstance(v, dict) or n not in kwargs})
    config = _with_outputs(cls, kwargs, fresh)
    types = getattr(fresh, "layer_types", None)
    if "layer_types" not in kwargs and types and len(set(types)) > len(set(getattr(config, "layer_types", None) or ())):
        kwargs["layer_types"] = list(dict.fromkeys(types))
        count = next(n for n in ("num_hidden_layers", "n_layer", "num_layers") if n in usual)
        try:
            config = _make(cls, {**kwargs, count: len(kwargs["layer_types"])})
        except Exception:  # a pattern that this family does not allow: the regular one will do
            return config
    return config


def _with_outputs(cls: type, kwargs: dict[str, Any], fresh: Any) -> Any:
    """The configuration; of a backbone, one that gives as many stages as it did."""
    config, wanted = _make(cls, kwargs), list(getattr(fresh, "out_features", None) or ())
    if len(wanted) < 2 or not hasattr(config, "stage_names") or {"out_features", "out_indices"} & kwargs.keys():
        return config
    count = "num_hidden_layers"
    if not set(wanted) <= set(config.stage_names) and count in kwargs:
        kwargs[count] = len(wanted)
        wanted = _make(cls, kwargs).stage_names[-len(wanted) :]
    kwargs["out_features"] = wanted
    return _make(cls, kwargs)


def _value(config: Any, name: str, default: Any) -> Any:
    """An attribute; the default where layers differ in it."""
    try:
        return getattr(config, name, default)
    except Exception:
        return default


def _make(cls: type, kwargs: dict[str, Any]) -> Any:
    try:
        return cls(**kwargs)
    except Exception:
        plain = {n: v.to_dict() if isinstance(v, PreTrainedConfig) else v for n, v in kwargs.items()}
        return cls(**plain)


def _parts(cls: type, overrides: dict[str, Any]) -> dict[str, Any]:
    """Configurations that a composite cannot do without."""
    return {n: v for n, v in overrides.items() if isinstance(v, PreTrainedConfig)}


def _defaults(cls: type) -> dict[str, Any]:
    """The arguments of a configuration class with their defaults."""
    fields = {f.name: f for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    common = set(inspect.signature(PreTrainedConfig.__init__).parameters) - {"pad_token_id", "eos_token_id"}
    defaults = {}
    for name, p in inspect.signature(cls.__init__).parameters.items():
        if name == "self" or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or name in common:
            continue
        field = fields.get(name)
        if field is not None and field.default_factory is not dataclasses.MISSING:
            defaults[name] = field.default_factory()
        else:
            defaults[name] = None if p.default is inspect.Parameter.empty else p.default
    return defaults


def _differs(cls: type, name: str, value: Any) -> bool:
    """Whether a composite gave this part another value than it has by itself."""
    try:
        return bool(getattr(cls(), name, None) != value)
    except Exception:
        return False


def _small(name: str, value: Any, layers: int | None, ids: dict[str, int], sizes: Sizes) -> Any:
    if isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, int):
        return _integer(name, value, ids, sizes)
    if isinstance(value, (list, tuple)):
        indexes = re.search(r"ind(ex(es)?|ices)$|layer_ids$|feature_layers?$|attn_layers$", name)
        if value and all(isinstance(v, int) and not isinstance(v, bool) for v in value) and indexes:
            kept = [v for v in value if v < sizes.layers] or [sizes.layers - 1]
            return type(value)(kept)
        if layers and len(value) == layers and layers > sizes.layers:
            value = value[: sizes.layers]
        return type(value)(_small(name, v, None, ids, sizes) for v in value)
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if not isinstance(k, int) or k < sizes.layers}
        return {
            k: _section(v, sizes) if k == "mrope_section" else _small(str(k), v, layers, ids, sizes)
            for k, v in value.items()
        }
    return value


def _section(parts: list[int], sizes: Sizes) -> list[int]:
    """The rotary frequencies of a small head, shared out."""
    return [sizes.head // 2 - len(parts) + 1, *([1] * (len(parts) - 1))]


def _integer(name: str, value: int, ids: dict[str, int], sizes: Sizes) -> int:
    if SPECIAL.search(name):
        if value < FIRST_SPECIAL:
            return value
        common = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        return common.get(name) if name in common else ids.setdefault(name, FIRST_SPECIAL + len(ids))  # type: ignore[return-value]
    if value <= 0:
        return value
    for pattern, rule in RULES:
        if re.search(pattern, name):
            return int(rule(value, sizes))
    return value
