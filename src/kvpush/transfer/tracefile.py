"""Appends transfer records to a file of JSON lines; engines of one host may share it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from kvpush.transfer.trace import TransferTrace, to_line

_log = logging.getLogger(__name__)


class TraceFile:
    """Each record is one write at the file's end, so that lines of several processes do not mix.

    Raises OSError if the file cannot be opened. A file that cannot be written later is given up, with one line in the
    log: an engine does not end for that.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, traces: Iterable[TransferTrace]) -> None:
        lines = b"".join(map(to_line, traces))
        if self._descriptor is None or not lines:
            return
        try:
            written = os.write(self._descriptor, lines)
            if written < len(lines):
                raise OSError(f"{written} of {len(lines)} bytes were written")
        except OSError as error:
            _log.error("kvpush: no more transfer records go to %s: %s", self._path, error)
            self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
