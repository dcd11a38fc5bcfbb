"""``hf-geosharp card``: a score into a model card, on disk or on the Hub."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hf_geosharp import demos
from hf_geosharp.cli import cards, complete, libraries
from hf_geosharp.cli.errors import is_debug, say
from hf_geosharp.cli.files import Target
from hf_geosharp.cli.options import Command, debug_option, layout_files, quiet_option, score_options
from hf_geosharp.errors import GeosharpError, HubError, UsageError
from hf_geosharp.paths import path_of
from hf_geosharp.sharpness.choices import title_of

if TYPE_CHECKING:
    from hf_geosharp.cards.push import Pushed
    from hf_geosharp.sharpness.result import SharpnessResult

PICTURE = "geodesic-sharpness.png"

# Options of a score that also say where the card is.
_OF_PLACE = {"revision", "token"}


@click.command("card", cls=Command, short_help="Put a score into a model card.")
@click.argument("target", metavar="MODEL_OR_README", shell_complete=complete.models)
@click.option(
    "--result",
    "result_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read the score from this JSON file (written by --json) instead of computing it.",
)
@click.option("--force", is_flag=True, help="With --result: accept the score of another model.")
@click.option("--remove", is_flag=True, help="Remove the score and its section from the card.")
@click.option("--dry-run", is_flag=True, help="Show what would change, without changing anything.")
@click.option(
    "--to",
    metavar="FILE|-",
    shell_complete=complete.files,
    help="Write the card to FILE, or print it, and leave the original unchanged.",
)
@click.option("--plot", is_flag=True, help=f"Draw the curve into {PICTURE} next to the card, and show it in the card.")
@click.option("--push", is_flag=True, help="Commit the card to the Hub; without this, changes are only shown.")
@click.option(
    "--create-pr/--no-create-pr",
    default=None,
    help="With --push: always or never open a pull request.  [default: only without write access]",
)
@click.option("--commit-message", metavar="TEXT", help="With --push: message of the commit, title of the pull request.")
@score_options
@quiet_option
@debug_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    target: str,
    result_file: Path | None,
    force: bool,
    remove: bool,
    dry_run: bool,
    to: str | None,
    plot: bool,
    push: bool,
    create_pr: bool | None,
    commit_message: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Put the score of a model into its card: metadata (model-index) and a section of the text.

    MODEL_OR_README is a README.md, a model's folder, a Hub id, or a shipped demo (demo:NAME). The score is computed
    with the options of 'hf-geosharp score', or read with --result. Everything else in the card stays byte for byte. A
    card that cannot be changed safely is left unchanged (exit code 5), and what to paste into it is printed.
    """
    from hf_geosharp.cards.push import is_first_rank

    _check_options(
        ctx, result_file=result_file, force=force, remove=remove, plot=plot, push=push, to=to, dry_run=dry_run
    )
    libraries.hush(debug=is_debug(ctx), bars=False)
    place = _find(target, options["revision"], options["token"])
    if push and place.hub is None:
        raise UsageError(f"--push needs the id of a model on the Hub, which {target} is not")
    if plot and _file_of(place, to) is None:
        raise UsageError(
            "--plot writes the picture next to the card, and this card is only printed: write it with --to FILE, or "
            "leave --plot out"
        )
    before = place.read()
    if not dry_run:
        _check_writing(place, to, [result_file, options["data"], *layout_files()], plot=plot)
    if plot:
        from hf_geosharp import figures

        figures.require()
    if remove:
        result = None
    elif result_file is not None:
        result = _read(result_file, place, force=force)
    else:
        if push and not dry_run:
            assert place.hub is not None
            place.hub.check_push()
        result = _taken(ctx, place, before, options, quiet)
    edit = _editor(place, before, result, PICTURE if plot else None)
    if push and not dry_run:
        assert place.hub is not None
        try:
            done = place.hub.push(edit, create_pr=create_pr, title=commit_message or _title(remove))
        except HubError:
            if result is not None and result_file is None:
                _save(result, place)
            raise
        _report(done, quiet)
        return
    after = edit(before)
    if not is_first_rank():
        return
    if plot and not dry_run and result is not None:
        _draw(place, to, result)
    if to is not None:
        _write_out(to, after)
    elif dry_run or place.hub is not None:
        _show_changes(before, after, quiet, dry_run=dry_run)
    elif place.file is None:
        _write_out("-", after)
    else:
        cards.write_card(place.file, before, after, quiet)


def _check_writing(place: cards.Place, to: str | None, inputs: Sequence[str | Path | None], *, plot: bool) -> None:
    """Fail now rather than after a score has been computed.

    Raises:
        GeosharpError: a file cannot be written.
        UsageError: it is one of the ``inputs``.
        CardError: it is in the Hub's cache.
    """
    from hf_geosharp.cards.files import refuse_cache

    if to == "-":
        return
    if to is None:
        place.check_writing(inputs)
    else:
        Target("--to", path_of(to)).check(inputs, models=[place.model])
        refuse_cache(path_of(to))
    card = _file_of(place, to)
    if plot and card is not None:
        Target("--plot", card.parent / PICTURE).check()


def _file_of(place: cards.Place, to: str | None) -> Path | None:
    """The file that the card is written to; None where it is printed or on the Hub."""
    return place.file if to is None else None if to == "-" else path_of(to)


def _save(result: SharpnessResult, place: cards.Place) -> None:
    """Prints a score that was computed and could not be pushed: it may have taken hours."""
    from hf_geosharp.cards import card

    click.echo(card.block(result, place.name))


def _check_options(ctx: click.Context, **given: Any) -> None:
    conflicts = [
        ("--remove", "--result", given["remove"] and given["result_file"] is not None),
        ("--remove", "--plot", given["remove"] and given["plot"]),
        # The Hub gets the card and nothing else, so a picture would be missing there.
        ("--push", "--plot", given["push"] and given["plot"]),
        ("--push", "--to", given["push"] and given["to"] is not None),
        ("--dry-run", "--to", given["dry_run"] and given["to"] is not None),
    ]
    for one, other, both in conflicts:
        if both:
            raise click.UsageError(f"{one} and {other} cannot be combined")
    of_push = [
        name
        for name in ("create_pr", "commit_message")
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE and not given["push"]
    ]
    if of_push:
        raise click.UsageError(f"--{of_push[0].replace('_', '-')} needs --push")
    if given["force"] and given["result_file"] is None:
        raise click.UsageError("--force needs --result: a score that is computed now always belongs to the model")
    if given["result_file"] is None and not given["remove"]:
        return
    for name in _score_option_names(ctx):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            what = "--remove" if given["remove"] else "--result"
            raise click.UsageError(f"--{name.replace('_', '-')} is for computing a score, which {what} does not do")


def _score_option_names(ctx: click.Context) -> list[str]:
    from hf_geosharp.cli.score import command as score

    names = {parameter.name for parameter in score.params} & set(ctx.params)
    return sorted(name for name in names if name and name not in _OF_PLACE | {"quiet", "model"})


def _find(target: str, revision: str | None, token: str | None) -> cards.Place:
    if target.startswith(demos.PREFIX):
        name, twin = demos.base_name(target)
        return cards.Place(name=name + demos.TWIN * twin, model=target, demo=demos.path(name) / "README.md")
    local = cards.find_local(target)
    if local is not None:
        return local
    from hf_geosharp.cards.push import Hub

    return cards.Place(name=target, model=target, hub=Hub(target, revision=revision, token=token))


def _taken(
    ctx: click.Context, place: cards.Place, before: bytes | None, options: dict[str, Any], quiet: bool
) -> SharpnessResult:
    """A score that is taken once the card is known to be one that can hold it."""
    from hf_geosharp.cards import card

    if before is not None:
        card.check(before)
    return _score(ctx, place, options, quiet)


def _editor(
    place: cards.Place, before: bytes | None, result: SharpnessResult | None, picture: str | None
) -> Callable[[bytes | None], bytes]:
    """The change of the card: the score into it, or, without one, out of it."""
    from hf_geosharp.cards import card

    if result is not None:
        return lambda content: cards.merged(content, result, place.name, picture)
    if before is None:
        raise GeosharpError(f"{place.name} has no card, so there is no score to remove")
    return lambda content: card.remove(content or b"")


def _read(path: Path, place: cards.Place, *, force: bool) -> SharpnessResult:
    """The score in a file.

    Raises:
        UsageError: it is of another model than the card, unless ``force``.
    """
    from hf_geosharp.sharpness.reading import read_result

    result = read_result(path)
    place.check_score(result.model, force=force)
    return result


def _score(ctx: click.Context, place: cards.Place, options: dict[str, Any], quiet: bool) -> SharpnessResult:
    from hf_geosharp.cli.score import take_score

    if place.model is None:
        raise UsageError(
            f"there is no model next to {place.file} (no config.json): pass its score with --result FILE, which "
            "'hf-geosharp score MODEL --json FILE' writes"
        )
    return take_score(place.model, options, quiet=quiet, debug=is_debug(ctx))


def _draw(place: cards.Place, to: str | None, result: SharpnessResult) -> None:
    """Writes the picture beside the card."""
    from hf_geosharp import plots
    from hf_geosharp.cards import files

    card = _file_of(place, to)
    assert card is not None
    path = card.parent / PICTURE
    picture = plots.curve(result, f"{title_of(result.metric)} of {place.name}")
    files.write(path, picture, files.read(path))


def _write_out(to: str, content: bytes) -> None:
    from hf_geosharp.cards import files

    if to == "-":
        click.echo(content, nl=False)
        return
    path = path_of(to)
    files.write(path, content, files.read(path))


def _show_changes(before: bytes | None, after: bytes, quiet: bool, *, dry_run: bool) -> None:
    """The lines that change, on stdout; what to do about them on stderr."""
    old, new = ((content or b"").decode("utf-8").splitlines(keepends=True) for content in (before, after))
    for line in difflib.unified_diff(old, new, "card", "card with the score"):
        click.echo(line.rstrip("\r\n"))
    if quiet:
        return
    if before == after:
        say("The card needs no change.")
    elif dry_run:
        say("Nothing was changed.")
    else:
        say("Nothing was changed: --push commits it, or opens a pull request if you have no write access.")


def _report(done: Pushed, quiet: bool) -> None:
    texts = {
        "unchanged": "The card needs no change",
        "commit": "Committed the card",
        "pull request": "Opened a pull request",
        "updated pull request": "Updated the open pull request",
        "not rank 0": "Left to the process of rank 0",
    }
    if not quiet:
        say(f"{texts[done.how]}.")
    if done.url is not None:
        click.echo(done.url)


def _title(remove: bool) -> str:
    from hf_geosharp.cards import push

    return push.REMOVE_TITLE if remove else push.TITLE
