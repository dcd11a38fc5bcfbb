"""What is known of a model before its inputs are made, and how far they are made."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]

SCOPES: dict[str, tuple[str, ...]] = {
    "text": ("text", "language", "llm", "thinker", "decoder", "question"),
    "image": ("vision", "image", "vit", "backbone", "visual", "encoder"),
    "audio": ("audio", "speech", "acoustic", "encoder"),
}
"""Where each kind of input is described: nested configurations with these words in their name come first."""

SIZES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "d_model", "embed_dim", "n_embd", "dim", "hidden_dim"),
    "encoder_hidden": ("encoder_hidden_size", "cross_attention_hidden_size", "hidden_size", "d_model"),
    "mel": ("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "feature_projection_input_dim",
            "input_feat_size", "input_dim", "num_features", "mel_dim"),
    "channels": ("num_channels", "in_channels", "in_chans", "num_input_channels", "channels"),
    "sound_channels": ("audio_channels",),
    "visual": ("visual_feat_dim", "visual_embedding_dim"),
    "visual_pos": ("visual_pos_dim",),
    "state": ("state_dim",),
    "act": ("act_dim",),
    "latent": ("d_model", "hidden_size"),
    "horizon": ("prediction_length", "horizon_length"),
    "time_features": ("num_time_features",),
    "frames": ("num_frames", "frames_per_clip"),
    "task": ("task_seq_len",),
}  # fmt: skip
"""What configurations call a size."""

USUAL = {"items": 7, "frames": 24, "height": 64, "width": 64, "horizon": 24, "steps": 24, "time_features": 0}
"""Sizes where no configuration says any; 1 for the others."""


class Facts:
    """A configuration and those nested in it, asked for an attribute by its usual names."""

    def __init__(self, config: Any) -> None:
        self.all = list(self._walk("", config, set()))

    def _walk(self, path: str, config: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
        if config is None or id(config) in seen:
            return
        seen.add(id(config))
        yield path, config
        for name, value in vars(config).items():
            if hasattr(value, "to_dict") and hasattr(value, "model_type"):
                yield from self._walk(f"{path}.{name}", value, seen)

    def get(self, names: str | Sequence[str], scope: str = "") -> Any:
        """The first attribute that is set, in the configurations of a scope first; None if there is none."""
        words = SCOPES.get(scope, (scope,) if scope else ())
        order = sorted(self.all, key=lambda c: next((i for i, w in enumerate(words) if w in c[0]), len(words)))
        for name, (_, config) in itertools.product([names] if isinstance(names, str) else names, order):
            try:
                value = getattr(config, name, None)
            except Exception:  # one that differs between layers has no single value
                continue
            if value is not None and not callable(value):
                return value
        return None

    def number(self, names: str | Sequence[str], scope: str = "") -> int | None:
        """The same as a whole number; the first of a list."""
        value = self.get(names, scope)
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def has_itself(self, names: Sequence[str]) -> bool:
        """Whether the configuration, not one nested in it, sets one of these."""
        return any(getattr(config, n, None) for _, config in self.all[:1] for n in names)

    def special_tokens(self) -> list[int]:
        """Every token id that the configurations name."""
        found: set[int] = set()
        for _, config in self.all:
            for name, value in vars(config).items():
                if re.search(r"token_(id|ids|index)$", name):
                    found |= {v for v in (value if isinstance(value, (list, tuple)) else [value]) if type(v) is int}
        return sorted(found)


class Draft:
    """The inputs of one model in the making.

    Attributes:
        facts: its configuration.
        names, required, main: what its forward pass takes, what it cannot do without, and what it is mostly about.
        made: the inputs so far; ``sides`` their sizes, as other inputs must have the same.
        placeholders: how many tokens stand for an image, a video or a recording in each row.
        fitted: by sizes of frames of sound that the model has refused, the ones that it has asked for instead.
        unknown: required inputs that cannot be made up.
    """

    def __init__(self, model: nn.Module, rows: int, tokens: int, seed: int) -> None:
        self.facts = Facts(getattr(model, "config", None))
        parameters = inspect.signature(model.forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.required = [p.name for p in parameters if p.name in self.names and p.default is p.empty]
        main = getattr(model, "main_input_name", "input_ids")
        self.main = main if main in self.names else next(iter(self.required or self.names), str(main))
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.rows, self.tokens, self.seed = rows, tokens, seed
        self.placeholders = {"image": 1, "video": 1, "audio": 1}
        self.fitted: dict[int, int] = {}
        self.unknown: list[str] = []
        self.generator = torch.Generator()
        self.made: Batch = {}
        self.sides: dict[str, int] = {}

    def make(self, parts: Sequence[Part]) -> Batch:
        """What these parts make, always the same; only what the model takes."""
        self.generator.manual_seed(self.seed)
        self.made, self.sides = {}, {"rows": self.rows, "tokens": self.tokens}
        for part in parts:
            self.made |= {k: v for k, v in part(self).items() if k in self.names}
        return self.made

    def size(self, name: str, scope: str = "") -> int:
        """A size by its name: of what is made already, of the configuration, or a usual one."""
        if name.isdigit():
            return int(name)
        if name in self.sides:
            return self.sides[name]
        return self.facts.number(SIZES.get(name, ()), scope) or USUAL.get(name, 1)

    def normal(self, *shape: int) -> Tensor:
        """Numbers about zero in the model's dtype."""
        return torch.randn(shape, generator=self.generator).to(self.dtype)


Part = Callable[[Draft], Batch]
"""Makes some of the inputs."""
