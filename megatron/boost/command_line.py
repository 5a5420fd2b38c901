"""What every command of ours does alike: one-line errors, exit codes, results as JSON."""

import argparse
import difflib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130


class ToolParser(argparse.ArgumentParser):
    """An argument parser whose errors are one `error: …` line on standard error and exit code 2.

    Flags are never abbreviated, and an unknown flag is answered with the nearest known one.
    """

    def __init__(self, description: str) -> None:
        super().__init__(description=description, allow_abbrev=False)
        self.add_argument(
            "--json", type=output_file, metavar="FILE", help="write the result as JSON"
        )

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse `args`; unlike argparse, name the flag that an unknown one was meant to be."""
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"{unknown[0]}: no such argument{self._nearest_flag(unknown[0])}")
        return known

    def error(self, message: str) -> NoReturn:
        """Print `error: message` in one line and exit with code 2."""
        print_error(message.removeprefix("argument "))
        sys.exit(BAD_INPUT)

    def _nearest_flag(self, flag: str) -> str:
        flags = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(flag, flags, n=1)
        return f"; the nearest is {near[0]}" if near else ""


def whole_number(minimum: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `minimum`."""

    def parse(text: str) -> int:
        wanted = f"a whole number of at least {minimum}"
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        if number < minimum:
            raise argparse.ArgumentTypeError(
                f"{text} is not {wanted}; the nearest legal value is {minimum}"
            )
        return number

    return parse


def output_file(text: str) -> Path:
    """An argparse type: a file that `write_text` can write, there or not yet."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is a folder; nearest legal value: {path / 'result.json'}"
        )
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no regular file, and a file is written")
    if reason := why_unwritable(path):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {reason}")
    return path


def why_unwritable(path: Path) -> str:
    """Why no file can be made at a path, whose folder may have to be made first; "" where one can.
    Nothing is left behind by finding that out."""
    folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not folder.is_dir():
        return f"{folder} is no folder"
    try:
        # What the permissions say is not all: the disk may be mounted to be read only.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def print_error(message: str) -> None:
    """Print `error: message` on standard error, line breaks turned into blanks."""
    print("error: " + " ".join(message.split()), file=sys.stderr)


def run_tool(main: Callable[[Sequence[str] | None], None]) -> NoReturn:
    """Run a tool's `main(argv)` on the command line and exit.

    Exit code 0 when it returns, 2 on bad input (`ValueError`), 1 when the machine failed it
    (`OSError`: a full disk, a dead child process), 130 on Ctrl-C. The last three print one
    `error: …` line; any other exception is a fault of ours and keeps its traceback.
    """
    try:
        main(None)
    except ValueError as error:
        print_error(str(error))
        sys.exit(BAD_INPUT)
    except OSError as error:
        print_error(str(error))
        sys.exit(FAILED)
    except KeyboardInterrupt as interrupt:
        print_error(str(interrupt) or "interrupted")
        sys.exit(INTERRUPTED)
    sys.exit(0)


def write_json(path: Path, result: Mapping[str, object]) -> None:
    """Write a flat `result` to `path` as `write_text` does."""
    write_text(path, json.dumps(result, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, under a temporary name first, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
