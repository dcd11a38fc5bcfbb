"""Sound: samples, or a spectrogram either way round."""

from __future__ import annotations

import math

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
    return [_sound(name, shape) for shape in shapes]


def _spectrograms(draft: Draft, name: str) -> list[tuple[int, ...]]:
    mel = draft.facts.number(SIZES["mel"], "audio") or 80
    positions = draft.facts.number("max_source_positions", "audio")
    frames = draft.facts.number("max_length", "audio") if name == "input_values" else None
    frames = frames or draft.facts.number("spec_size", "audio") or 4 * USUAL["frames"]
    # Positions are counted after a convolution that halves them.
    fixed = [(mel, 2 * positions)] if positions and positions <= LONGEST else []
    return [*fixed, (frames, mel), (mel, frames), (1, frames, mel)]


def _samples(draft: Draft, strides: object) -> list[tuple[int, ...]]:
    """Samples for some dozens of frames, after strided convolutions."""
    stride = math.prod(strides) if isinstance(strides, (list, tuple)) else 320
    samples = USUAL["frames"] * stride + 400
    channels = draft.facts.number(SIZES["sound_channels"], "audio") or 1
    return [(samples,), (channels, samples)]


def _sound(name: str, shape: tuple[int, ...]) -> Part:
    def make(draft: Draft) -> Batch:
        draft.sides["frames"] = max(shape)
        return {name: draft.normal(draft.rows, *shape)}

    return make
