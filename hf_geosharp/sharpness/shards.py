"""A model that ``fully_shard`` (FSDP2) has spread over processes: which rows lie here, and the whole where needed.

The parameters of such a model are DTensors; each process holds some rows of each, possibly none. FSDP2 gathers a unit's
parameters while it runs and forgets them afterwards, so what is written into the rows counts from the next pass on,
provided that nothing is left gathered (:meth:`Shards.settle`). Gradients come out sharded alike, as the mean over the
processes.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.errors import UnsupportedModelError, UsageError
from hf_geosharp.parallel import World
from hf_geosharp.symmetry.parameters import Leaf

_STORED = ("sharded_param", "_sharded_param_data")
"""What FSDP keeps of the rows of a parameter."""

_REPLACED_BY = ("_setattr_on_modules", "reset_sharded_param")
"""How it puts another parameter in place of one."""

_PRECISION = ("_mp_policy", "mp_policy", "orig_dtype", "param_dtype", "reduce_dtype", "_orig_dtype", "_reduce_dtype")
"""Where FSDP2 keeps the precision it computes in: attributes of its units, their groups, and their parameters."""

_HOOKS = "torch.distributed.fsdp", "torch.distributed._composable"


@dataclass(frozen=True)
class Shard(Leaf):
    """The rows ``start`` to ``stop`` of a parameter of the shape ``whole``; ``tensor`` shares their storage."""

    whole: torch.Size
    start: int
    stop: int

    @property
    def shape(self) -> torch.Size:
        """Of the parameter."""
        return self.whole

    def here(self, whole: Tensor) -> Tensor:
        """The rows that lie here."""
        return whole[self.start : self.stop]

    def rows_here(self, rows: Tensor) -> Tensor:
        """Those that lie here, counted from the first one here."""
        return rows[(rows >= self.start) & (rows < self.stop)] - self.start

    def gradient(self) -> Tensor:
        """A copy of the gradient's rows: its own memory is that of a whole unit's gradients."""
        gradient: Any = self.members[0][0].grad
        return torch.zeros_like(self.tensor) if gradient is None else rows_of(gradient).clone()


def rows_of(tensor: Any) -> Tensor:
    """What of a tensor lies here, sharing storage: all of it, unless it is sharded."""
    local: Tensor = tensor.detach().to_local().detach() if is_sharded(tensor) else tensor.detach()
    return local


def whole_of(tensor: Any) -> Tensor:
    """A tensor in full; where it is sharded, on every rank, and all have to call."""
    with torch.no_grad():
        full: Tensor = tensor.detach().full_tensor() if is_sharded(tensor) else tensor.detach()
    return full


def is_sharded(p: Tensor) -> bool:
    """Whether a tensor is one of torch's distributed tensors."""
    return hasattr(p, "to_local") and hasattr(p, "placements")


def written_class(model: nn.Module) -> type[nn.Module]:
    """The class that a model was written as: ``fully_shard`` puts one of its own in front."""
    kind = type(model)
    names = [c.__name__ for c in kind.__mro__]
    return kind.__mro__[2] if names[1:2] == ["FSDPModule"] else kind


class Shards:
    """The sharded parameters of one model, by name, and the units that gather them."""

    def __init__(self, model: nn.Module) -> None:
        """Use :meth:`of`."""
        self.model = model
        self.units: list[Any] = [m for m in model.modules() if "FSDPModule" in (c.__name__ for c in type(m).__mro__)]
        self._find()
        self.size, self.rank, self.copies = 1, 0, 1
        """How many processes share the rows, which of them this is, and how many such groups hold all rows each."""

    def _find(self) -> None:
        self.settle()
        self.parameters: dict[str, Any] = {n: p for n, p in self.model.named_parameters() if p.is_floating_point()}

    @classmethod
    def of(cls, model: nn.Module) -> Shards | None:
        """The shards of a model; None if its parameters are whole.

        Raises:
            UnsupportedModelError: sharded in a way in which no score is taken.
        """
        found = cls(model)
        if not any(map(is_sharded, found.parameters.values())):
            return None
        found._check()
        return found

    def _check(self) -> None:
        for name, p in self.parameters.items():
            if not is_sharded(p):
                raise UnsupportedModelError(
                    f"{name} is not sharded, but other parameters are: apply fully_shard to the whole model too"
                )
            mesh = p.device_mesh
            *others, last = p.placements
            if not self.units or not last.is_shard(0) or not all(x.is_replicate() for x in others) or mesh.ndim > 2:
                raise UnsupportedModelError(
                    f"{name} is sharded as {p.placements} over a mesh of {mesh.ndim} dimension(s): only what "
                    "fully_shard (FSDP2) does, rows over processes or replicas of that, can be scored (no tensor "
                    "parallelism)"
                )
            self.size, self.rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
            self.copies = mesh.size() // self.size
            rows = rows_of(p)
            if rows.device.type != mesh.device_type:
                raise UnsupportedModelError(
                    f"{name} is on {rows.device.type}, not on {mesh.device_type}: load its weights, and apply "
                    "fully_shard without an offload policy"
                )
            start, stop = self.span(name)
            if rows.shape != (stop - start, *p.shape[1:]):
                raise UnsupportedModelError(
                    f"{name} has rows of shape {tuple(rows.shape)} here, not those that fully_shard gives to process "
                    f"{self.rank} of {self.size}"
                )
        for unit in self.units:
            self._check_settings(unit._get_fsdp_state())

    def _check_settings(self, state: Any) -> None:
        for group in _groups(state):
            if not (hasattr(state, "_mp_policy") and hasattr(group, "mp_policy") and hasattr(group, "_init_mp_dtypes")):
                raise UnsupportedModelError("this version of torch keeps the precision of sharded models elsewhere")
            if getattr(group, "gradient_divide_factor", None) is not None:
                raise UnsupportedModelError("the model's gradients are divided by a factor set for FSDP: leave it out")
            if not (getattr(group, "reduce_grads", True) and getattr(group, "all_reduce_grads", True)):
                raise UnsupportedModelError(
                    "the model does not reduce its gradients now: call set_requires_gradient_sync(True) first"
                )

    def check_world(self, world: World) -> None:
        """A score needs all processes that hold a part.

        Raises:
            UsageError: the world is another one.
        """
        if world.size != self.size * self.copies or (self.copies == 1 and world.rank != self.rank):
            raise UsageError(
                f"the weights are sharded over {self.size} processes{f' x {self.copies}' if self.copies > 1 else ''}, "
                f"and this one is number {self.rank} of them, but number {world.rank} of {world.size} in the world of "
                "the score: all of them have to make this call together, with the world that they find (leave world= "
                "out)"
            )

    def sharing(self, world: World) -> World:
        """Of the world of the score, the part that shares the rows with this process; all ranks have to call."""
        return world if self.copies == 1 else world.part(self._group)

    @property
    def _group(self) -> Any:
        mesh = next(iter(self.parameters.values())).device_mesh
        return mesh.get_group(mesh.ndim - 1)

    @contextmanager
    def widened(self, dtype: torch.dtype, only: Collection[str] | None = None) -> Iterator[None]:
        """What is sharded in another dtype has it meanwhile, in new parameters that stand in place of the old ones.

        ``only`` names the parameters that may move, if not all do: the others stay in their dtype. The old parameters,
        with their gradients and all that refers to them, come back as they were.

        Raises:
            UnsupportedModelError: this version of torch keeps its rows in another way.
        """
        held = {
            id(p.sharded_param): p
            for unit in self.units
            for g in _groups(unit._get_fsdp_state())
            for p in g.fsdp_params
        }
        before: list[tuple[Any, dict[str, Any]]] = []
        try:
            for name, p in self.parameters.items():
                if p.dtype == dtype or not (only is None or name in only):
                    continue
                owner = held.get(id(p))
                if owner is None or not all(hasattr(owner, n) for n in (*_STORED, *_REPLACED_BY)):
                    raise UnsupportedModelError(
                        f"{name} is sharded in {p.dtype}, the score needs {dtype}, and this torch keeps what "
                        "is sharded in a way that cannot be widened: convert the model before fully_shard"
                    )
                before.append((owner, dict(vars(owner))))
                owner._setattr_on_modules(nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad))
                owner.reset_sharded_param()
            self._find()
            yield
        finally:
            for owner, settings in reversed(before):
                owner._setattr_on_modules(settings["sharded_param"])
                vars(owner).update({n: settings[n] for n in _STORED})
            self._find()

    # --------------------------------------------------------------------------------------------------------- rows

    def span(self, name: str, rank: int | None = None) -> tuple[int, int]:
        """The rows start..stop of a parameter that a rank (by default this one) holds: torch.chunk's, maybe none."""
        count = int(self.parameters[name].shape[0])
        chunk = -(-count // self.size)
        rank = self.rank if rank is None else rank
        return min(rank * chunk, count), min((rank + 1) * chunk, count)

    def leaves(self) -> dict[str, Leaf]:
        """The rows that lie here of every parameter, by name."""
        out: dict[str, Leaf] = {}
        for name, p in self.parameters.items():
            start, stop = self.span(name)
            out[name] = Shard(name, rows_of(p), ((p, 0),), True, p.shape, start, stop)
        return out

    def whole(self, name: str) -> Tensor:
        """A parameter in full, on every rank; all have to call."""
        return whole_of(self.parameters[name])

    def total(self, counts: Sequence[int]) -> list[int]:
        """The sum of each count over the ranks; all have to call."""
        if self.size == 1:
            return list(counts)
        first = next(iter(self.parameters.values()))
        found = torch.tensor(counts, device=rows_of(first).device)
        torch.distributed.all_reduce(found, group=self._group)
        return [int(x) for x in found]

    # ------------------------------------------------------------------------------------------------------- passes

    def settle(self) -> None:
        """Forgets what is gathered, so that the next pass sees what is written into the rows."""
        for unit in self.units:
            unit.reshard()

    @property
    def forgets(self) -> bool:
        """Whether a forward pass may be left without a backward one: this torch can drop what it has noted."""
        return all(hasattr(unit, "reset_iter_state") for unit in self.units)

    def reset(self) -> None:
        """The same after a pass that may have failed half-way."""
        for unit in self.units:
            state = unit._get_fsdp_state()
            if getattr(state, "_is_root", None) and hasattr(unit, "reset_iter_state"):
                # It waits for what is under way, which may have failed too.
                with suppress(RuntimeError):
                    unit.reset_iter_state()
            for held in (state, *_groups(state)):
                if hasattr(held, "_training_state"):
                    held._training_state = type(held._training_state).IDLE
            if hasattr(state, "_state_ctx"):
                state._state_ctx.iter_forward_root = None
        self.settle()

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """No mixed precision policy meanwhile: parameters are gathered, and gradients summed, as they are sharded.

        In half precision a perturbation is rounded away.
        """
        states = [unit._get_fsdp_state() for unit in self.units]
        groups = [group for state in states for group in _groups(state)]
        held = [p for group in groups for p in group.fsdp_params]
        before = [(x, {k: vars(x)[k] for k in _PRECISION if k in vars(x)}) for x in (*states, *groups, *held)]
        try:
            for owner, settings in before:
                for name in ("_mp_policy", "mp_policy"):
                    if name in settings:
                        none = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"))
                        setattr(owner, name, replace(settings[name], **none))
            for group in groups:
                group._init_mp_dtypes()
            self._forget(held)
            yield
        finally:
            self.reset()
            for owner, settings in before:
                vars(owner).update(settings)
                if owner in groups and "_orig_dtype" not in settings:
                    # The model had not run before.
                    owner._init_mp_dtypes()
            self._forget(held)

    def _forget(self, held: Sequence[Any]) -> None:
        """What was gathered has the old precision."""
        for p in held:
            p.all_gather_outputs = []
            vars(p).pop("_unsharded_param", None)

    @contextmanager
    def taking_gradients(self, only: Collection[str] | None = None) -> Iterator[None]:
        """Every parameter gets a gradient on every rank, also one that is frozen or that a rank's samples do not use.

        Where ``only`` names some, those do, and no others. All ranks have to call.
        """
        # What is gathered has a flag of its own.
        flags: list[tuple[nn.Parameter, bool]] = []
        groups = [g for unit in self.units for g in _groups(unit._get_fsdp_state())]
        unused = [(g, g.reduce_scatter_unused_params) for g in groups if hasattr(g, "reduce_scatter_unused_params")]
        try:
            for group, _ in unused:
                group.reduce_scatter_unused_params = True
            for unit in self.units:
                unit.unshard()
                for name, p in self.model.named_parameters():
                    if not is_sharded(p):
                        flags.append((p, p.requires_grad))
                        p.requires_grad_(only is None or name in only)
                unit.reshard()
            yield
        finally:
            for p, flag in flags:
                p.requires_grad_(flag)
            for group, before in unused:
                group.reduce_scatter_unused_params = before

    # --------------------------------------------------------------------------------------------------- unsharded

    def plain(self, wanted: bool) -> nn.Module | None:
        """The model as it was written, whole and on the CPU, on the ranks that want it; None on the others.

        All ranks have to call: parameters are gathered one at a time.
        """
        memo: dict[int, Any] = {}
        for name, p in self.parameters.items():
            whole = self.whole(name)
            if wanted:
                memo[id(p)] = nn.Parameter(whole.to("cpu", copy=True), requires_grad=p.requires_grad)
            del whole
        return self._copy(memo) if wanted else None

    def _copy(self, memo: dict[int, Any]) -> nn.Module:
        """A copy with these parameters, without what FSDP hung on it."""
        classes = [(unit, type(unit)) for unit in self.units]
        states = {id(state): state for state in (unit._get_fsdp_state() for unit in self.units)}
        memo |= states
        try:
            for unit in self.units:
                unit.__class__ = written_class(unit)
            made: nn.Module = copy.deepcopy(self.model, memo).cpu()
        finally:
            for unit, kind in classes:
                unit.__class__ = kind
        for module in made.modules():
            for hooks in (v for k, v in vars(module).items() if k.endswith("_hooks") and isinstance(v, MutableMapping)):
                for key in [k for k, hook in hooks.items() if _is_of_fsdp(hook)]:
                    del hooks[key]
            # A state that stayed could not be copied once more, which trials do with a module.
            held = [
                k
                for k, v in vars(module).items()
                if isinstance(v, Mapping) and states.keys() & set(map(id, v.values()))
            ]
            for key in held:
                del vars(module)[key]
        return made


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in ([state._fsdp_param_group] if groups is None else groups) if g is not None]


def _is_of_fsdp(hook: Any) -> bool:
    inner = getattr(hook, "hook", hook)
    homes = [type(getattr(hook, "__self__", None)).__module__, *(getattr(h, "__module__", "") for h in (hook, inner))]
    return any(str(home).startswith(_HOOKS) for home in homes)
