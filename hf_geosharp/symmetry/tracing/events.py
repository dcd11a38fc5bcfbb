"""What a trace holds: the linear maps and softmaxes of one forward pass, in order, and what lies between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd import Function

from hf_geosharp.symmetry.tracing.graph import Behind, leaf_at
from hf_geosharp.symmetry.tracing.recorded import Call
from hf_geosharp.symmetry.tracing.rows import features_of
from hf_geosharp.symmetry.tracing.weights import Slab


@dataclass(eq=False)
class Linear:
    """One use of a linear map: what it read, and the leaf that stands for what it wrote.

    Attributes:
        weight, bias: where they lie; None where that could not be told.
        source: what it read (its graph leads back to earlier leaves); ``source_axis`` counts its inputs.
        leaf: what it wrote, cut; ``axis`` counts its outputs.
        scope: names of the modules it ran in, outermost first.
        inputs, outputs: how many numbers it reads and writes at one place.
        grouped: each output reads a group of the inputs only.
        exact: its entries are those of the parameter: not times a number, or masked.
    """

    weight: Slab
    bias: Slab | None
    source: Tensor
    source_axis: int
    leaf: Tensor
    axis: int
    scope: tuple[str, ...]
    inputs: int
    outputs: int
    grouped: bool = False
    exact: bool = True


@dataclass(eq=False)
class Convolution:
    """One use of a convolution with a kernel of several points; it is not cut.

    Attributes:
        weight: the parameter, all of it.
        bias: that, where every output reads every input at every point: not where there are zeros around.
        in_axis: which dimension of the weight counts the channels that it reads.
        points: how many dimensions the kernel has.
        norm: the norm that wrote what it read, if its features are the channels.
        each: each output reads one channel alone.
    """

    weight: str
    bias: str | None
    in_axis: int
    points: int
    norm: str | None
    each: bool = False


@dataclass(eq=False)
class Softmax:
    """One softmax: its logits (..., queries, keys), what it sums to one over last, and the leaf of its result.

    ``direct`` if it is a softmax of just these: no other weights, and nothing that mixes logits before.
    """

    logits: Tensor
    leaf: Tensor
    scope: tuple[str, ...]
    direct: bool = False


@dataclass(eq=False)
class Product:
    """A product of what linear maps wrote with what linear maps wrote."""

    result: Tensor
    scope: tuple[str, ...]


@dataclass(eq=False)
class Open:
    """A product with parameters that may be a linear map: what it reads, along which axis, and what it makes."""

    source: Tensor
    axis: int
    result: Tensor


@dataclass
class Trace:
    """The linear maps and softmaxes of one forward pass, in order, and the arguments of every module's first call."""

    linears: list[Linear] = field(default_factory=list)
    softmaxes: list[Softmax] = field(default_factory=list)
    order: list[Linear | Softmax] = field(default_factory=list)
    convolutions: list[Convolution] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    norms: dict[int, str] = field(default_factory=dict)
    """Storage of what a module with a vector of weights (a norm) wrote -> the module."""
    norm_axes: dict[str, int | None] = field(default_factory=dict)
    """Which axis of what each of them wrote counts its features, -1 or 1, by the sizes alone."""
    features: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of the same storage how many features a row has, and how far apart they lie; where that is known."""
    before_norm: dict[str, tuple[Tensor, str, str]] = field(default_factory=dict)
    """What each of them read, with its graph, the name of its vector of weights, and that of its bias or ""."""
    biases: dict[str, str] = field(default_factory=dict)
    """The second parameter of each module that has just two, of one shape, as norms have, by its first."""
    bypassed: set[str] = field(default_factory=set)
    """Norms of which something else than a linear map reads the output."""
    scaled: set[str] = field(default_factory=set)
    """Norms whose rows are multiplied or summed before something reads them: a bias would be, too."""
    looked_up: set[str] = field(default_factory=set)
    """Parameters of which rows are looked up, as an embedding does."""
    lookups: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """The rows that were, with their graph, and which ones, by the parameter; of sums of rows there are none."""
    mixing: set[int] = field(default_factory=set)
    """Identities of softmaxes whose weights are multiplied with something that is computed."""
    weighing: set[int] = field(default_factory=set)
    """Identities of those whose weights are multiplied with it entry by entry."""
    selecting: set[int] = field(default_factory=set)
    """Identities of those by whose weights, or logits, some of several are picked, experts say."""
    logits: list[tuple[Tensor, tuple[str, ...]]] = field(default_factory=list)
    """What every softmax reads, cut or not, and names of the modules it ran in."""
    decided: list[Tensor] = field(default_factory=list)
    """Differences of what is computed from what it is compared with: their signs decide something."""
    hidden: dict[str, None] = field(default_factory=dict)
    """Modules with a softmax or a product without derivatives: in a function of its own, or under no_grad."""
    functions: set[type[Function]] = field(default_factory=set)
    """The functions with a backward pass of their own in which those were."""
    scripted: dict[str, None] = field(default_factory=dict)
    """Modules with parameters that are compiled to TorchScript: nothing of what they do is seen."""
    products: dict[str, None] = field(default_factory=dict)
    """Modules that multiply what linear maps wrote with what linear maps wrote."""
    compared: list[Product] = field(default_factory=list)
    """The products themselves."""
    open: list[Open | None] = field(default_factory=list)
    """Products of which only what becomes of them tells whether they are linear maps; None for those that are cut."""
    operations: dict[str, set[object]] = field(default_factory=dict)
    """What each module, with all inside it, has called: functions, with the numbers that set how they act."""
    unread: dict[int, list[tuple[Tensor, str, int]]] = field(default_factory=dict)
    """Tensors that modules have returned and nobody has read since, by identity, with their modules and places."""
    ends: list[Tensor] = field(default_factory=list)
    """The model's outputs, with their graph."""
    felt: set[int] = field(default_factory=set)
    """Identities of the leaves that a later cut or the model's output depends on: others only choose, by an index."""
    leaves: Behind[Tensor] = field(default_factory=lambda: Behind(leaf_at))
    """What the tensors of the trace are made of."""

    @property
    def read_tensors(self) -> list[Tensor]:
        """All that becomes of what was cut: what linear maps and softmaxes read, and the outputs."""
        return [*(x.source for x in self.linears), *(x.logits for x in self.softmaxes), *self.ends]

    @property
    def uses(self) -> dict[str, list[Linear]]:
        """The linear maps of each parameter, in order."""
        found: dict[str, list[Linear]] = {}
        for linear in self.linears:
            found.setdefault(linear.weight.parameter, []).append(linear)
        return found

    def returned(self, module: str, tensors: Sequence[Tensor]) -> None:
        """Notes what a module has returned."""
        for place, tensor in enumerate(tensors):
            self.unread.setdefault(id(tensor), []).append((tensor, module, place))

    def read(self, arguments: Iterable[object]) -> None:
        """Notes that somebody reads these, or what is in them if they are lists."""
        for x in arguments if self.unread else ():
            if isinstance(x, (list, tuple)):
                self.read(x)
            for _, module, place in self.unread.pop(id(x), ()):
                self.calls[module].read.add(place)

    def copied(self, tensor: object, copy: object) -> None:
        """Notes a copy of what a module may have returned: who reads it reads that."""
        if isinstance(copy, Tensor):
            own = [(copy, module, place) for _, module, place in self.unread.get(id(tensor), ())]
            if own:
                self.unread.setdefault(id(copy), []).extend(own)

    def norm_of(self, tensor: Tensor) -> str | None:
        """The norm that wrote a tensor."""
        try:
            return self.norms.get(tensor.untyped_storage().data_ptr())
        except (NotImplementedError, RuntimeError):
            # Tensors within vmap, and others that are no memory, are not what a norm wrote.
            return None

    def feature_axis(self, tensor: Tensor) -> int | None:
        """The axis of what a norm wrote that counts its features, from the first one on; None where that is not known.

        To be asked of what :meth:`norm_of` knows.
        """
        try:
            place = self.features.get(tensor.untyped_storage().data_ptr())
        except (NotImplementedError, RuntimeError):  # as above
            return None
        return None if place is None else features_of(tensor, *place)

    def behind(self, tensor: Tensor) -> int:
        """The leaves (cuts and parameters) on which a tensor of the trace depends, as bits of :attr:`leaves`."""
        if tensor.grad_fn is None:
            return self.leaves.bits([tensor]) if tensor.requires_grad else 0
        return self.leaves.of(tensor)

    def sources(self, tensor: Tensor) -> list[Tensor]:
        """The same as a list, always in the same order."""
        return self.leaves.listed(self.behind(tensor))

    def small(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """These leaves less the tables of which rows are looked up, or all if there are no others.

        Derivatives in a whole vocabulary take long, and say no more than those in what else there is.
        """
        every = list(leaves)
        return [x for x in every if self.parameters.get(id(x)) not in self.looked_up] or every
