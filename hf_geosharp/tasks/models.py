"""Loading a model so that the score is that of its trained weights: all of them present, in full precision."""

from __future__ import annotations

import os

from hf_geosharp.errors import UsageError, warn
from hf_geosharp.sharpness.choices import DTYPES
from hf_geosharp.tasks.adapters import load_adapter
from hf_geosharp.tasks.config import choose_task, load_config, read_config, refuse_quantised
from hf_geosharp.tasks.devices import find_device
from hf_geosharp.tasks.hub import find_source
from hf_geosharp.tasks.loaded import LoadedModel, identity_of, with_processor
from hf_geosharp.tasks.quiet import quiet_transformers
from hf_geosharp.tasks.weights import left_out, load_weights


def load_model(
    model_id: str | os.PathLike[str],
    *,
    task: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    dtype: str = "float32",
    device: str = "auto",
    allow_missing: bool = False,
    params: str = "all",
) -> LoadedModel:
    """Loads a model with its processor and its card.

    Args:
        model_id: A folder, or the id of a model on the Hub. A folder never asks the network.
        task: A task's name, or ``"auto"``: the one of the config's architecture.
        revision: A branch, tag or commit of the Hub repository.
        token: The Hub token; None takes what the user logged in with.
        trust_remote_code: Whether code from the model's repository may run.
        dtype: ``"float32"`` or ``"float64"``, whatever the checkpoint holds: in 16 bits a small step moves few weights.
        device: A torch device, or ``"auto"``: a GPU if there is one.
        allow_missing: Whether weights that the checkpoint lacks may start at random (else they are an error).
        params: ``"lora"`` takes an adapter of PEFT, and loads its base as it is stored, in half precision or quantised.

    Raises:
        UsageError: An argument is not one of its choices, or the task cannot be told from the config.
        ModelError: The folder is not a model, or weights are missing or do not fit, or it needs code of its own.
        UnsupportedModelError: The checkpoint is quantised, or is an adapter.
        HubError: The Hub does not give it.
    """
    if dtype not in DTYPES:
        raise UsageError(f"The dtype {dtype!r} cannot be used: a score is computed in {' or '.join(DTYPES)}.")
    import transformers

    target = find_device(device)
    source = find_source(model_id, revision, token)
    if params == "lora":
        if dtype != DTYPES[0]:
            raise UsageError(
                f"The dtype {dtype!r} cannot be combined with params 'lora': the base stays as it is stored."
            )
        return load_adapter(source, target, task, trust_remote_code, allow_missing)
    raw, source = read_config(source)
    refuse_quantised(source, raw)
    chosen = choose_task(source, raw, task)
    with quiet_transformers():
        config = load_config(source, trust_remote_code)
        refuse_quantised(source, getattr(config, "__dict__", {}))
        loader = getattr(transformers, chosen.auto_class)
        model, missing, unexpected = load_weights(source, config, loader, dtype, trust_remote_code, allow_missing)
    if unexpected and not missing:
        # Those were told of along with what is missing.
        warn(f"{source.id}: {left_out(unexpected, type(model).__name__)}. They are no part of what is scored")
    model.eval()
    model.to(target)
    return with_processor(
        source, model, chosen, identity_of(source, raw, model, chosen, dtype, missing), trust_remote_code
    )
