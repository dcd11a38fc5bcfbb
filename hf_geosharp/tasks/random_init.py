"""A model built from its config alone, with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_geosharp.errors import ModelError
from hf_geosharp.tasks.hub import Source
from hf_geosharp.tasks.load_errors import needs_code

if TYPE_CHECKING:
    import torch


def build(source: Source, config: Any, loader: Any, seed: int, dtype: str, trust_remote_code: bool) -> Any:
    """A model with random weights.

    Raises:
        ModelError: Its class does not take the config, or is code of the repository's own.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if hasattr(loader, "from_config"):
                model = loader.from_config(config, trust_remote_code=trust_remote_code)
            else:
                model = loader(config)
        except Exception as error:
            if not trust_remote_code and "trust_remote_code" in str(error):
                raise needs_code(source) from error
            raise ModelError(
                f"{source.id} cannot be built from its config.json: {type(error).__name__}: {str(error).strip()}"
            ) from error
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    _rouse(parameter)
    return model.to(getattr(torch, dtype))


def _rouse(parameter: torch.Tensor) -> None:
    """Moves a parameter off its initial values, where a model looks symmetric although it is not.

    Vectors (ones and zeros in norms and biases) get noise, zeros become noise, and matrices that are too small for
    attention to depend on its input grow to one over the root of what they read.
    """
    import torch

    if parameter.ndim < 2 or parameter.numel() < 2:
        parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter))
        return
    wanted = parameter[0].numel() ** -0.5
    spread, mean = float(parameter.std()), abs(float(parameter.mean()))
    if spread == 0 and mean == 0:
        parameter.copy_(wanted * torch.randn(parameter.shape))
    elif mean < spread / 2 and spread < wanted:
        parameter.mul_(wanted / spread)
