"""From an exception to a message on stderr and an exit code."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator

import click

from hf_geosharp.errors import GeosharpError, HubError
from hf_geosharp.launchers import LAUNCHERS

EXIT_CODES = (
    "Exit codes: 0 ok, 1 known failure, 2 wrong usage, 3 unsupported model, 4 Hub or network, 5 model card left "
    "unchanged, 130 interrupted (Ctrl-C)."
)
INTERRUPTED = 130
_FAILURE = 1
_DEBUG_KEY = "hf_geosharp.debug"
_TRUE = {"1", "ON", "YES", "TRUE"}

PATIENCE = 10.0
"""Seconds in which rank 0 tells the user what is wrong with a command that all processes were started with."""

# Recognised by name: importing these libraries only to classify an error would load them for every failure.
_NETWORK_LIBRARIES = {"requests", "urllib3", "httpx", "httpx2", "httpcore", "httpcore2", "aiohttp"}
_HUB_ERRORS = {"HfHubHTTPError", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "HFValidationError"}
_MEMORY_ERRORS = {"MemoryError", "OutOfMemoryError"}


def set_debug(ctx: click.Context) -> None:
    """Remember that tracebacks are wanted; the group and its commands share what is remembered."""
    ctx.meta[_DEBUG_KEY] = True


def is_debug(ctx: click.Context) -> bool:
    """Whether ``--debug`` was given or HF_DEBUG is set."""
    return bool(ctx.meta.get(_DEBUG_KEY)) or os.environ.get("HF_DEBUG", "").upper() in _TRUE


def say(text: str) -> None:
    """One message on stderr, whatever stands for it now (a live progress bar stands in for it while it is drawn)."""
    print(text, file=sys.stderr)


def report_interrupt() -> None:
    """Say that Ctrl-C ended the command; of several processes one says it."""
    if not _rank():
        say("Interrupted.")


def fail(error: Exception, ctx: click.Context) -> int:
    """Report ``error`` on stderr and return the exit code; what click itself reports or ends with is raised again."""
    if isinstance(error, (click.exceptions.Exit, click.Abort, BrokenPipeError)):
        raise error
    # Of several processes one has told the user already.
    if not getattr(error, "reported", False):
        let_rank_0_tell()
        if isinstance(error, click.ClickException):
            raise error
        report(error, ctx)
    return _exit_code(error)


def let_rank_0_tell() -> None:
    """Waits, in any other process: what fails before they meet mostly fails in all, and the launcher then ends this."""
    if _rank():
        time.sleep(PATIENCE)


def report(error: BaseException, ctx: click.Context) -> None:
    """Say what went wrong on stderr."""
    debug = is_debug(ctx)
    if debug:
        say("".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip())
    say(f"Error: {_rank()}{_message(error)}")
    if not debug and not isinstance(error, GeosharpError):
        say("Run again with --debug for the traceback.")


def _rank() -> str:
    """Which process of several this is, unless it is the one that speaks for all."""
    ranks = (os.environ.get(rank) for size, rank, *_ in LAUNCHERS if size in os.environ)
    own = next((rank for rank in ranks if rank is not None), "0")
    return "" if own == "0" else f"rank {own}: "


def _exit_code(error: Exception) -> int:
    if isinstance(error, GeosharpError):
        return error.exit_code
    return HubError.exit_code if _is_network(error) else _FAILURE


def _message(error: BaseException) -> str:
    if isinstance(error, GeosharpError):
        return str(error)
    if any(kind.__name__ in _MEMORY_ERRORS for kind in type(error).__mro__):
        return (
            "out of memory: the model and one batch do not fit. Use --micro-batch auto, --gradient-checkpointing or "
            "--device cpu, which leave the score unchanged, or a smaller --batch-size (each batch has its own ball, so "
            "this changes the score)."
        )
    # One line: the rest belongs to the traceback.
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_network(error: Exception) -> bool:
    return any(_is_network_kind(kind) for link in _chain(error) for kind in type(link).__mro__)


def _is_network_kind(kind: type) -> bool:
    library = kind.__module__.partition(".")[0]
    if library == "huggingface_hub":
        # By name, because the same library also raises errors about the contents of a configuration.
        return kind.__name__ in _HUB_ERRORS
    return library in _NETWORK_LIBRARIES or kind in (ConnectionError, TimeoutError) or kind.__name__ == "gaierror"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
