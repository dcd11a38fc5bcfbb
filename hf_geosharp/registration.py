"""Makes ``evaluate.load("geodesic_sharpness")`` and ``hf geosharp`` find this package.

Neither evaluate nor the ``hf`` command asks what is installed; both look into folders of their own. So a small file is
put there that leads back here: a module that imports the metric, and the description of a command. Neither names a
version, so both stay valid when this package is upgraded.

Only the standard library is imported here: this runs whenever the package is imported.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from hf_geosharp.errors import GeosharpError

METRIC = "geodesic_sharpness"
"""The name of the metric in evaluate."""

OPT_OUT = "HF_GEOSHARP_NO_REGISTER"
"""Environment variable: if it is true, importing the package registers nothing."""

COMMAND = "hf-geosharp"

SHIM = """\
# Written by hf-geosharp, so that evaluate.load("geodesic_sharpness") finds the package that is installed.
# "hf-geosharp register --unregister" removes it.
try:
    from hf_geosharp.metric import GeodesicSharpness
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "hf_geosharp":
        raise
    raise ImportError(
        'evaluate.load("geodesic_sharpness") needs the package hf-geosharp, which is not installed in this '
        "environment. Install it: pip install hf-geosharp"
    ) from error
"""
_MARK = SHIM.splitlines()[0]
_DIGEST = hashlib.sha256(SHIM.encode()).hexdigest()
_TRUE = {"1", "ON", "YES", "TRUE"}
# No owner on GitHub can be called so. "hf extensions update" asks GitHub for the repository it reads from the manifest.
_OWNER = "pip:"


def metric_path() -> str:
    """The folder of the metric: ``evaluate.load(metric_path())`` works from anywhere, registered or not."""
    from importlib import resources

    return str(resources.files("hf_geosharp.metrics") / METRIC)


def register_at_import() -> None:
    """Registers the metric as far as that is possible, and stays silent otherwise.

    The command line is left out, or ``register --check`` would always find what its own start has written.
    """
    program = Path((getattr(sys, "argv", None) or [""])[0]).stem
    # Python calls itself "-m" while it imports what a -m names.
    if os.environ.get(OPT_OUT, "").upper() in _TRUE or program in (COMMAND, "-m"):
        return
    try:
        register()
    except GeosharpError:
        return


def register() -> Path:
    """Makes ``evaluate.load("geodesic_sharpness")`` find this package, and returns the file that does it.

    Safe with any number of processes at once; nothing is written where nothing has to be.

    Raises:
        GeosharpError: the folder cannot be written.
    """
    script = _place() / _DIGEST / f"{METRIC}.py"
    try:
        if _text(script) != SHIM:
            _write(script)
        elif _newest() != script:
            os.utime(script)
    except OSError as error:
        raise GeosharpError(
            f"Cannot write {script}: {error.strerror or error}. Set HF_HOME or HF_MODULES_CACHE to a folder that can "
            "be written, or load the metric by its folder: evaluate.load(hf_geosharp.metric_path())."
        ) from error
    return script


def unregister() -> list[Path]:
    """Removes what `register` wrote, this release or another, and returns it.

    Raises:
        GeosharpError: it cannot be removed.
    """
    from shutil import rmtree

    place = _place()
    removed = [folder for folder in _candidates(place) if _text(folder / f"{METRIC}.py").startswith(_MARK)]
    try:
        for folder in removed:
            rmtree(folder)
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()
    except OSError as error:
        raise GeosharpError(f"Cannot remove {error.filename or place}: {error.strerror or error}.") from error
    return removed


def registered() -> Path:
    """The file that makes ``evaluate.load("geodesic_sharpness")`` find this package.

    Raises:
        GeosharpError: there is none, or evaluate takes another; the message says what to do.
    """
    newest = _newest()
    if newest is None:
        raise GeosharpError(
            f'evaluate.load("{METRIC}") does not find this package: nothing is in {_place()}. Run: {COMMAND} register'
        )
    text = _text(newest)
    if not text:
        raise GeosharpError(f"evaluate fails on {newest.parent}, which is incomplete. Remove that folder.")
    if not text.startswith(_MARK):
        raise GeosharpError(
            f'evaluate.load("{METRIC}") uses another module of that name: {newest}. Run: {COMMAND} register'
        )
    return newest


def _place() -> Path:
    """Where evaluate looks for a metric of this name that it has loaded before; its own rules, without importing it."""
    cache = os.getenv("XDG_CACHE_HOME", "~/.cache")
    home = os.path.expanduser(os.getenv("HF_HOME", os.path.join(cache, "huggingface")))
    modules = _settled() or os.getenv("HF_MODULES_CACHE", os.path.join(home, "modules"))
    return Path(modules) / "evaluate_modules" / "metrics" / f"evaluate-metric--{METRIC}"


def _settled() -> str:
    """The cache of an evaluate that is imported already: later changes of the environment do not reach it."""
    return str(getattr(sys.modules.get("evaluate.config"), "HF_MODULES_CACHE", ""))


def _candidates(place: Path) -> list[Path]:
    """The folders that evaluate takes for versions of the module: it goes by the length of a hash."""
    try:
        return [entry for entry in place.iterdir() if len(entry.name) == len(_DIGEST)]
    except OSError:
        return []


def _newest() -> Path | None:
    """The script that evaluate takes; one that is not there stands for the folder evaluate stumbles over."""
    scripts = [folder / f"{METRIC}.py" for folder in _candidates(_place())]
    missing = next((script for script in scripts if not script.is_file()), None)
    return missing or max(scripts, key=lambda script: script.stat().st_mtime, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _write(script: Path) -> None:
    """Writes the shim's folder whole or not at all: evaluate fails on one without the script."""
    from shutil import rmtree

    # Not by tempfile, whose folders others could not read; the cache may be shared.
    staged = script.parent.with_name(f".{os.getpid()}.{os.urandom(8).hex()}")
    os.makedirs(staged)
    try:
        (staged / script.name).write_bytes(SHIM.encode())
        try:
            os.rename(staged, script.parent)
        except OSError:
            # Another process was first, or what is there is not whole.
            if _text(script) != SHIM:
                os.replace(staged / script.name, script)
    finally:
        rmtree(staged, ignore_errors=True)


def register_hf_cli() -> Path:
    """Makes the command ``hf geosharp`` run this installation, and returns the file that does it.

    Raises:
        GeosharpError: the installed huggingface_hub has no extensions of a form that is known here, another
            installation has that name, or the folder cannot be written.
    """
    extensions = _extensions()
    manifest = _manifest(extensions)
    folder = _extension_folder(extensions)
    if _owner(extensions, folder) not in (None, _OWNER):
        raise GeosharpError(
            f"{folder} holds another installation of `hf geosharp`. Keep it, or remove it first: "
            "hf extensions remove geosharp"
        )
    try:
        manifest.save(folder)
    except OSError as error:
        raise GeosharpError(f"Cannot write into {folder}: {error.strerror or error}.") from error
    return folder / str(extensions.MANIFEST_FILENAME)


def unregister_hf_cli() -> list[Path]:
    """Removes what `register_hf_cli` wrote, and returns it; what ``hf extensions install`` made is left alone.

    Raises:
        GeosharpError: as for `register_hf_cli`, or it cannot be removed.
    """
    from shutil import rmtree

    extensions = _extensions()
    folder = _extension_folder(extensions)
    if _owner(extensions, folder) != _OWNER:
        return []
    try:
        rmtree(folder)
    except OSError as error:
        raise GeosharpError(f"Cannot remove {folder}: {error.strerror or error}.") from error
    return [folder]


def registered_hf_cli() -> Path:
    """The file that makes ``hf geosharp`` run this installation.

    Raises:
        GeosharpError: there is none, or it runs another; the message says what to do.
    """
    extensions = _extensions()
    folder = _extension_folder(extensions)
    if _owner(extensions, folder) is None:
        raise GeosharpError(f"`hf geosharp` is not known: nothing is in {folder}. Run: {COMMAND} register --hf-cli")
    runs = Path(extensions.ExtensionManifest.load(folder).executable_path)
    if not runs.is_file():
        raise GeosharpError(f"`hf geosharp` runs {runs}, which is gone. Run: {COMMAND} register --hf-cli")
    if runs != _script():
        raise GeosharpError(f"`hf geosharp` runs another installation: {runs}, not {_script()}.")
    return folder / str(extensions.MANIFEST_FILENAME)


def _extensions() -> Any:
    """The module of huggingface_hub that reads manifests.

    It is internal to huggingface_hub, so its parts are looked at before they are used, and it writes the file itself.
    """
    try:
        from huggingface_hub.cli import extensions

        parts = (extensions.EXTENSIONS_ROOT, extensions.MANIFEST_FILENAME, extensions.ExtensionManifest.load)
    except (ImportError, AttributeError) as error:
        raise GeosharpError(f"{_hub()} has no extensions of `hf` that this package can write. {_UPGRADE}") from error
    del parts
    return extensions


_UPGRADE = "Upgrade it (pip install -U huggingface_hub), or go on with hf-geosharp, which does the same."


def _manifest(extensions: Any) -> Any:
    import dataclasses
    from datetime import datetime, timezone
    from importlib.metadata import metadata

    ours = {
        "owner": _OWNER,
        "repo": COMMAND,
        "repo_id": f"{_OWNER}{COMMAND}",
        "short_name": COMMAND.removeprefix("hf-"),
        "executable_path": str(_script()),
        "type": "python",
        "installed_at": datetime.now(timezone.utc),
        "description": metadata(COMMAND)["Summary"],
    }
    try:
        known = {field.name for field in dataclasses.fields(extensions.ExtensionManifest)}
        if not set(ours) <= known:
            raise TypeError(f"no fields {sorted(set(ours) - known)}")
        return extensions.ExtensionManifest(**ours)
    except TypeError as error:
        raise GeosharpError(f"{_hub()} describes extensions in a form that is not known here. {_UPGRADE}") from error


def _extension_folder(extensions: Any) -> Path:
    return Path(extensions.EXTENSIONS_ROOT).expanduser() / COMMAND


def _owner(extensions: Any, folder: Path) -> str | None:
    """Who the manifest in a folder names; None without one, and '' for one that cannot be read."""
    if not (folder / extensions.MANIFEST_FILENAME).is_file():
        return None
    try:
        return str(extensions.ExtensionManifest.load(folder).owner)
    except Exception:
        return ""


def _script() -> Path:
    """The command that was installed with this package."""
    from importlib.metadata import distributions

    # A checkout may describe itself a second time, without its scripts, in front of what is installed.
    for found in distributions(name=COMMAND):
        for file in found.files or ():
            if file.stem == COMMAND and Path(str(file.locate())).is_file():
                return Path(str(file.locate())).resolve()
    raise GeosharpError(f"The command {COMMAND} is not installed with this package. Install it: pip install {COMMAND}")


def _hub() -> str:
    from importlib.metadata import version

    return f"huggingface_hub {version('huggingface_hub')}"
