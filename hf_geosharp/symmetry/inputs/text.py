"""Tokens, with places for what is no text; and what decoders read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.inputs.calls import output_tensors
from hf_geosharp.symmetry.inputs.draft import Batch, Draft, Part

CARRIERS = {
    "image": ("pixel_values",),
    "video": ("pixel_values_videos",),
    "audio": ("input_features", "input_values", "audio_values"),
}
"""The inputs that bring what placeholders in the text stand for."""

KINDS = {"image": 1, "video": 2, "audio": 3}
"""The numbers of their placeholders in ``mm_token_type_ids``."""

MARKS = "image_embeds_position_mask"
"""The input that says which tokens an image takes the place of."""

CHARACTERS = 1000
"""Vocabulary of a model of text whose configuration names none: it reads characters."""


CODES = ("num_codebooks", "num_channels")
"""Numbers of codes that stand for one moment of sound."""


def texts(draft: Draft) -> list[Part]:
    """Ways to give text, if the model reads any: tokens, or several codes in the place of each."""
    return [_text, *_codes(draft, "input_ids")] if "input_ids" in draft.names and _vocabulary(draft) else []


def decoders(draft: Draft) -> list[Part]:
    """What a decoder is given: tokens or codes, or frames of speech as wide as a spectrogram or as the model."""
    name = "decoder_input_ids"
    if name in draft.names and _vocabulary(draft):
        return [lambda d: {name: _ids(d, d.rows, max(2, d.tokens - 3))}, *_codes(draft, name)]
    if "decoder_input_values" in draft.names:
        return [_speech("mel"), _speech("hidden")]
    return [lambda d: {}]


def _codes(draft: Draft, name: str) -> list[Part]:
    """Codes of sound: each kind in a row of its own, or those of one moment side by side, maybe with a text token."""
    codes = draft.facts.number(CODES, "text") or 1
    if codes == 1 or "pixel_values" in draft.names:
        return []
    return [
        lambda d: {name: _ids(d, codes * d.rows, d.tokens)},
        lambda d: {name: _ids(d, d.rows, d.tokens, codes)},
        lambda d: {name: _ids(d, d.rows, d.tokens, codes + 1)},
    ]


def _speech(width: str) -> Part:
    return lambda d: {"decoder_input_values": d.normal(d.rows, d.tokens, d.size(width, "audio"))}


def _vocabulary(draft: Draft) -> int:
    known = draft.facts.number(("vocab_size", "text_vocab_size"), "text")
    return known or (CHARACTERS if draft.main == "input_ids" else 0)


def _ids(draft: Draft, *sides: int) -> Tensor:
    """Such a tensor over the vocabulary, without the tokens that mean something to the model."""
    vocabulary = _vocabulary(draft)
    lowest = min(3, vocabulary - 1)
    ids = torch.randint(lowest, vocabulary, sides, generator=draft.generator)
    special = torch.tensor(draft.facts.special_tokens(), dtype=torch.long)
    plain = torch.arange(lowest, vocabulary)
    plain = plain[~torch.isin(plain, special)]
    return torch.where(torch.isin(ids, special), plain[ids % len(plain)], ids) if len(plain) else ids


def _text(draft: Draft) -> Batch:
    limit = draft.facts.number(("max_position_embeddings", "n_positions", "max_positions"), "text")
    # Some configurations say by a number below zero that there is no limit.
    tokens = max(2, min(draft.tokens, limit - 2)) if limit and limit > 0 else draft.tokens
    ids = _ids(draft, draft.rows, tokens)
    mask = torch.ones_like(ids)
    mask[-1, tokens - 2 :] = 0
    end = draft.facts.get("eos_token_id", "text")
    if type(end) is int and 0 <= end < _vocabulary(draft):
        # Some heads read the last token, and find it by its id.
        ids[:-1, -1] = ids[-1, tokens - 3] = end
    kinds = torch.zeros_like(ids)
    for kind in KINDS:
        if any(n in draft.made for n in CARRIERS[kind]):
            ids, mask, kinds = _insert(draft, kind, ids, mask, kinds)
    marked = torch.zeros_like(ids)
    if MARKS in draft.names and draft.made.keys() & {"pixel_values", "flattened_patches"}:
        # No token stands for the image: a mask says which are replaced.
        block = ids[:, :1].repeat(1, draft.facts.number("latent_query_num") or 1)
        blocks = (block, torch.ones_like(block), torch.zeros_like(block), torch.ones_like(block))
        ids, mask, kinds, marked = _inserted(blocks, ids, mask, kinds, marked)
    draft.sides["tokens"] = ids.shape[1]
    boxes = _boxes(draft, ids.shape[1])
    return {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": kinds, "bbox": boxes, MARKS: marked}


def _insert(draft: Draft, kind: str, *columns: Tensor) -> tuple[Tensor, ...]:
    """Placeholders for the features of an image or a recording, after the first token."""
    token = _placeholder(draft, kind)
    if token is None:
        return columns
    names = (f"{kind}_start_token_id", "vision_start_token_id", "boi_token_id")
    before = draft.facts.number(names, "text") if kind != "audio" else None
    opening = [] if before is None else [before]
    block = torch.tensor([*opening, *[token] * draft.placeholders[kind]]).expand(draft.rows, -1)
    return _inserted((block, torch.ones_like(block), KINDS[kind] * (block == token)), *columns)


def _inserted(blocks: Sequence[Tensor], *columns: Tensor) -> tuple[Tensor, ...]:
    """The columns with these after the first token of each row."""
    return tuple(torch.cat([c[:, :1], b, c[:, 1:]], 1) for c, b in zip(columns, blocks, strict=True))


def _placeholder(draft: Draft, kind: str) -> int | None:
    return draft.facts.number((f"{kind}_token_id", f"{kind}_token_index", f"{kind}_pad_token_id"), "text")


def _boxes(draft: Draft, tokens: int) -> Tensor:
    """(rows, tokens, 4): corners of rectangles, in the units of the position tables or as shares of the page."""
    limit = draft.facts.number("max_2d_position_embeddings")
    corners = torch.rand(draft.rows, tokens, 2, 2, generator=draft.generator).sort(-2).values.flatten(-2)
    if limit and not draft.facts.get("bbox_scale"):
        return (corners * (min(limit, 1000) - 1)).long()
    return corners.to(draft.dtype)


def recount(draft: Draft, model: nn.Module, batch: Batch, failure: Exception) -> bool:
    """Learns after a failure how many placeholders the model wants; whether that is another number than before."""
    if "input_ids" not in batch:
        return False
    said = re.search(r"tokens:?\s*\d+\D+?(\d+)", str(failure))
    for kind in KINDS:
        if _placeholder(draft, kind) is None or not any(n in batch for n in CARRIERS[kind]):
            continue
        wanted = _features(model, kind, batch)
        if not wanted and said and kind in str(failure).lower():
            wanted = int(said.group(1))
        if wanted // draft.rows not in (0, draft.placeholders[kind]):
            draft.placeholders[kind] = wanted // draft.rows
            return True
    return False


def _features(model: nn.Module, kind: str, batch: Batch) -> int:
    """How many feature vectors the model makes of its images, videos or recordings; 0 where it does not say."""
    extract = getattr(model, f"get_{kind}_features", None)
    if extract is None:
        return 0
    names = inspect.signature(extract).parameters
    try:
        found = extract(**{k: v for k, v in batch.items() if k in names and k != "attention_mask"})
    except Exception:  # it may want what the forward pass prepares
        return 0
    if isinstance(found, Mapping):
        pooled = found.get("pooler_output")
        found = found.get("last_hidden_state") if pooled is None else pooled
    return sum(t.numel() // t.shape[-1] for t in output_tensors(found))
