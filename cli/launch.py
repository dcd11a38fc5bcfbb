"""``--processes N``: the same command in N processes on this machine, by Accelerate's launcher; and their world."""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING, Any

import click

from hf_geosharp.cli import options
from hf_geosharp.cli.errors import INTERRUPTED, is_debug, report, say

if TYPE_CHECKING:
    from hf_geosharp.parallel import World

_ARGUMENTS = "hf_geosharp.arguments"
_LAUNCHED = "HF_GEOSHARP_PROCESSES"
_FAILURE = 1


class Command(options.Command):
    """Remembers its arguments as they were given, to start itself again with them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep them, then parse."""
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


def wanted(processes: int | None) -> bool:
    """Whether processes are still to be started.

    Raises:
        UsageError: another launcher has started some already.
    """
    if processes is None or os.environ.get(_LAUNCHED) == str(processes):
        return False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise click.UsageError(
            f"--processes {processes}: this is already one of {os.environ['WORLD_SIZE']} processes that a launcher has "
            "started (WORLD_SIZE); leave the option out."
        )
    return processes > 1


def start(ctx: click.Context, processes: int | None) -> int:
    """Runs the command of ``ctx`` in so many processes, and returns the exit code: of the first that failed, or 0."""
    from accelerate.commands.launch import launch_command_parser, multi_gpu_launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Its name notwithstanding this launcher is the one that starts processes on machines without GPUs too; with --cpu
    # Accelerate starts a single one. The port is the first that is free.
    how: dict[str, Any] = {"num_processes": processes, "num_machines": 1, "machine_rank": 0, "main_process_port": 0}
    how |= {"num_cpu_threads_per_process": _threads(processes or 1), "mixed_precision": "no", "dynamo_backend": "no"}
    options = [text for name, value in how.items() for text in (f"--{name}", str(value))]
    debug = ["--debug"] if is_debug(ctx) else []
    command = ["--module", "hf_geosharp.cli", *debug, str(ctx.info_name), *ctx.meta[_ARGUMENTS]]
    arguments = launch_command_parser().parse_args(["--multi_gpu", *options, *command])
    os.environ[_LAUNCHED] = str(processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(how["num_cpu_threads_per_process"]))
    if not debug:
        # What went wrong is told by the processes themselves.
        logging.disable(logging.CRITICAL)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        multi_gpu_launcher(arguments)
    except ChildFailedError as error:
        return _exit_code(error.failures)
    except SignalException as error:
        return INTERRUPTED if error.sigval == signal.SIGINT else 128 + int(error.sigval)
    finally:
        logging.disable(logging.NOTSET)
        del os.environ[_LAUNCHED]
    return 0


def join(ctx: click.Context, device: str, timeout: float) -> World:
    """The world that this process is in, whose rank 0 reports failures of all."""
    from hf_geosharp.parallel import World

    world = World.find(device, timeout)
    world.report = lambda error: report(error, ctx)
    return world


def _threads(processes: int) -> int:
    """For each process, so that all together have the cores there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // processes))


def _exit_code(failures: dict[int, Any]) -> int:
    """That of the first process that failed by itself; the launcher then ends the others."""
    by_time = sorted(failures.items(), key=lambda item: item[1].timestamp)
    known = [failure.exitcode for _, failure in by_time if failure.exitcode > 0]
    if known:
        return int(known[0])
    rank, failure = next((f for f in by_time if f[1].exitcode != -signal.SIGTERM), by_time[0])
    say(
        f"Error: rank {rank} was killed by {signal.Signals(-failure.exitcode).name} (the system does this when "
        "memory runs out), so the others were stopped."
    )
    return _FAILURE
