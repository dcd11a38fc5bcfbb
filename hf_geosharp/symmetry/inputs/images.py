"""Images: whole, as frames, as tiles, or cut into patches beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from hf_geosharp.symmetry.inputs.draft import SIZES, Batch, Draft, Part

GRIDS = {"image_grid_thw", "grid_thw", "image_grid_hw"}
"""Inputs that say how the patches of all images, in one long list, are laid out."""

PLACES = {"spatial_shapes", "pixel_position_ids", "image_position_ids", "flattened_patches"}
"""Inputs that say the same of the patches of one image each."""

SIDES = (64, 224, 128)
"""Sizes of images that are tried where the configuration's does not do."""


def images(draft: Draft) -> list[Part]:
    """Ways to give images, as far as the signature has a place for them."""
    names = set(draft.names)
    if names & (GRIDS | PLACES) and names & {"pixel_values", "hidden_states", "flattened_patches"}:
        several = [partial(_patches, time=t) for t in (None, 1, 2)]
        return [*several, *(partial(_patches, form=form) for form in _FORMS if form != "one list")]
    if "aspect_ratio_ids" in names:
        return [_tiles]
    name = next((n for n in ("pixel_values", "pixel_values_videos", "image", "images") if n in names), None)
    if name is None:
        return []
    frames = (draft.size("frames", "image"),)
    leads: list[tuple[int, ...]] = [(), (2,), frames]
    if name == "pixel_values_videos" or draft.facts.has_itself((*SIZES["frames"], "tubelet_size")):
        leads = [frames, ()]
    # Models that cut images into several themselves want to know how large these were; others only may.
    cut = "image_sizes" in names and draft.facts.get("image_grid_pinpoints")
    if cut:
        leads = [(2,), (3,), (5,), ()]
    told = [True] if cut else [False, True] if "image_sizes" in names else [False]
    sizes = dict.fromkeys([_size(draft), *((n, n) for n in SIDES)])
    return [_whole(name, lead, size, tell) for size in sizes for tell in told for lead in leads]


def _size(draft: Draft, scope: str = "image") -> tuple[int, int]:
    """Height and width."""
    names = ("image_size", "img_size", "input_size", "crop_size", "pretrain_image_size")
    size = draft.facts.get(names, scope)
    if isinstance(size, Mapping):
        size = [size["height"], size["width"]] if "height" in size else list(size.values())[:1]
    if not size:
        patch = draft.facts.number("patch_size", "image") or 0
        size = 4 * patch if patch > 4 else SIDES[0]
    sides = [int(s) for s in size] if isinstance(size, (list, tuple)) else [int(size)]
    return sides[-2:][0], sides[-1]


def _whole(name: str, lead: tuple[int, ...], size: tuple[int, int], tell: bool) -> Part:
    def make(draft: Draft) -> Batch:
        channels = draft.facts.number(SIZES["channels"], "image") or 3
        draft.sides["height"], draft.sides["width"] = size
        draft.sides["images"] = math.prod(lead)
        sizes = {"image_sizes": torch.tensor(size).repeat(draft.rows, 1)} if tell else {}
        more = [n for n in draft.names if n.endswith(f"_{name}")]
        own = {n: _size(draft, n.removesuffix(f"_{name}")) for n in more}
        # Where the configuration knows one size only, they are of one size.
        larger = {
            n: draft.normal(draft.rows, *lead, channels, *(size if s == _size(draft) else s)) for n, s in own.items()
        }
        return {name: draft.normal(draft.rows, *lead, channels, *size), **larger, **sizes}

    return make


def _tiles(draft: Draft) -> Batch:
    tiles = draft.facts.number("max_num_tiles", "image") or 2
    channels = draft.facts.number(SIZES["channels"], "image") or 3
    return {
        "pixel_values": draft.normal(draft.rows, 1, tiles, channels, *_size(draft)),
        "aspect_ratio_ids": torch.ones(draft.rows, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(draft.rows, 1, tiles, dtype=torch.long),
    }


_FORMS: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "one list": lambda pixels, _: pixels.flatten(0, 1),
    "apart": lambda pixels, _: pixels,
    "squares": lambda pixels, square: pixels.flatten(0, 1).unflatten(1, square),
    "squares in a batch": lambda pixels, square: pixels.flatten(0, 1).unflatten(1, square)[None],
}
"""How (rows, patches, numbers) are given where grids part them: all patches in one list, as they are, or each patch as
(channels, height, width)."""


def _patches(draft: Draft, time: int | None = None, form: str = "one list") -> Batch:
    """Patches of ``time`` frames each, on grids of two sides longer than one, which merging divides.

    Those of all images in one list where grids say how to part them, unless another form is asked for.
    """
    get, rows = draft.facts.number, draft.rows
    merge = get(("spatial_merge_size", "merge_size", "downsample_factor", "pooling_kernel_size"), "image") or 1
    patch = get("patch_size", "image") or 8
    time = time or get("temporal_patch_size", "image") or 1
    channels = get(SIZES["channels"], "image") or 3
    height, width = (-(-n // merge) * merge for n in (4, 6))
    depth = get("patch_embed_hidden_size", "image") or channels * time * patch * patch
    pixels = draft.normal(rows, height * width, depth)
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).repeat(rows, 1, 1)
    grids = torch.tensor([1, height, width]).repeat(rows, 1)
    in_one = pixels.flatten(0, 1)
    return {
        "pixel_values": _FORMS[form](pixels, (channels, patch, -1)) if GRIDS & set(draft.names) else pixels,
        "hidden_states": in_one,
        "image_grid_thw": grids,
        "grid_thw": grids,
        "image_grid_hw": grids[:, 1:],
        "spatial_shapes": grids[:, 1:],
        "merge_sizes": torch.full((rows,), merge),
        "image_merge_sizes": torch.full((rows,), merge),
        "pixel_attention_mask": torch.ones(rows, height * width, dtype=torch.long),
        "pixel_position_ids": places,
        "image_position_ids": places,
        # Row and column come first, counted from one.
        "flattened_patches": torch.cat([1 + places.to(pixels), pixels], -1),
    }
