"""A model whose passes are compiled, where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_geosharp.errors import ModelError, first_line


def compiled(model: nn.Module) -> Callable[..., Any]:
    """What runs a model by :func:`torch.compile`; it sees the weights that the model has when it is called.

    The model stays as it is. Hooks that come or go once it has run are not noticed.

    Raises:
        ModelError: by the first call: the model cannot be compiled, or there is no compiler.
    """
    from torch._dynamo.exc import TorchDynamoException

    run = torch.compile(model)

    def forward(**inputs: Any) -> Any:
        try:
            return run(**inputs)
        except TorchDynamoException as error:
            raise ModelError(
                f"the model cannot be compiled here ({type(error).__name__}: {first_line(error)}): leave out compile"
            ) from error

    return forward
