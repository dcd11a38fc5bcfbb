"""Synthetic inputs for a model whose user gave none: enough to run it, varied enough to tell directions apart.

What a model may be given stands in its signature, how large it is in its configuration (nested ones too), under one of
a few usual names. Where these leave a choice (a spectrogram either way round), candidates are tried in turn and the
first is taken on which the model runs; the most usual comes first, so that a large model runs once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hf_geosharp.errors import InputsError
from hf_geosharp.evaluating import evaluating
from hf_geosharp.randomness import the_same_drawn
from hf_geosharp.symmetry.inputs.calls import call, output_tensors, without_adapter
from hf_geosharp.symmetry.inputs.draft import Batch, Draft, Part
from hf_geosharp.symmetry.inputs.images import images
from hf_geosharp.symmetry.inputs.rest import everything_known, only_required, usual
from hf_geosharp.symmetry.inputs.sounds import refit, sounds
from hf_geosharp.symmetry.inputs.text import decoders, recount, texts

__all__ = ["TOKENS", "Recipe", "call", "output_tensors", "recipe", "synthetic"]

TOKENS = 13
"""Tokens of a synthetic sequence, next to those that stand for an image or a recording."""

TRIES = 30
"""Candidates of the same kinds of input at most; only models of unusual inputs see more than two."""

RECOUNTS = 3
"""Times that the number of placeholders may be corrected."""


def synthetic(model: nn.Module, *, rows: int = 2, tokens: int = TOKENS, seed: int = 0) -> Batch:
    """A batch of random inputs made from the model's signature and configuration, on which the model has run.

    Text models get ``input_ids`` (rows, tokens) over the whole vocabulary with a padded tail in the last row,
    image models ``pixel_values`` (rows, channels, height, width), encoder-decoders ``decoder_input_ids`` too; models
    that read several kinds get all of them, or those they run with. The model comes back as it was.

    Raises:
        InputsError: the model wants an input that cannot be made up; pass an example batch instead.
    """
    return recipe(model, rows=rows, tokens=tokens, seed=seed).first


LARGE = 1 << 28
"""Parameters of a model on which one pass takes long."""


@dataclass(frozen=True)
class Recipe:
    """How inputs of a model are made, from one batch on which it has run: others need no run to be tried on."""

    first: Batch
    _draft: Draft
    _parts: tuple[Part, ...]

    def batch(self, *, rows: int = 2, tokens: int = TOKENS, seed: int = 0) -> Batch:
        """Another batch like the first."""
        self._draft.rows, self._draft.tokens, self._draft.seed = rows, tokens, seed
        device = next(iter(self.first.values())).device
        return {k: v.to(device) for k, v in self._draft.make(self._parts).items()}

    def batch_for(self, model: nn.Module, *, rows: int = 2, tokens: int = TOKENS, seed: int = 0) -> Batch:
        """The same, and a model that is not large has run on it: made in another way if it does not.

        Raises:
            InputsError: no way does.
        """
        batch = self.batch(rows=rows, tokens=tokens, seed=seed)
        if sum(p.numel() for p in model.parameters()) > LARGE:
            return batch
        inner = without_adapter(model)
        with evaluating(inner), torch.no_grad(), the_same_drawn():
            failed = _failure(inner, batch) is not None
        return synthetic(model, rows=rows, tokens=tokens, seed=seed) if failed else batch


def recipe(model: nn.Module, *, rows: int = 2, tokens: int = TOKENS, seed: int = 0) -> Recipe:
    """The way to make inputs of a model that :func:`synthetic` goes, found by running it.

    Raises:
        InputsError: the model wants an input that cannot be made up; pass an example batch instead.
    """
    # An adapter's wrapper takes anything and hands it on to the model inside.
    model = without_adapter(model)
    draft = Draft(model, rows, tokens, seed)
    search = _Search(model, draft)
    with evaluating(model), torch.no_grad(), the_same_drawn():
        found = next(filter(None, map(search.among, _candidates(draft))), None) or search.spare
    if found is not None:
        return found
    wanted = ", ".join(map(repr, draft.unknown)) or repr(draft.main)
    raise InputsError(
        f"cannot make up the input {wanted} of {type(model).__name__}{search.reason()}; pass an example batch"
    )


class _Search:
    """The search for a batch that a model runs on.

    Attributes:
        spare: the first on which it runs to no avail.
    """

    def __init__(self, model: nn.Module, draft: Draft) -> None:
        self.spare: Recipe | None = None
        self._model, self._draft = model, draft
        self._device = next(model.parameters()).device
        self._tried: set[str] = set()
        self._first: tuple[Part, ...] | None = None
        self._failure: Exception | None = None

    def among(self, candidates: Iterable[tuple[Part, ...]]) -> Recipe | None:
        """The first of these that does, if there is one among the first :data:`TRIES`."""
        last = len(self._tried) + TRIES
        for parts in candidates:
            for _ in range(RECOUNTS):
                batch = {k: v.to(self._device) for k, v in self._draft.make(parts).items()}
                shapes = str({k: v.shape for k, v in batch.items()})
                if shapes in self._tried:
                    break
                if len(self._tried) == last:
                    return None
                self._tried.add(shapes)
                failure = _failure(self._model, batch)
                if failure is None:
                    return Recipe(batch, self._draft, parts)
                if isinstance(failure, _NotANumberError):
                    self.spare = self.spare or Recipe(batch, self._draft, parts)
                    break
                # Of the most likely candidate, as far as its placeholders could be counted.
                self._first = self._first or parts
                if parts is self._first:
                    self._failure = failure
                if not recount(self._draft, self._model, batch, failure) and not refit(self._draft, failure):
                    break
        return None

    def reason(self) -> str:
        """Why none does, in brackets."""
        why = self._failure
        return "" if why is None else f" ({type(why).__name__}: {' '.join(str(why).split())[:300]})"


def _candidates(draft: Draft) -> Iterator[Iterable[tuple[Part, ...]]]:
    """Ways to make a batch, by the kinds of input, the most likely first: all kinds together, then fewer."""
    text, image, sound = texts(draft), images(draft), sounds(draft)
    seen: list[list[list[Part]]] = []
    # Text comes last: it holds places for what the others bring.
    for together in ((image, sound, text), (image, text), (sound, text), (text,), (image,), (sound,)):
        kinds = [k for k in together if k]
        if kinds and kinds not in seen:
            seen.append(kinds)
            yield itertools.product(*kinds, decoders(draft), _REST)
    yield itertools.product(_REST)


_REST = (usual, only_required, everything_known)


class _NotANumberError(ValueError):
    """The model runs, and most of what it gives is NaN: nothing could be seen through it."""


def _failure(model: nn.Module, batch: Batch) -> Exception | None:
    """Why the model does not run on a batch, or to no avail; None if it does."""
    try:
        outputs = output_tensors(call(model, batch))
        if not outputs:
            return ValueError("the model gives no tensors")
        missing = sum(int(t.isnan().sum()) for t in outputs)
        if 2 * missing > sum(t.numel() for t in outputs):
            return _NotANumberError("the model gives NaN")
        return None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return error
