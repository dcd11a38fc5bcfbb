"""The device that a model is put on, by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_geosharp.errors import UsageError

if TYPE_CHECKING:
    import torch


def find_device(name: str) -> torch.device:
    """The device of that name; for ``"auto"`` a GPU if there is one.

    Raises:
        UsageError: There is no such device, or nothing can be computed on it.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"There is no device {name!r}: pass auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"There is no device {name!r} here ({torch.cuda.device_count()} GPUs): pass auto or cpu.")
    try:
        # The names that torch knows are those of all its backends, and of "meta", which computes nothing.
        torch.zeros(1, device=device).item()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"Nothing can be computed on device {name!r} here ({reason}): pass auto or cpu.") from error
    return device
