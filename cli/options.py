"""Options that commands share, and the arguments of a score that they stand for.

The options of a score carry the names of the keyword arguments of ``score_pretrained``, so that a new one is
declared here and nowhere else.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from hf_geosharp.cli import complete
from hf_geosharp.cli.errors import set_debug
from hf_geosharp.sharpness.choices import (
    ASCENTS,
    DTYPES,
    GEODESICS,
    LABELS,
    METRICS,
    ON_NAN,
    PARAMS,
    PER,
    SHARDS,
    SYMMETRIES,
)

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]

BASELINES = ("adaptive",)
"""What the flag stands for."""

TIMEOUT = 1800.0
COLUMNS = ("text", "text_pair", "image", "label")


def radius(value: str) -> float:
    """A finite number above 0; ``click.FloatRange`` would let nan and inf through.

    Raises:
        BadParameter: it is something else.
    """
    try:
        number = float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a number") from None
    if not math.isfinite(number) or number <= 0:
        raise click.BadParameter(f"{value} is not a finite number above 0")
    return number


def micro_batch(value: str) -> int | str:
    """A number of samples, or "auto".

    Raises:
        BadParameter: it is something else.
    """
    if value == "auto":
        return value
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither a number of samples nor 'auto'")
    return int(value)


def label_map(value: str) -> dict[str, int | str]:
    """A JSON object from the labels of the data to the class numbers or names of the model.

    Raises:
        BadParameter: it is something else.
    """
    try:
        mapping = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"not valid JSON: {error}") from None
    if not isinstance(mapping, dict) or not mapping:
        raise click.BadParameter('not a JSON object such as \'{"neg": 0, "pos": 1}\'')
    for key, target in mapping.items():
        # bool is an int to Python, but true is no class number.
        if isinstance(target, bool) or not isinstance(target, (int, str)):
            raise click.BadParameter(f"{key!r} is mapped to {json.dumps(target)}, not to a class number or name")
    return mapping


class Command(click.Command):
    """Refuses empty values: what was to be in a variable of the shell that is not set.

    To Python an empty name of a file is the folder that one is in, so that something there would be read or written.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Look at the values as they are given, then parse."""
        if not ctx.resilient_parsing:
            given, _, _ = self.make_parser(ctx).parse_args(list(args))
            for parameter in self.get_params(ctx):
                value = given.get(str(parameter.name))
                if value == "" or (isinstance(value, (list, tuple)) and "" in value):
                    raise click.BadParameter("it is empty", ctx, parameter)
        return super().parse_args(ctx, args)


def _together(*options: Decorator[Any]) -> Decorator[Any]:
    """One decorator that adds several options, listed by ``--help`` in the order given."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        set_debug(ctx)


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_remember_debug,
    help="Show the traceback when something fails (also HF_DEBUG=1).",
)

quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Show no progress and no notes on stderr; warnings and errors are still shown."
)

json_option = click.option(
    "--json",
    "json_target",
    metavar="FILE|-",
    shell_complete=complete.files,
    help="Also write the result as JSON to FILE; '-' prints JSON on stdout and nothing else.",
)

card_option = click.option(
    "--card",
    "card_target",
    metavar="README",
    shell_complete=complete.files,
    help="Also put the result into this model card: a README.md, or a model's folder.",
)

model_argument = click.argument("model", required=False, shell_complete=complete.models)

_part_options = _together(
    click.option("--data-config", metavar="C", help="Configuration (subset) of the data set."),
    click.option("--split", metavar="S", help="Split of the data set.  [default: train]"),
)

_task_option = click.option(
    "--task",
    default="auto",
    show_default=True,
    metavar="T",
    help="Task, e.g. causal-lm; 'auto' takes it from the model.",
)

_input_column_options = _together(
    click.option("--text-column", metavar="N", help="Column with the text."),
    click.option("--text-pair-column", metavar="N", help="Column with the second text of a pair."),
    click.option("--image-column", metavar="N", help="Column with the image."),
)

_data_options = _together(
    click.option(
        "--data",
        metavar="D",
        shell_complete=complete.files,
        help="Data set: Hub id, folder or file.  [default: the one named by the model card]",
    ),
    _part_options,
    _task_option,
    click.option(
        "--samples", type=click.IntRange(min=1), default=1024, show_default=True, help="Number of samples to use."
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(min=1),
        default=128,
        show_default=True,
        help="Samples per ball; the score is the mean over the balls.",
    ),
    _input_column_options,
    click.option(
        "--label-column", metavar="N", help="Column with the label, or with the target text of a seq2seq model."
    ),
    click.option(
        "--label-map",
        type=label_map,
        metavar="JSON",
        help='Map from labels in the data to classes of the model, e.g. \'{"neg": 0, "pos": 1}\'.',
    ),
    click.option(
        "--labels",
        type=click.Choice(LABELS),
        default="data",
        show_default=True,
        help="Target: the labels in the data, or the model's own unperturbed output (no labels needed).",
    ),
    click.option(
        "--max-length",
        type=click.IntRange(min=1),
        metavar="N",
        help="Number of tokens that texts are truncated to.  [default: 128 for language models, otherwise 512 or the "
        "model's limit]",
    ),
)

_measure_options = _together(
    click.option(
        "--metric", type=click.Choice(tuple(METRICS)), default="inv", show_default=True, help="Metric of the ball."
    ),
    click.option(
        "--geodesic", type=click.Choice(GEODESICS), help="Order of the geodesic map.  [default: depends on the metric]"
    ),
    click.option(
        "--symmetries",
        type=click.Choice(SYMMETRIES),
        default="full",
        show_default=True,
        help="Symmetries to divide out.",
    ),
    click.option(
        "--rho",
        type=radius,
        multiple=True,
        metavar="R",
        help="Radius; repeat the option for a curve.  [default: depends on the metric]",
    ),
    click.option(
        "--ascent",
        type=click.Choice(ASCENTS),
        default="auto",
        show_default=True,
        help="Search for the maximum: 'secant' stops when it has settled; 'apgd' is the reference, Auto-PGD, and "
        "takes all --steps; 'auto' is secant, and in rough balls, where it has not settled after 12 steps, Auto-PGD "
        "as well.",
    ),
    click.option(
        "--steps",
        type=click.IntRange(min=1),
        default=20,
        show_default=True,
        help="The most ascent steps in each ball; Auto-PGD takes them all, and in rough balls three times as many (13 "
        "or fewer leave out this second search). With --average: the number of draws.",
    ),
    click.option(
        "--starts",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Searches in each ball, from points far apart, for a loss with several peaks; the highest result counts.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        default=0,
        show_default=True,
        help="Seed for choosing samples and random directions.",
    ),
    click.option("--average", is_flag=True, help="Average-case instead of worst-case sharpness."),
    click.option("--baselines", is_flag=True, help="Also compute the adaptive sharpness at the same radius."),
    click.option(
        "--params",
        type=click.Choice(PARAMS),
        default="all",
        show_default=True,
        help="Weights to perturb: all, or only those of an adapter, on a base that stays as it is stored.",
    ),
    click.option(
        "--per",
        type=click.Choice(PER),
        help="Also score each layer, head or kind of weights by perturbing it alone; the parts do not add up.",
    ),
    click.option(
        "--profile", is_flag=True, help="Also record the loss on the way to the first batch's worst perturbation."
    ),
)


_LAYOUTS = "hf_geosharp.layouts"


def layout_files() -> tuple[str, ...]:
    """The files of ``--layout`` that the running command was given."""
    files: tuple[str, ...] = click.get_current_context().meta.get(_LAYOUTS, ())
    return files


def _add_layouts(ctx: click.Context, _: click.Parameter, files: tuple[str, ...]) -> None:
    ctx.meta[_LAYOUTS] = files
    if files:
        from hf_geosharp.symmetry.layouts import read_layouts, register_layout

        for file in files:
            for layout in read_layouts(file):
                register_layout(layout)


def _no_cache(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        # An empty name turns it off, in processes that are started from here too.
        os.environ["HF_GEOSHARP_CACHE"] = ""


_search_options = _together(
    click.option(
        "--layout",
        multiple=True,
        metavar="FILE",
        shell_complete=complete.files,
        expose_value=False,
        callback=_add_layouts,
        help="JSON description of attention modules that cannot be traced; refused if it does not hold.",
    ),
    click.option(
        "--no-cache",
        is_flag=True,
        expose_value=False,
        callback=_no_cache,
        help="Find the symmetries again instead of reusing those found before on this architecture.",
    ),
)

_model_options = _together(
    click.option(
        "--device", default="auto", show_default=True, help="Device to compute on, e.g. cpu, cuda, cuda:1, mps."
    ),
    click.option(
        "--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Precision to compute in."
    ),
    click.option("--revision", metavar="R", help="Branch, tag or commit of the model."),
    click.option("--token", metavar="T", help="Hub token; use HF_TOKEN to keep it out of the shell's history."),
    click.option("--trust-remote-code", is_flag=True, help="Allow code from the model's repository to run."),
    click.option(
        "--allow-missing", is_flag=True, help="Continue even if the checkpoint lacks weights, which are then random."
    ),
)

_work_options = _together(
    click.option(
        "--micro-batch",
        type=micro_batch,
        metavar="N|auto",
        help="Samples that go through the model at once; 'auto': as many as memory allows.  [default: the whole batch]",
    ),
    click.option(
        "--gradient-checkpointing", is_flag=True, help="Compute activations twice instead of keeping them in memory."
    ),
    click.option(
        "--compile",
        is_flag=True,
        help="Compile the model's passes (torch.compile); compilation takes time at the start.",
    ),
    click.option(
        "--shard",
        type=click.Choice(SHARDS),
        default="batches",
        show_default=True,
        help="What several processes share: whole batches, or the samples of each batch.",
    ),
    click.option(
        "--on-nan",
        type=click.Choice(ON_NAN),
        default="stop",
        show_default=True,
        help="What to do with a batch whose loss is not finite.",
    ),
    click.option(
        "--output",
        metavar="DIR",
        shell_complete=complete.files,
        help="Folder for the result and a journal; the same command resumes an interrupted run.",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=TIMEOUT,
        show_default=True,
        help="Seconds without a sign of life from another process after which the run stops.",
    ),
)

processes_option = click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Start N processes on this machine and spread the batches over them.",
)

score_options = _together(_data_options, _measure_options, _search_options, _model_options, _work_options)

inspect_options = _together(
    click.option(
        "--random-init",
        is_flag=True,
        help="Build the model from its config alone, with random weights; no checkpoint is needed.",
    ),
    click.option(
        "--verify/--no-verify", default=True, show_default=True, help="Prove every symmetry on the model itself."
    ),
    click.option(
        "--health/--no-health", default=True, show_default=True, help="Measure every head's condition and rank."
    ),
    click.option(
        "--symmetries",
        "preset",
        type=click.Choice(SYMMETRIES),
        default="full",
        show_default=True,
        help="Symmetries to look for.",
    ),
    click.option(
        "--layout",
        "layouts",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="JSON description of attention modules that cannot be traced; it is proved like everything else.",
    ),
    click.option(
        "--cache/--no-cache",
        "cached",
        default=True,
        show_default=True,
        help="Keep the symmetries found on disk, and reuse them.",
    ),
    click.option(
        "--data",
        metavar="D",
        shell_complete=complete.files,
        help="Example batch, if inputs cannot be made up: a data set (Hub id, folder or file), or a .safetensors "
        "file with a tensor for each argument of the model's forward.",
    ),
    _part_options,
    _input_column_options,
    _task_option,
    click.option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        default=0,
        show_default=True,
        help="Seed for random weights and samples.",
    ),
    _model_options,
)


def score_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``score_pretrained`` from the values of :data:`score_options`.

    Raises:
        click.UsageError: options that cannot be combined.
    """
    from hf_geosharp.tasks.columns import Columns

    ctx = click.get_current_context(silent=True)
    if ctx is not None and options["average"] and ctx.get_parameter_source("ascent") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--ascent is for the worst case: --average draws at random, and searches nothing")
    arguments = dict(options)
    arguments["columns"] = Columns(**{name: arguments.pop(f"{name}_column") for name in COLUMNS})
    arguments["rho"] = list(options["rho"]) or None
    arguments["baselines"] = BASELINES if options["baselines"] else ()
    return arguments


def inspect_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``inspect_pretrained`` from the values of :data:`inspect_options`.

    Raises:
        GeosharpError: the file of layouts cannot be read.
    """
    from hf_geosharp.symmetry.layouts import read_layouts
    from hf_geosharp.tasks.columns import Columns

    arguments = dict(options)
    names = [name for name in COLUMNS if f"{name}_column" in options]
    arguments["columns"] = Columns(**{name: arguments.pop(f"{name}_column") for name in names})
    arguments["layouts"] = tuple(layout for file in options["layouts"] for layout in read_layouts(file))
    return arguments
