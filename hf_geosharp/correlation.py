"""How a figure of the scores goes with a target over models: rank and linear correlation, with their uncertainty.

Needs SciPy, which is installed on request.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_geosharp.arguments import check, whole
from hf_geosharp.comparable import SHARPNESS, Named, check_comparable, conditions, figure, named_results, notes_on
from hf_geosharp.errors import DataError, GeosharpError, UsageError
from hf_geosharp.paths import path_of
from hf_geosharp.record import Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FEWEST = 4
"""Models; with three the smallest p-value that a permutation can give is 1/3."""

FEWEST_FOR_INTERVALS = 8
"""Models; of fewer a percentile bootstrap covers much less than it says."""

RESAMPLES = 9999
MODEL_INDEX = "model-index:"

_MODEL_COLUMN, _VALUE_COLUMN = "model", "value"
_SHOWN = 8
# Correlations that differ by no more are equal.
_ROUNDING = 1e-12
# The share of bootstrap samples, on one side constant, that leaves an interval of the others none of 95 %.
_MOST_CONSTANT = 0.05
# Pairs of models times resamples that are held at once.
_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Statistic:
    """A correlation over models.

    ``interval95`` is the percentile interval over bootstrap samples of the models. It is None if the models are few, if
    more than 5 % of the samples have no correlation, for one side is constant in them, or if all have the same.
    ``p_value`` is two-sided by permutation; ``exact`` says whether all permutations were looked at rather than a random
    part.
    """

    name: str
    value: float
    interval95: tuple[float, float] | None
    p_value: float
    exact: bool


@dataclass(frozen=True)
class Point:
    """One model: the figure of its score, with its interval over batches, and the target."""

    name: str
    figure: float
    interval95: tuple[float, float] | None
    target: float


@dataclass(frozen=True)
class Correlation(Record):
    """How a figure goes with a target.

    ``ties`` counts the pairs of models that are equal in the figure, and in the target. ``settings`` are what the
    scores share; ``forced`` lists what they differ in, and is empty unless they were forced together.
    """

    KIND: ClassVar[str] = "correlation"
    SCHEMA: ClassVar[int] = 1

    by: str
    target: str
    models: int
    statistics: tuple[Statistic, ...]
    points: tuple[Point, ...]
    ties: Mapping[str, int]
    settings: Mapping[str, Any]
    resamples: int
    seed: int
    forced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Correlation:
        """The inverse of :meth:`to_dict`.

        Raises:
            DataError: it is something else.
        """
        values = cls.fields_of(data)
        try:
            values["statistics"] = tuple(Statistic(**_pair(held)) for held in data["statistics"])
            values["points"] = tuple(Point(**_pair(held)) for held in data["points"])
            values["forced"], values["notes"] = tuple(data["forced"]), tuple(data["notes"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"no correlation: {type(error).__name__}: {error}") from None


def _pair(held: Mapping[str, Any]) -> dict[str, Any]:
    interval = held["interval95"]
    return {**held, "interval95": None if interval is None else tuple(interval)}


def require() -> None:
    """Fail now rather than after the work.

    Raises:
        GeosharpError: SciPy is not installed.
    """
    try:
        import scipy.stats  # noqa: F401
    except ImportError:
        raise GeosharpError("a correlation needs SciPy: pip install scipy") from None


# -------------------------------------------------------------------------------------------------------- correlation


def correlate(
    results: Sequence[Named],
    target: Mapping[str, float],
    *,
    by: str = SHARPNESS,
    target_name: str = "target",
    seed: int = 0,
    resamples: int = RESAMPLES,
    force: bool = False,
) -> Correlation:
    """Kendall's tau-b, Spearman's rho and Pearson's r between a figure of the results and a target.

    Args:
        results: at least four, of :func:`hf_geosharp.comparable.read_results`.
        target: model -> value; a model by its name, its id, the last part of that, or its file's name.
        by: "sharpness", "base_loss", or a baseline that all results carry.
        target_name: what the target is called.
        seed, resamples: of the bootstrap and the permutations.
        force: correlate results of other settings or data, too; what they differ in is in the correlation.

    Raises:
        UsageError: fewer than four models, two of one name, other settings or data, no such figure.
        DataError: a model without a target, a target that is not finite, a result with NaN, or a side that is constant.
        GeosharpError: SciPy is not installed.
    """
    require()
    results = named_results(results)
    check(force=force, target_name=target_name)
    if not isinstance(target, Mapping):
        raise UsageError(f"the target is a {type(target).__name__}; it is a mapping from models to numbers")
    twice = [name for name, count in Counter(item.name for item in results).items() if count > 1]
    if twice:
        raise UsageError(f"{twice[0]} is there twice; give each result once")
    if len(results) < FEWEST:
        raise UsageError(f"a correlation needs at least {FEWEST} models, and there are {len(results)}")
    if whole("seed", seed) < 0:
        raise UsageError(f"seed is {seed}; it is not negative")
    if whole("resamples", resamples) < 1:
        raise UsageError(f"resamples is {resamples}; at least 1 is needed")
    forced = check_comparable(results, force=force)
    values, unknown = match(results, target, target_name)
    figures = [figure(item, by) for item in results]
    import numpy as np

    x, y = np.array([f.value for f in figures]), np.array(values, dtype=float)
    for name, side in ((by, x), (target_name, y)):
        if (side == side[0]).all():
            raise DataError(
                f"{name} is {side[0]:g} for all {len(results)} models: the correlation with a constant is undefined"
            )
    notes = list(notes_on(results))
    if unknown:
        notes.append(f"left out of {target_name}, because no result belongs to them ({len(unknown)}): {_some(unknown)}")
    if len(results) < FEWEST_FOR_INTERVALS:
        notes.append(
            f"no intervals: of fewer than {FEWEST_FOR_INTERVALS} models a bootstrap makes them far too narrow; the "
            "p-values hold for any number"
        )
    statistics = tuple(_statistic(name, x, y, seed, resamples) for name in _FORMS)
    without = [found.name for found in statistics if found.interval95 is None]
    if without and len(results) >= FEWEST_FOR_INTERVALS:
        notes.append(
            f"no interval for {', '.join(without)}: the bootstrap finds the same correlation in all of its samples, or "
            "none in many (where all but one or two models are equal, say), and so does not tell how far off it may be"
        )
    return Correlation(
        by=by,
        target=target_name,
        models=len(results),
        statistics=statistics,
        points=tuple(
            Point(item.name, f.value, f.interval95, value)
            for item, f, value in zip(results, figures, values, strict=True)
        ),
        ties={"figure": _ties(x), "target": _ties(y)},
        settings=conditions(results[0].result),
        resamples=resamples,
        seed=seed,
        forced=tuple(forced),
        notes=tuple(notes),
    )


def _ties(side: Array) -> int:
    return sum(n * (n - 1) // 2 for n in Counter(side.tolist()).values())


def _statistic(name: str, x: Array, y: Array, seed: int, resamples: int) -> Statistic:
    import numpy as np
    from scipy import stats

    form = _FORMS[name]
    x, y = _scaled(x), _scaled(y)
    value = float(_VALUES[name](x, y))
    exact = math.factorial(len(x)) <= resamples
    rows = max(1, _AT_ONCE // len(x) ** 2)

    def held_against(side: Array, axis: int = -1) -> Array:
        return form(side, y, axis=axis)

    # One side is enough: both together would be as many as the square of that.
    test = stats.permutation_test(
        (x,), held_against, permutation_type="pairings", vectorized=True, n_resamples=math.inf if exact else resamples,
        batch=rows, alternative="two-sided", **_seeded(stats.permutation_test, seed),
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(x), (resamples, len(x)))
    drawn = np.concatenate([form(x[part], y[part], axis=-1) for part in np.array_split(chosen, -(-resamples // rows))])
    drawn = drawn[np.isfinite(drawn)]
    interval = None
    # A bootstrap that finds the same correlation in every sample knows nothing of how far off it is.
    enough = len(drawn) >= (1 - _MOST_CONSTANT) * resamples
    if len(x) >= FEWEST_FOR_INTERVALS and enough and np.ptp(drawn) > _ROUNDING:
        low, high = np.quantile(drawn, [0.025, 0.975])
        interval = float(low), float(high)
    return Statistic(name, value, interval, float(test.pvalue), exact)


def _scaled(side: Array) -> Array:
    """The same numbers times a power of two, so that no square is too small or too large for a float."""
    import numpy as np

    scaled: Array = np.ldexp(side, -np.frexp(np.abs(side).max())[1])
    return scaled


def _seeded(function: Callable[..., Any], seed: int) -> dict[str, Any]:
    """The keyword that seeds a function of SciPy, which was ``random_state`` before 1.15."""
    import inspect

    name = "rng" if "rng" in inspect.signature(function).parameters else "random_state"
    return {name: seed}


# Many at once along an axis, which SciPy's own functions of these names do not all do, or do slowly. The values that
# are told are those of SciPy's.


def _pearson(x: Array, y: Array, axis: int = -1) -> Array:
    import numpy as np

    a = x - x.mean(axis=axis, keepdims=True)
    b = y - y.mean(axis=axis, keepdims=True)
    # What rounding leaves of a constant side is no deviation.
    for side, own in ((a, x), (b, y)):
        side[np.broadcast_to(np.ptp(own, axis=axis, keepdims=True) == 0, side.shape)] = 0
    return _cosine(a, b, axis)


def _spearman(x: Array, y: Array, axis: int = -1) -> Array:
    from scipy.stats import rankdata

    return _pearson(rankdata(x, axis=axis), rankdata(y, axis=axis), axis)


def _kendall(x: Array, y: Array, axis: int = -1) -> Array:
    import numpy as np

    a, b = (np.moveaxis(side, axis, -1) for side in (x, y))
    signs = (np.sign(side[..., :, None] - side[..., None, :]) for side in (a, b))
    flat = [side.reshape(*side.shape[:-2], -1) for side in signs]
    return _cosine(flat[0], flat[1], -1)


def _cosine(a: Array, b: Array, axis: int) -> Array:
    import numpy as np

    with np.errstate(invalid="ignore", divide="ignore"):
        cosine: Array = (a * b).sum(axis=axis) / np.sqrt((a * a).sum(axis=axis) * (b * b).sum(axis=axis))
    return cosine.clip(-1, 1)


def _by_scipy(name: str) -> Callable[[Array, Array], float]:
    def value(x: Array, y: Array) -> float:
        from scipy import stats

        return float(getattr(stats, name)(x, y).statistic)

    return value


_FORMS: Mapping[str, Callable[..., Array]] = {
    "Kendall tau-b": _kendall,
    "Spearman rho": _spearman,
    "Pearson r": _pearson,
}
_VALUES = {
    "Kendall tau-b": _by_scipy("kendalltau"),
    "Spearman rho": _by_scipy("spearmanr"),
    "Pearson r": _by_scipy("pearsonr"),
}


# ------------------------------------------------------------------------------------------------------------- target


def match(
    results: Sequence[Named], target: Mapping[str, float], target_name: str = "target"
) -> tuple[list[float], list[str]]:
    """The target of each result, and the names that no result has.

    Raises:
        DataError: a result without a target, a name that two results or a result with two targets answer to, or a
            target that is not finite.
    """
    owners: dict[str, list[int]] = {}
    for at, item in enumerate(results):
        for alias in dict.fromkeys((item.name, *item.aliases)):
            owners.setdefault(alias, []).append(at)
    exact = {item.name: at for at, item in enumerate(results)}
    found: dict[int, str] = {}
    unknown = []
    for name in target:
        places = [exact[name]] if name in exact else owners.get(name, [])
        if not places:
            unknown.append(name)
            continue
        if len(places) > 1:
            held = ", ".join(results[at].name for at in places)
            raise DataError(f"{target_name}: {name!r} may be any of {held}; write the name in full")
        if places[0] in found:
            raise DataError(
                f"{target_name}: {found[places[0]]!r} and {name!r} are both {results[places[0]].name}; keep one"
            )
        found[places[0]] = name
    missing = [item.name for at, item in enumerate(results) if at not in found]
    if missing:
        also = f" It has {_some(unknown)}, which no result is of." if unknown else ""
        raise DataError(f"{target_name} has no value for {_some(missing)}.{also}")
    try:
        values = [float(target[found[at]]) for at in range(len(results))]
    except (TypeError, ValueError) as error:
        raise DataError(f"{target_name} is not a number for every model: {error}") from None
    wrong = [results[at].name for at, value in enumerate(values) if not math.isfinite(value)]
    if wrong:
        raise DataError(f"{target_name} of {_some(wrong)} is NaN or infinite")
    return values, unknown


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def read_target(
    source: str | os.PathLike[str], results: Sequence[Named], *, column: str | None = None, token: str | None = None
) -> tuple[dict[str, float], str]:
    """The target of ``--target``, and what it is called.

    Args:
        source: a CSV (or TSV) file with a column "model", or ``model-index:METRIC``: what each model's card says of its
            own METRIC; ``model-index:METRIC@DATASET`` where it says several.
        results: whose cards are read.
        column: of the file; "value", or the only other one.
        token: of the Hub, where cards are there.

    Raises:
        UsageError: neither of the two; a column of a card.
        DataError: no such file or column, no number in it, a model twice, a card without the metric or with several.
        HubError: the Hub does not give a card.
    """
    name = os.fspath(source)
    if not name.startswith(MODEL_INDEX):
        if Path(name).suffix.lower() not in (".csv", ".tsv"):
            raise UsageError(f"the target is {name}; it must be a .csv or .tsv file, or {MODEL_INDEX}METRIC")
        return _read_table(Path(name), column)
    if column is not None:
        raise UsageError("a target column (--target-column) is for a file, but the target comes from model cards")
    metric, _, dataset = name.removeprefix(MODEL_INDEX).partition("@")
    if not metric:
        raise UsageError(f"the target is {name}; name a metric, as in {MODEL_INDEX}accuracy")
    values: dict[str, float] = {}
    missing = []
    for item in results:
        value = _of_card(item, metric, dataset, token)
        if value is None:
            missing.append(item.name)
        else:
            values[item.name] = value
    if missing:
        raise DataError(f"the model cards of {_some(missing)} have no {name.removeprefix(MODEL_INDEX)} in model-index")
    return values, name.removeprefix(MODEL_INDEX)


def _read_table(path: Path, column: str | None) -> tuple[dict[str, float], str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a table: it is not UTF-8") from None
    reader = csv.DictReader(io.StringIO(text), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    try:
        return _read_rows(path, reader, column)
    except csv.Error as error:
        raise DataError(f"{path} is not a table: {error}") from None


def _read_rows(path: Path, reader: csv.DictReader[str], column: str | None) -> tuple[dict[str, float], str]:
    there = [name.strip() for name in reader.fieldnames or []]
    reader.fieldnames = there
    chosen = _column(path, there, column)
    for name in (_MODEL_COLUMN, chosen):
        if there.count(name) > 1:
            raise DataError(f"{path} has the column {name!r} more than once; keep one")
    values: dict[str, float] = {}
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        model, held = (row[_MODEL_COLUMN] or "").strip(), (row[chosen] or "").strip()
        if row.get(None):
            raise DataError(f"{where}: more cells than columns; a number is written with a point, not with a comma")
        if not model:
            raise DataError(f"{where}: no model")
        if model in values:
            raise DataError(f"{where}: {model} is there twice")
        try:
            values[model] = float(held)
        except ValueError:
            raise DataError(f"{where}: {chosen} of {model} is {held!r}, which is not a number") from None
    if not values:
        raise DataError(f"{path} has no rows")
    return values, chosen if chosen != _VALUE_COLUMN else path.stem


def _column(path: Path, there: Sequence[str], column: str | None) -> str:
    listed = f"its columns are {', '.join(there) or 'none'}"
    if _MODEL_COLUMN not in there:
        raise DataError(f"{path} has no column {_MODEL_COLUMN!r}; {listed}")
    if column is not None:
        if column not in there:
            raise DataError(f"{path} has no column {column!r}; {listed}")
        return column
    others = [name for name in dict.fromkeys(there) if name != _MODEL_COLUMN]
    if _VALUE_COLUMN in others:
        return _VALUE_COLUMN
    if len(others) != 1:
        raise DataError(f"{path}: which column is the target? Pass column (--target-column); {listed}")
    return others[0]


def _of_card(item: Named, metric: str, dataset: str, token: str | None) -> float | None:
    """What a model's card says; None if it does not."""
    found = [
        r
        for r in _card_results(item, token)
        if metric.lower() in (str(r.metric_type).lower(), str(r.metric_name).lower())
        and (not dataset or dataset.lower() in (str(r.dataset_type).lower(), str(r.dataset_name).lower()))
    ]
    # Nothing keeps a card from lists or mappings as values.
    if any(held.metric_value != found[0].metric_value for held in found):
        listed = "; ".join(sorted({_where(held) for held in found}))
        raise DataError(
            f"the model card of {item.name} has several values of {metric}: {listed}. Choose a data set with "
            f"{MODEL_INDEX}{metric}@DATASET, or put the right ones into a CSV file"
        )
    if not found:
        return None
    value = found[0].metric_value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise DataError(f"the model card of {item.name}: {metric} is {value!r}, which is not a number") from None


def _own_models(index: list[Any], place: str, name: str) -> list[Any]:
    """Those of a card's models that are the one in a place: of its name, or the only one.

    Raises:
        DataError: there are several, of other names.
    """
    own = path_of(place).resolve().name if path_of(place).is_dir() else place.rpartition("/")[2]
    names = [str(held["name"]) for held in index]
    found = [held for held, held_name in zip(index, names, strict=True) if held_name.lower() == own.lower()]
    if len(index) > 1 and not found:
        raise DataError(
            f"the model card of {name} has the values of several models ({_some(names)}), and none of them is called "
            f"{own}. Put the right ones into a CSV file"
        )
    return found if len(index) > 1 else index


def _where(held: Any) -> str:
    """A value of a card with what it was measured on."""
    parts = (held.dataset_name, held.dataset_config, held.dataset_split, held.metric_value)
    return " ".join(str(part) for part in parts if part is not None)


def _card_results(item: Named, token: str | None) -> Sequence[Any]:
    from huggingface_hub import metadata_load
    from huggingface_hub.repocard_data import model_index_to_eval_results
    from yaml import YAMLError

    from hf_geosharp import demos
    from hf_geosharp.tasks.hub import fetch, find_source

    identity = str(item.result.model.get("id") or "")
    if not identity:
        raise DataError(f"{item.name} does not say which model it belongs to, so it has no card to read")
    revision = item.result.model.get("revision")
    place = str(demos.path(identity)) if identity.startswith(demos.PREFIX) else identity
    if "revision" not in item.result.model:
        raise DataError(
            f"{item.name} was scored in memory, where a model keeps the name that it was loaded by ({identity}) when "
            "it is trained: its card may be of another model. Put the values into a CSV file"
        )
    if revision is None and not path_of(place).is_dir():
        raise DataError(f"{item.name} was scored in the folder {place}, which is not here, so it has no card to read")
    path = fetch(find_source(place, revision, token), "README.md")
    if path is None:
        return ()
    try:
        own = _own_models((metadata_load(path) or {}).get("model-index") or [], place, item.name)
        return model_index_to_eval_results(own)[1] if own else ()
    except (OSError, ValueError, TypeError, KeyError, YAMLError) as error:
        raise DataError(f"the model card of {item.name} cannot be read: {type(error).__name__}: {error}") from None
