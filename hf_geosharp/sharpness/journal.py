"""The journal of a long run: every finished ball is a line on disk, so that a killed run continues where it was.

A folder holds one append-only file for each rank, ``journal-<rank>.jsonl``. Its first line, the header, says of what
the run is: settings, weights, data, versions. A line that was not finished when the run was killed is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_geosharp import atomic
from hf_geosharp.errors import DataError, GeosharpError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "hf-geosharp journal"
SCHEMA = 1
RESULT = "result.json"

Header = Mapping[str, Any]
"""What a run is of: names to JSON values, or to mappings of such."""

_SHOWN = 120


class Journal:
    """The files of one folder: what finished runs left in all of them, and this rank's own, which grows."""

    def __init__(self, folder: str | os.PathLike[str], header: Header, rank: int = 0) -> None:
        """Reads what is there; :meth:`start` has to be called before anything is written.

        Raises:
            GeosharpError: the folder cannot be made.
            UsageError: its journal is of another run: the difference is named.
            DataError: a file is damaged in its middle.
        """
        self.folder, self.rank = Path(folder), rank
        self._header = _plain({"format": FORMAT, "schema": SCHEMA, **header})
        self._file: int | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GeosharpError(f"output: cannot make the folder {self.folder}: {error.strerror or error}") from error
        self.files = [self._lines(path) for path in sorted(self.folder.glob("journal-*.jsonl"))]
        """The lines of each file, without headers."""

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        lines, _ = _whole_lines(path)
        if not lines:
            return []
        header = lines[0]
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise UsageError(f"output: {path} is not a journal of hf-geosharp; choose another folder")
        found = differences(header, self._header)
        if found:
            raise UsageError(
                f"output: {path} belongs to another run: {'; '.join(found)}. Choose another folder, or delete the "
                "journal to start anew"
            )
        return lines[1:]

    def start(self) -> None:
        """Opens this rank's own file and drops its unfinished last line; no other run can write to it meanwhile.

        Raises:
            GeosharpError: another run writes there, or the file system refuses.
        """
        path = self.folder / f"journal-{self.rank}.jsonl"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            _lock(self._file, path)
            lines, end = _whole_lines(path)
            os.ftruncate(self._file, end)
        except OSError as error:
            self.close()
            raise GeosharpError(f"output: cannot write {path}: {error.strerror or error}") from error
        except GeosharpError:
            self.close()
            raise
        if not lines:
            self.append(self._header)
            atomic.sync_folder(self.folder)

    def append(self, line: Mapping[str, Any]) -> None:
        """Adds a line, which is on disk when this returns.

        Raises:
            GeosharpError: the file system refuses (a full disk, a quota); what was there before is whole.
        """
        assert self._file is not None
        data = (json.dumps(_plain(line), ensure_ascii=False) + "\n").encode()
        before = os.fstat(self._file).st_size
        try:
            _write_all(self._file, data)
            os.fsync(self._file)
        except OSError as error:
            # Room for less is always there.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before)
            raise GeosharpError(
                f"output: cannot write {self.folder / f'journal-{self.rank}.jsonl'}: {error.strerror or error}. All "
                "batches finished before are kept: make room and run the same command again to continue"
            ) from error

    def close(self) -> None:
        """Gives the file free."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def write_result(folder: str | os.PathLike[str], text: str) -> None:
    """Writes ``result.json`` into a folder, whole or not at all.

    Raises:
        GeosharpError: the file system refuses.
    """
    path = Path(folder) / RESULT
    try:
        atomic.put(path, text.encode())
    except OSError as error:
        raise GeosharpError(f"output: cannot write {path}: {error.strerror or error}") from error


def differences(theirs: Header, mine: Header, who: tuple[str, str] = ("there", "here")) -> list[str]:
    """In words, what two headers differ in; empty if in nothing."""
    found = []
    for name in dict.fromkeys([*theirs, *mine]):
        a, b = theirs.get(name), mine.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += [f"{name}: {text}" for text in differences(a, b, who)]
        elif a != b:
            found.append(f"{name} {_short(a)} {who[0]}, {_short(b)} {who[1]}")
    return found


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, shapes, dtypes and contents, in the order given; devices do not matter."""
    import torch

    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().reshape(-1).cpu().contiguous()
        total.update(flat.view(torch.uint8).numpy().data)
    return total.hexdigest()


def digest_batches(batches: Sequence[Mapping[str, Any]], left_out: Sequence[str] = ()) -> str:
    """The :func:`digest` of the tensors and flags of all batches, but those under some keys."""
    import torch

    return digest(
        (f"{i} {key}", torch.as_tensor(batch[key]))
        for i, batch in enumerate(batches)
        for key in sorted(batch)
        if key not in left_out and isinstance(batch[key], (torch.Tensor, bool))
    )


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from JSON: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain


def _short(value: Any) -> str:
    text = "missing" if value is None else value if isinstance(value, str) else json.dumps(value)
    if re.fullmatch(r"[0-9a-f]{64}", text):
        # Of a digest the beginning says enough.
        return f"{text[:12]}..."
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _whole_lines(path: Path) -> tuple[list[Any], int]:
    """The finished lines of a file, and where they end."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise GeosharpError(f"output: cannot read {path}: {error.strerror or error}") from error
    raw = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    lines: list[Any] = []
    for number, line in enumerate(raw):
        try:
            lines.append(json.loads(line))
        except ValueError:
            if number < len(raw) - 1:
                raise DataError(
                    f"output: line {number + 1} of {path} is damaged; delete the file to take its batches again"
                ) from None
            # After a power cut the last line may be there in length only.
            return lines, sum(map(len, raw[:-1]))
    return lines, sum(map(len, raw))


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(file, view)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]


def _lock(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"output: another run is writing {path}; wait for it, or choose another folder") from None
    except OSError:
        # Some network file systems have no locks; then nobody is kept out.
        return
