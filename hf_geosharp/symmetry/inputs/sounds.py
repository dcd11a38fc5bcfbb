"""Sound: samples, or a spectrogram either way round."""

from __future__ import annotations

import math
import re

from hf_geosharp.symmetry.inputs.draft import SIZES, USUAL, Batch, Draft, Part

NAMES = ("input_features", "input_values", "audio_values")

LONGEST = 1500
"""Longest table of positions that says how many frames a spectrogram must have."""


def sounds(draft: Draft) -> list[Part]:
    """Ways to give sound, as far as the signature has a place for it; shapes are those of one row."""
    name = next((n for n in NAMES if n in draft.names), None)
    if name is None:
        return []
    strided = draft.facts.get(("conv_stride", "upsampling_ratios", "downsampling_ratios"), "audio")
    spectrograms, samples = _spectrograms(draft, name), _samples(draft, strided)
    described = draft.facts.get(SIZES["mel"][:4], "audio") and not draft.facts.get("conv_stride", "audio")
    shapes = [*spectrograms, *samples] if name == "input_features" or described else [*samples, *spectrograms]
    if {"input_features", "input_values"} <= set(draft.required):
        # The same sound twice: as many frames of samples as the spectrogram has.
        stride = _stride(strided)
        return [
            _sound({"input_features": shape, "input_values": (1, stride * length)})
            for shape in _spectrograms(draft, "input_features")
            for length in dict.fromkeys(shape[-2:])
        ]
    return [_sound({name: shape}) for shape in shapes]


def _spectrograms(draft: Draft, name: str) -> list[tuple[int, ...]]:
    mel = _mel(draft)
    positions = draft.facts.number("max_source_positions", "audio")
    frames = draft.facts.number("max_length", "audio") if name == "input_values" else None
    frames = frames or draft.facts.number("spec_size", "audio") or 4 * USUAL["frames"]
    # Positions are counted after a convolution that halves them.
    fixed = [(mel, 2 * positions)] if positions and positions <= LONGEST else []
    return [*fixed, (frames, mel), (mel, frames), (1, frames, mel)]


def _mel(draft: Draft) -> int:
    return draft.facts.number(SIZES["mel"], "audio") or 80


_MISFITS = (
    r"shapes cannot be multiplied \(\d+x(?P<got>\d+) and (?P<wanted>\d+)x\d+\)",
    r"to have (?P<wanted>\d+) channels, but got (?P<got>\d+) channels",
)


def refit(draft: Draft, failure: Exception) -> bool:
    """Learns after a failure how many numbers a frame has, where frames are stacked say; whether that is another."""
    for said in filter(None, (re.search(text, str(failure)) for text in _MISFITS)):
        got, wanted = int(said["got"]), int(said["wanted"])
        if got == _mel(draft) and got not in draft.fitted:
            draft.fitted[got] = wanted
            return True
    return False


def _samples(draft: Draft, strides: object) -> list[tuple[int, ...]]:
    """Samples for some dozens of frames, after strided convolutions."""
    stride = _stride(strides)
    channels = draft.facts.number(SIZES["sound_channels"], "audio") or 1
    lengths = (USUAL["frames"] * stride + 400, USUAL["frames"] * stride)  # windows that overlap, or that do not
    return [shape for n in lengths for shape in ((n,), (channels, n))]


def _stride(strides: object) -> int:
    return math.prod(strides) if isinstance(strides, (list, tuple)) else 320


def _sound(shapes: dict[str, tuple[int, ...]]) -> Part:
    def make(draft: Draft) -> Batch:
        draft.sides["frames"] = max(max(shape) for shape in shapes.values())
        fitted = {name: [draft.fitted.get(n, n) for n in shape] for name, shape in shapes.items()}
        return {name: draft.normal(draft.rows, *shape) for name, shape in fitted.items()}

    return make
