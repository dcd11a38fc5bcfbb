"""What a failure to load a model means: its cause, and what to do about it."""

from __future__ import annotations

from hf_geosharp.errors import GeosharpError, HubError, ModelError
from hf_geosharp.tasks.hub import Source, fetch, hub_error, is_hub_failure

_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

_LFS_POINTER = b"version https://git-lfs"


def load_error(source: Source, error: Exception, trusted: bool, *, weights: bool = True) -> GeosharpError:
    """What to tell of a failure to load; ``weights`` says whether weights were needed at all."""
    if isinstance(error, GeosharpError):
        return error
    if not trusted and "trust_remote_code" in str(error):
        return needs_code(source)
    if source.folder is None and is_hub_failure(error):
        return hub_error(error, f"model {source.id!r}")
    text = str(error).strip()
    try:
        found = not weights or any(fetch(source, name) is not None for name in _WEIGHT_FILES)
    except HubError as unreachable:
        # transformers takes weights that it cannot reach for weights that are not there.
        return unreachable
    if not found:
        return ModelError(
            f"{source.id} has a config.json but no weights ({' or '.join(_WEIGHT_FILES)}): save them next to it. The "
            "symmetries of the architecture need no weights: hf-geosharp inspect --random-init."
        )
    pointers = _pointers(source) if weights else []
    if pointers:
        return ModelError(
            f"{source.id}: Git LFS has left pointers in place of the weights ({', '.join(pointers)}). "
            "Run `git lfs pull` in the folder."
        )
    return ModelError(f"{source.id} does not load: {type(error).__name__}: {text or 'no message'}")


def _pointers(source: Source) -> list[str]:
    """The files of weights of which a clone without Git LFS has only the pointers."""
    files = sorted(source.folder.iterdir()) if source.folder is not None else []
    found = []
    for path in files:
        if path.suffix in (".safetensors", ".bin") and path.is_file():
            with path.open("rb") as file:
                if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                    found.append(path.name)
    return found


def needs_code(source: Source) -> ModelError:
    """What to tell where a model needs code that the user has not allowed to run."""
    return ModelError(
        f"{source.id} needs Python code from its own repository. Read that code; if you trust it, "
        "pass trust_remote_code (--trust-remote-code)."
    )
