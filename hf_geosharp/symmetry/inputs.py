"""Synthetic inputs for a model whose user gave none: enough to run it, varied enough to tell directions apart.

What a model may be given stands in its signature, how large it is in its configuration (nested ones too), under one of
a few usual names. Where these leave a choice (a mel spectrogram either way round), the candidates are tried in turn and
the first is taken on which the model runs; the most usual comes first, so that a large model runs once.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 13
"""Tokens of a synthetic sequence, next to those that stand for an image or a recording."""

Batch = dict[str, Tensor]

TRIES = 40
"""Candidates at most: only models of unusual inputs see more than two."""

CHARACTERS = 1000
"""Vocabulary of a model of text that names none: it reads characters."""

RECOUNTS = 3
"""Times that the number of placeholders may be corrected."""

HORIZON = 24
"""Frames, samples' strides and steps in time where no configuration says how many."""

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
    "categories": ("num_static_categorical_features",),
    "codebooks": ("num_codebooks", "n_codebooks", "num_quantizers"),
}  # fmt: skip
"""What configurations call a size."""

TABLE: dict[str, tuple[str, str]] = {
    "visual_feats": ("normal", "rows items visual"),
    "visual_pos": ("uniform", "rows items visual_pos"),
    "visual_embeds": ("normal", "rows items visual"),
    "states": ("normal", "rows tokens state"),
    "actions": ("normal", "rows tokens act"),
    "rewards": ("normal", "rows tokens 1"),
    "returns_to_go": ("normal", "rows tokens 1"),
    "timesteps": ("count", "rows tokens"),
    "inputs": ("normal", "rows tokens latent"),
    "past_time_features": ("normal", "rows history time_features"),
    "past_observed_mask": ("ones", "rows history"),
    "future_values": ("normal", "rows horizon"),
    "future_time_features": ("normal", "rows horizon time_features"),
    "query_embeds": ("normal", "rows items hidden"),
    "encoder_hidden_states": ("normal", "rows items encoder_hidden"),
    "hidden_states": ("normal", "rows tokens hidden"),
    "inputs_embeds": ("normal", "rows tokens hidden"),
    "image_features": ("normal", "rows items hidden"),
    "latents": ("normal", "rows latent tokens"),
    "spectrogram": ("normal", "rows tokens mel"),
    "audio_mel": ("normal", "rows frames mel"),
    "audio_mel_mask": ("zeros", "rows frames"),
    "input_features_mask": ("ones", "rows frames"),
    "padding_mask": ("ones", "rows frames"),
    "pixel_mask": ("ones", "rows height width"),
    "qformer_input_ids": ("count", "rows items"),
    "task_inputs": ("count", "rows tokens"),
    "attention_mask": ("ones", "rows tokens"),
}
"""Inputs that need no more than a shape: what they are filled with, and the names or numbers of their sides."""

OPTIONAL = ("bbox", "visual_feats", "visual_pos", "visual_embeds", "states", "actions", "returns_to_go", "timesteps",
            "future_values", "future_time_features", "inputs")  # fmt: skip
"""Inputs that are given although the signature has a default for them: the model does little without."""


INSTEAD = ("inputs_embeds", "hidden_states")
"""Inputs that take the place of others: given where the signature demands them."""


def synthetic(model: nn.Module, *, rows: int = 2, tokens: int = TOKENS, seed: int = 0) -> Batch:
    """A batch of random inputs made from the model's signature and configuration, on which the model has run.

    Text models get ``input_ids`` (rows, tokens) over the whole vocabulary with a padded tail in the last row,
    image models ``pixel_values`` (rows, channels, height, width), encoder-decoders ``decoder_input_ids`` too; models
    that read several kinds get all of them, or those they run with.

    Raises:
        ValueError: the model wants an input that cannot be made up; pass an example batch instead.
    """
    maker = _Maker(model, rows, tokens, seed)
    device = next(model.parameters()).device
    first: Exception | None = None
    tried: set[str] = set()
    with _undisturbed(model):
        for recipe in maker.recipes():
            for _ in range(RECOUNTS):
                batch = {k: v.to(device) for k, v in maker.batch(recipe).items()}
                look = str({k: v.shape for k, v in batch.items()})
                if look in tried or len(tried) > TRIES:
                    break
                tried.add(look)
                failure = _failure(model, batch)
                if failure is None:
                    return batch
                first = first or failure
                if not maker.recount(model, batch, failure):
                    break
    wanted = ", ".join(repr(n) for n in maker.unknown) or repr(maker.main)
    reason = f" ({type(first).__name__}: {' '.join(str(first).split())[:300]})" if first else ""
    raise ValueError(f"cannot make up the input {wanted} of {type(model).__name__}{reason}; pass an example batch")


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, the global random state kept."""
    training = {m: m.training for m in model.modules()}
    state = torch.get_rng_state()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_rng_state(state)
        for module, mode in training.items():
            module.training = mode


def _failure(model: nn.Module, batch: Batch) -> Exception | None:
    """Why the model does not run on a batch; None if it does."""
    try:
        if output_tensors(call(model, batch)):
            return None
        return ValueError("it gives no tensors")
    except (MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        return error


class _Facts:
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

    def get(self, *names: str, scope: str = "") -> Any:
        """The first attribute that is set, in the configurations of a scope first; None if there is none."""
        words = SCOPES.get(scope, ())
        order = sorted(self.all, key=lambda c: next((i for i, w in enumerate(words) if w in c[0]), len(words)))
        for name, (_, config) in itertools.product(names, order):
            try:
                value = getattr(config, name, None)
            except Exception:  # one that differs between layers has no single value
                continue
            if value is not None and not callable(value):
                return value
        return None

    def number(self, *names: str, scope: str = "") -> int | None:
        """The same as a whole number; the first of a list."""
        value = self.get(*names, scope=scope)
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def special(self) -> set[int]:
        """Every token id that the configurations name."""
        found: set[int] = set()
        for _, config in self.all:
            for name, value in vars(config).items():
                if re.search(r"token_(id|ids|index)$", name):
                    found |= {v for v in (value if isinstance(value, (list, tuple)) else [value]) if type(v) is int}
        return found


Recipe = tuple[Callable[[], Batch], ...]


class _Maker:
    """Makes up the inputs of one model."""

    def __init__(self, model: nn.Module, rows: int, tokens: int, seed: int) -> None:
        self.facts = _Facts(getattr(model, "config", None))
        parameters = inspect.signature(model.forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.required = [p.name for p in parameters if p.name in self.names and p.default is p.empty]
        main = getattr(model, "main_input_name", "input_ids")
        self.main = main if main in self.names else next(iter(self.required or self.names), main)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.rows, self.tokens, self.seed = rows, tokens, seed
        self.unknown: list[str] = []
        self.placeholders = {"image": 1, "video": 1, "audio": 1}
        self.generator = torch.Generator()

    # --------------------------------------------------------------------------------------------------- candidates

    def recipes(self) -> Iterator[Recipe]:
        """Ways to make a batch, the most likely first."""
        kinds: list[list[Callable[[], Batch]]] = []
        text = [self._text] if "input_ids" in self.names and self._vocabulary() else []
        images = self._images()
        sounds = self._sounds()
        for together in ((images, sounds, text), (images, text), (sounds, text), (text,), (images,), (sounds,), ()):
            chosen = [k for k in together if k]
            if chosen in kinds or (not chosen and together):
                continue
            kinds.append(chosen)  # type: ignore[arg-type]
            for parts in itertools.product(*chosen):
                for decoder in self._decoders():
                    for rest in (self._rest, self._required, self._generous):
                        yield (*parts, decoder, rest)

    def batch(self, recipe: Recipe) -> Batch:
        """What a recipe makes, always the same."""
        self.generator.manual_seed(self.seed)
        self.made: Batch = {}
        for part in recipe:
            self.made.update(part())
        return {k: v for k, v in self.made.items() if k in self.names}

    # --------------------------------------------------------------------------------------------------------- text

    def _vocabulary(self) -> int:
        known = self.facts.number("vocab_size", "text_vocab_size", scope="text")
        return known or (CHARACTERS if self.main == "input_ids" else 0)

    def _ids(self, length: int) -> Tensor:
        """(rows, length) over the vocabulary without the tokens that have a meaning, each row closed by its end."""
        vocabulary = self._vocabulary()
        ids = torch.randint(min(3, vocabulary - 1), vocabulary, (self.rows, length), generator=self.generator)
        special = torch.tensor(sorted(self.facts.special()), dtype=torch.long)
        plain = torch.arange(min(3, vocabulary - 1), vocabulary)
        plain = plain[~torch.isin(plain, special)]
        return torch.where(torch.isin(ids, special), plain[ids % len(plain)], ids) if len(plain) else ids

    def _text(self) -> Batch:
        limit = self.facts.number("max_position_embeddings", "n_positions", "max_positions", scope="text")
        tokens = max(2, min(self.tokens, (limit or self.tokens + 2) - 2))
        ids = self._ids(tokens)
        mask = torch.ones_like(ids)
        mask[-1, tokens - 2 :] = 0
        end = self.facts.get("eos_token_id", scope="text")
        if type(end) is int and 0 <= end < self._vocabulary():
            # Some heads read the last token, and find it by its id.
            ids[:-1, -1] = ids[-1, tokens - 3] = end
        kinds = torch.zeros_like(ids)
        for kind, code in (("image", 1), ("video", 2), ("audio", 3)):
            if any(n in self.made for n in _CARRIERS[kind]):
                ids, mask, kinds = self._insert(kind, code, ids, mask, kinds)
        self.made_tokens = ids.shape[1]
        boxes = {"bbox": self._boxes(tokens)} if "bbox" in self.names else {}
        return {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": kinds, **boxes}

    def _insert(self, kind: str, code: int, *columns: Tensor) -> tuple[Tensor, ...]:
        """Placeholders for the features of an image or a recording, after the first token."""
        token = self._placeholder(kind)
        if token is None:
            return columns
        before = self.facts.number(f"{kind}_start_token_id", "vision_start_token_id", "boi_token_id", scope="text")
        opening = [before] if kind != "audio" and before is not None else []
        block = torch.tensor([*opening, *[token] * self.placeholders[kind]]).expand(self.rows, -1)
        blocks = (block, torch.ones_like(block), code * (block == token))
        return tuple(torch.cat([c[:, :1], b, c[:, 1:]], 1) for c, b in zip(columns, blocks, strict=True))

    def _placeholder(self, kind: str) -> int | None:
        return self.facts.number(f"{kind}_token_id", f"{kind}_token_index", f"{kind}_pad_token_id", scope="text")

    def recount(self, model: nn.Module, batch: Batch, failure: Exception) -> bool:
        """Learns from a failure how many placeholders are wanted; whether another try makes sense."""
        if "input_ids" not in batch:
            return False
        said = re.search(r"tokens:?\s*(\d+)\D+?(\d+)", str(failure))
        for kind in self.placeholders:
            if self._placeholder(kind) is None or not any(n in batch for n in _CARRIERS[kind]):
                continue
            wanted = _features(model, kind, batch) // self.rows
            if not wanted and said and kind in str(failure).lower():
                wanted = int(said.group(2)) // self.rows
            if wanted and wanted != self.placeholders[kind]:
                self.placeholders[kind] = wanted
                return True
        return False

    def _boxes(self, tokens: int) -> Tensor:
        """(rows, tokens, 4): corners of rectangles, in the units of the position tables or as shares of the page."""
        limit = self.facts.number("max_2d_position_embeddings")
        corners = torch.rand(self.rows, tokens, 2, 2, generator=self.generator).sort(-2).values.flatten(-2)
        if limit and not self.facts.get("bbox_scale"):
            return (corners * (min(limit, 1000) - 1)).long()
        return corners.to(self.dtype)

    def _decoders(self) -> list[Callable[[], Batch]]:
        """What a decoder is given, if there is one."""
        if "decoder_input_ids" in self.names and self._vocabulary():
            return [lambda: {"decoder_input_ids": self._ids(max(2, self.tokens - 3))}]
        if "decoder_input_values" in self.names:
            return [
                lambda s=s: {"decoder_input_values": self._normal(self.rows, self.tokens, self._size(s))}
                for s in ("mel", "hidden")
            ]
        return [dict]

    # ------------------------------------------------------------------------------------------------------- images

    def _images(self) -> list[Callable[[], Batch]]:
        """Ways to give images, as far as the signature has a place for them."""
        names = set(self.names)
        if names & {"image_grid_thw", "grid_thw", "image_grid_hw", "spatial_shapes", "pixel_position_ids", "image_position_ids",
                    "flattened_patches"} and names & {"pixel_values", "hidden_states", "flattened_patches"}:  # fmt: skip
            return [self._patches, lambda: self._patches(time=1)]
        if "aspect_ratio_ids" in names:
            return [self._tiles]
        name = next((n for n in ("pixel_values", "pixel_values_videos", "image", "images") if n in names), None)
        if name is None:
            return []
        moving = name == "pixel_values_videos" or self._on_top("num_frames", "frames_per_clip", "tubelet_size")
        lead = [(self._frames(),), ()] if moving else [(), (2,), (self._frames(),)]
        sizes = dict.fromkeys([self._image_size(), *((n, n) for n in (64, 224, 128))])
        if "image_sizes" in names and self.facts.get("image_grid_pinpoints"):
            lead = [(2,), (3,), (5,), ()]
        return [lambda s=s, n=n: self._pixels(name, n, s) for s in sizes for n in lead]

    def _on_top(self, *names: str) -> bool:
        config = self.facts.all[0][1] if self.facts.all else None
        return any(getattr(config, n, None) for n in names)

    def _frames(self) -> int:
        return self.facts.number("num_frames", "frames_per_clip", scope="image") or 2

    def _image_size(self) -> tuple[int, int]:
        """Height and width."""
        names = ("image_size", "img_size", "input_size", "crop_size", "pretrain_image_size")
        size = self.facts.get(*names, scope="image")
        patch = self.facts.number("patch_size", scope="image")
        if isinstance(size, Mapping):
            size = [size["height"], size["width"]] if "height" in size else next(iter(size.values()))
        size = size or (4 * patch if patch and patch > 4 else 64)
        return (
            (int(size[-2]), int(size[-1])) if isinstance(size, (list, tuple)) and len(size) > 1 else self._square(size)
        )

    @staticmethod
    def _square(size: Any) -> tuple[int, int]:
        side = int(size[0]) if isinstance(size, (list, tuple)) else int(size)
        return side, side

    def _pixels(self, name: str, lead: tuple[int, ...], size: tuple[int, int]) -> Batch:
        channels = self.facts.number(*SIZES["channels"], scope="image") or 3
        self.sides = size
        sizes = torch.tensor(size).expand(self.rows, 2)
        return {name: self._normal(self.rows, *lead, channels, *size), "image_sizes": sizes}

    def _patches(self, time: int | None = None) -> Batch:
        """Images cut into patches beforehand, with the sizes of their grids."""
        get = self.facts.number
        merge = get("spatial_merge_size", "merge_size", "downsample_factor", "pooling_kernel_size", scope="image") or 1
        patch = get("patch_size", scope="image") or 8
        time = time or get("temporal_patch_size", scope="image") or 1
        channels = get(*SIZES["channels"], scope="image") or 3
        height, width = (-(-n // merge) * merge for n in (4, 6))
        depth = get("patch_embed_hidden_size", scope="image") or channels * time * patch * patch
        pixels = self._normal(self.rows, height * width, depth)
        places = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        grids = torch.tensor([1, height, width]).expand(self.rows, 3)
        flat = pixels.flatten(0, 1)
        joined = set(self.names) & {"image_grid_thw", "grid_thw", "image_grid_hw"}
        return {
            "pixel_values": flat if joined else pixels,
            "hidden_states": flat,
            "image_grid_thw": grids,
            "grid_thw": grids,
            "image_grid_hw": grids[:, 1:],
            "spatial_shapes": grids[:, 1:],
            "merge_sizes": torch.full((self.rows,), merge),
            "pixel_attention_mask": torch.ones(self.rows, height * width, dtype=torch.long),
            "pixel_position_ids": places.expand(self.rows, -1, -1),
            "image_position_ids": places.expand(self.rows, -1, -1),
            "flattened_patches": torch.cat([1 + places.expand(self.rows, -1, -1).to(pixels), pixels], -1),
        }

    def _tiles(self) -> Batch:
        """Images cut into tiles."""
        tiles = self.facts.number("max_num_tiles", scope="image") or 2
        channels = self.facts.number(*SIZES["channels"], scope="image") or 3
        mask = torch.ones(self.rows, 1, tiles, dtype=torch.long)
        return {
            "pixel_values": self._normal(self.rows, 1, tiles, channels, *self._image_size()),
            "aspect_ratio_ids": torch.ones(self.rows, 1, dtype=torch.long),
            "aspect_ratio_mask": mask,
        }

    # ------------------------------------------------------------------------------------------------------- sounds

    def _sounds(self) -> list[Callable[[], Batch]]:
        """Ways to give sound: samples, or a spectrogram either way round."""
        name = next((n for n in ("input_features", "input_values", "audio_values") if n in self.names), None)
        if name is None:
            return []
        rows, mel = self.rows, self.facts.number(*SIZES["mel"], scope="audio") or 80
        source = self.facts.number("max_source_positions", scope="audio")
        frames = self.facts.number("max_length", scope="audio") if name == "input_values" else None
        frames = frames or self.facts.number("spec_size", scope="audio") or 4 * HORIZON
        spectrograms: list[tuple[int, ...]] = [(rows, mel, 2 * source)] if source and source <= 1500 else []
        spectrograms += [(rows, frames, mel), (rows, mel, frames), (rows, 1, frames, mel)]
        strides = self.facts.get("conv_stride", "upsampling_ratios", "downsampling_ratios", scope="audio") or [16, 20]
        samples = HORIZON * int(torch.tensor(strides).prod()) + 400 if isinstance(strides, (list, tuple)) else 8000
        channels = self.facts.number(*SIZES["sound_channels"], scope="audio") or 1
        raw: list[tuple[int, ...]] = [(rows, samples), (rows, channels, samples)]
        described = self.facts.get(*SIZES["mel"][:4], scope="audio") and not self.facts.get(
            "conv_stride", scope="audio"
        )
        shapes = [*spectrograms, *raw] if name == "input_features" or described else [*raw, *spectrograms]
        return [lambda s=s: self._sound(name, s) for s in shapes]

    def _sound(self, name: str, shape: tuple[int, ...]) -> Batch:
        self.frames = shape[1] if len(shape) == 3 and shape[1] > shape[2] else shape[-1]
        return {name: self._normal(*shape)}

    # ----------------------------------------------------------------------------------------------------- the rest

    def _rest(self) -> Batch:
        return self._table([*self.required, *(n for n in OPTIONAL if n in self.names), *self._series()])

    def _required(self) -> Batch:
        return self._table([*self.required, *(n for n in self.names if n.endswith("_mask"))])

    def _generous(self) -> Batch:
        return self._table([*self.required, *(n for n in self.names if n in TABLE and n not in INSTEAD)])

    def _series(self) -> list[str]:
        return ["future_values", "future_time_features"] if "past_time_features" in self.required else []

    def _table(self, names: list[str]) -> Batch:
        """Inputs that need no more than a shape; those that nobody knows are remembered."""
        extra: Batch = {}
        for name in names:
            if name in self.made or name in extra:
                continue
            if name == "past_values":
                extra[name] = self._history()
            elif name in TABLE:
                extra[name] = self._fill(*TABLE[name])
            elif re.search(r"(embeds|states|features|embeddings|queries|encoding)$", name):
                extra[name] = self._normal(self.rows, self.tokens, self._size("hidden"))
            elif name in self.required and name not in self.unknown:
                self.unknown.append(name)
        return extra

    def _fill(self, how: str, shape: str) -> Tensor:
        sides = [int(s) if s.isdigit() else self._size(s) for s in shape.split()]
        if how == "normal":
            return self._normal(*sides)
        if how == "uniform":
            return torch.rand(sides, generator=self.generator).to(self.dtype)
        if how == "count":
            return torch.arange(sides[-1]).expand(sides).clone()
        return torch.full(sides, int(how == "ones"), dtype=torch.long)

    def _size(self, name: str) -> int:
        own = {
            "rows": self.rows,
            "tokens": getattr(self, "made_tokens", self.tokens),
            "items": 7,
            "frames": getattr(self, "frames", HORIZON),
            "height": getattr(self, "sides", (64, 64))[0],
            "width": getattr(self, "sides", (64, 64))[1],
            "history": self._steps(),
        }
        return own[name] if name in own else self.facts.number(*SIZES[name]) or (0 if "features" in name else 1)

    def _steps(self) -> int:
        lags = self.facts.get("lags_sequence") or [0]
        return (self.facts.number("context_length", "max_sequence_length") or HORIZON) + max(lags)

    def _history(self) -> Tensor:
        channels = self.facts.number("num_input_channels") or self.facts.number("input_size") or 1
        shape = (self.rows, self._steps(), channels)
        return self._normal(*(shape if channels > 1 or self.facts.number("num_input_channels") else shape[:2])).abs()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)


_CARRIERS = {
    "image": ("pixel_values",),
    "video": ("pixel_values_videos",),
    "audio": ("input_features", "input_values", "audio_values"),
}
"""The inputs that bring what placeholders in the text stand for."""


def _features(model: nn.Module, kind: str, batch: Batch) -> int:
    """How many feature vectors the model makes of its images, videos or sounds; 0 where it does not say."""
    extract = getattr(model, f"get_{kind}_features", None)
    if extract is None:
        return 0
    names = inspect.signature(extract).parameters
    carriers = _CARRIERS[kind]
    try:
        found = extract(**{k: v for k, v in batch.items() if k in names and k != "attention_mask"})
    except Exception:  # it may want what the forward pass has prepared
        return 0
    if isinstance(found, Mapping):
        pooled = found.get("pooler_output")
        found = found.get("last_hidden_state") if pooled is None else pooled
    vectors = output_tensors(found)
    return sum(t.numel() // t.shape[-1] for t in vectors) if carriers else 0


def call(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Runs a model on a batch as the score does: private keys left out, no cache kept."""
    inputs = {k: v for k, v in batch.items() if not k.startswith("_")}
    config = getattr(model, "config", None)
    # An adapter's wrapper hands everything on to the model inside.
    base = getattr(model, "get_base_model", lambda: model)()
    if getattr(config, "use_cache", False) and "use_cache" in inspect.signature(base.forward).parameters:
        inputs.setdefault("use_cache", False)
    return model(**inputs)


_INSIDE = ("hidden_states", "encoder_last_hidden_state", "encoder_hidden_states", "decoder_hidden_states")
"""Outputs of a model with a head that only report what went on inside it: a symmetry may move them."""


def output_tensors(outputs: Any) -> list[Tensor]:
    """All floating-point tensors of a model's output, in order; next to logits no hidden states."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, Mapping):
        left_out = _INSIDE if "logits" in outputs else ()
        return [t for k, v in outputs.items() if k not in left_out for t in output_tensors(v)]
    if isinstance(outputs, (list, tuple)):
        return [t for v in outputs for t in output_tensors(v)]
    return []
