"""What a search did not see, or could not try, in words: modules of which nothing is claimed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hf_geosharp.symmetry.attention.search import MODEL
from hf_geosharp.symmetry.attention.sites import Attention
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.tracing.events import Trace
from hf_geosharp.symmetry.trials import probe
from hf_geosharp.symmetry.trials.probe import Trials

HIDDEN = "what it mixes has no derivatives (under torch.no_grad, inference_mode, or in an autograd.Function?)"
"""Of a module of whose attention no more than its weights is seen."""


def overlooked(traced: Trace, sites: Sequence[Attention], pairs: Sequence[Pair]) -> Iterator[str]:
    """Modules that multiply what is computed, of which nothing is claimed and which are no site."""
    within = {s.softmax.scope[-1] for s in sites if s.softmax.scope}
    claimed = {p.module for p in pairs if p.kind in ("qk", "vo", "qk_norm")}

    def told(module: str) -> bool:
        return any(f"{m}.".startswith(f"{module}.") for m in within) or any(
            f"{module}.".startswith(f"{m}.") or m.startswith(f"{module}.") for m in claimed
        )

    for module in traced.scripted:
        yield f"{module or MODEL}: it is compiled to TorchScript, which cannot be looked into"
    for module in traced.hidden:
        if not told(module):
            yield f"{module}: {HIDDEN}"
    for module in traced.products:
        if module not in traced.hidden and not told(module):
            yield f"{module}: multiplies what its linear maps write without a softmax"


def not_tried(trials: Trials) -> Iterator[str]:
    """Modules that are too large for a trial."""
    for module, size in trials.too_large.items():
        yield (
            f"{module or MODEL}: its {size:,} parameters are more than are copied for a trial "
            f"({probe.LARGEST:,}); what would have to be tried on it as a whole is not claimed"
        )


def inactive(config: Any, prefix: str = "config") -> Iterator[str]:
    """What a configuration switches on that inputs need not reach, as text: it would end the symmetries."""
    for name, value in sorted(vars(config).items() if hasattr(config, "__dict__") else ()):
        if name in _CLIPS and isinstance(value, (int, float)) and value:
            yield f"{prefix}.{name} = {value:g}: {_CLIPS[name]}"
        elif hasattr(value, "to_dict") and not isinstance(value, type):
            yield from inactive(value, f"{prefix}.{name}")


_CLIPS = {
    "clip_qkv": "queries, keys and values are cut off there; the symmetries hold only while nothing reaches it",
}
"""Settings of configurations under which a symmetry ends at large values."""
