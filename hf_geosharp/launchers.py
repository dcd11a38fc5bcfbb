"""How the processes of a launcher (accelerate launch, torchrun, srun, mpirun) learn of one another, and meet."""

from __future__ import annotations

import os
import re
import sys
from datetime import timedelta

from hf_geosharp.errors import WorldError, first_line

LAUNCHERS = (
    ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun, accelerate launch
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),  # srun
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""How launchers tell a process its world: size, rank, rank and number of processes on its machine."""


def launched_size() -> int | None:
    """How many processes a launcher says it started; None without one. Sets what torch wants to know in any case.

    Raises:
        WorldError: a size without a rank, or no numbers.
    """
    for names in LAUNCHERS:
        size, rank, local_rank, local_size = (os.environ.get(name) for name in names)
        if size is None:
            continue
        if rank is None:
            if names is not LAUNCHERS[0]:
                continue
            if size == "1":
                return None
            raise WorldError(
                f"WORLD_SIZE is {size}, but RANK is not set: no launcher started this process. Start it with "
                "accelerate launch or torchrun, or unset WORLD_SIZE"
            )
        values = (size, rank, local_rank or "0", re.split(r"\D", local_size or size)[0])
        if not all(v.isdigit() for v in values):
            raise WorldError(f"{', '.join(names)} are {values}; they have to be numbers")
        if int(size) > 1:
            for name, value in zip(LAUNCHERS[0], values, strict=True):
                os.environ.setdefault(name, value)
            os.environ.setdefault("MASTER_ADDR", _first_host())
            os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", 9500)) % 20000))
        return int(size)
    return None


def _first_host() -> str:
    """The machine of rank 0: the first of SLURM's list (``node[03-07,9],other``), or this one."""
    match = re.match(r"([^,\[]+)(?:\[([^],-]+))?", os.environ.get("SLURM_STEP_NODELIST", ""))
    return f"{match[1]}{match[2] or ''}" if match else "127.0.0.1"


def is_initialised() -> bool:
    """Whether the process group is there already, whoever made it."""
    # Where nobody has imported it nobody has initialised it; importing it takes seconds.
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def join(device: str, timeout: float) -> None:
    """Meets the other processes that the launcher announced, by Accelerate.

    Raises:
        WorldError: not all of them arrive in time.
    """
    import torch
    from accelerate import PartialState

    on_gpu = torch.cuda.is_available() if device == "auto" else device.split(":")[0] not in ("cpu", "mps")
    try:
        # Without cpu=True Accelerate sees a world of one where there is no GPU.
        PartialState(cpu=not on_gpu, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise WorldError(
            f"the {os.environ.get('WORLD_SIZE')} processes that the launcher announced did not all meet at {where} "
            f"within {timeout:g} s: {first_line(error)}"
        ) from error
