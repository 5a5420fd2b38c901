"""A quiet terminal: upstream's notices go to a log file, the training log lines stay.

Megatron warns on import about every optional package that is absent, logs each module's settings
and lists some 800 arguments. `quiet_output` must be entered before Megatron is imported.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from megatron.boost.patches.replacement import replaced

_LIST_BORDER = re.compile(r"-+ (end of )?arguments -+$")
_LISTED = re.compile(r"  \w+ \.* ")
_ABSENT_PACKAGE = re.compile(r"WARNING: one_logger package is required ")


@contextlib.contextmanager
def quiet_output(log_path: Path | None = None, verbose: bool = False) -> Iterator[Path | None]:
    """Context in which a log file gets everything and the terminal what a user wants to see.

    Away from the terminal stay `warnings`, log records below ERROR, the list of arguments and the
    notice that one_logger is absent. What is printed otherwise, errors and tracebacks stay on it.

    Args:
        log_path: this rank's log file, overwritten; None makes one in the folder for temporary
            files, whose name rank 0 prints.
        verbose: leaves everything on the terminal and writes no file.

    Yields:
        The log file's path, or None if `verbose`.
    """
    if verbose:
        yield None
        return
    rank = os.environ.get("RANK", "0")
    if log_path is None:
        handle, name = tempfile.mkstemp(prefix=f"megatron-rank{rank}-", suffix=".log")
        os.close(handle)
        log_path = Path(name)
        if rank == "0":
            print(f"> Megatron's notices: {log_path} (--verbose shows them here)", flush=True)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(log_path.open("w", buffering=1))
        stack.enter_context(_log_records_to(log))
        stack.enter_context(_warnings_to(log))
        output = _ShortOutput(sys.stdout, log)
        stack.callback(output.flush)
        stack.enter_context(contextlib.redirect_stdout(output))
        yield log_path


@contextlib.contextmanager
def _log_records_to(log: TextIO) -> Iterator[None]:
    """Sends log records to `log`, and those from ERROR on to their own handlers too.

    All loggers pass here, whatever handlers torch has set up before and Megatron sets up later.
    """
    to_log = logging.StreamHandler(log)
    to_log.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    call_handlers = logging.Logger.callHandlers

    def call_log_handler(logger: logging.Logger, record: logging.LogRecord) -> None:
        to_log.handle(record)
        if record.levelno >= logging.ERROR:
            call_handlers(logger, record)

    with replaced(logging.Logger, "callHandlers", call_log_handler):
        yield


@contextlib.contextmanager
def _warnings_to(log: TextIO) -> Iterator[None]:
    def show(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        log.write(warnings.formatwarning(message, category, filename, lineno, line))

    with replaced(warnings, "showwarning", show):
        yield


class _ShortOutput(io.TextIOBase):
    """Standard output that leaves the list of arguments out and writes everything to a log.

    Lines are told apart as they are complete, so an unfinished one is held back until `flush`.
    """

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self._terminal = terminal
        self._log = log
        self._line = ""
        self._in_list = False

    def write(self, text: str) -> int:
        """Passes `text` on, complete lines of it judged."""
        # A log handler that was given this output may outlive the log.
        if not self._log.closed:
            self._log.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if self._is_for_terminal(line):
                self._terminal.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Flushes the terminal, an unfinished line, such as a progress bar's, included."""
        if self._line and not self._in_list:
            self._terminal.write(self._line)
            self._line = ""
        self._terminal.flush()

    def _is_for_terminal(self, line: str) -> bool:
        border = _LIST_BORDER.match(line)
        if border:
            self._in_list = border[1] is None
            return False
        if self._in_list and _LISTED.match(line):
            return False
        # The list is over even if its end was written otherwise: no training log may be lost.
        self._in_list = False
        return not _ABSENT_PACKAGE.match(line)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The terminal's encoding."""
        return self._terminal.encoding

    def isatty(self) -> bool:
        """Whether the terminal is one."""
        return self._terminal.isatty()

    def fileno(self) -> int:
        """The terminal's file descriptor; what is written there passes by."""
        return self._terminal.fileno()
