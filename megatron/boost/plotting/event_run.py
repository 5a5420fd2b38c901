"""A run from what Megatron wrote for TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from megatron.boost.plotting.event_file import CutOff, Value, read_values
from megatron.boost.plotting.history import Point, Run

LOSS = "lm loss"
_LOSS_BY_SAMPLES = "lm loss vs samples"
_VALIDATION = re.compile(r"lm loss validation(?:-(\S+))?")
_SEQUENCE_LENGTH = "seq_length/text_summary"


def read_events(paths: Iterable[Path], label: str) -> Run:
    """The run that some event files tell of, each of which one process wrote.

    The time between two losses is that of the clock, evaluations and checkpoints included; from
    the end of one process to the next one's first loss none passes.

    Raises:
        ValueError: where none of them has a training loss.
    """
    run, tags = Run(label), set()
    # Their names hold the seconds of their beginning; it is in the first record too.
    files = sorted(paths, key=_beginning)
    for path in files:
        last_time: float | None = None
        try:
            for value in read_values(path):
                tags.add(value.tag)
                if value.tag == LOSS and value.number is not None:
                    seconds = value.wall_time - last_time if last_time is not None else 0.0
                    last_time = value.wall_time
                    run.add(Point(value.step, value.number, seconds, None))
                else:
                    _note(value, run)
        except CutOff:
            run.incomplete += 1
    if not run.points:
        found = ", ".join(sorted(tag for tag in tags if tag)[:5])
        holds = f"; it has {found}, …" if found else ""
        raise ValueError(f"{label}: its event files have no scalar '{LOSS}'{holds}")
    return run


def _beginning(path: Path) -> float:
    try:
        return next((value.wall_time for value in read_values(path)), 0.0)
    except CutOff:
        return 0.0


def _note(value: Value, run: Run) -> None:
    """What else an event says of the run."""
    validation = _VALIDATION.fullmatch(value.tag)
    if value.tag == _LOSS_BY_SAMPLES and run.points and run.points[-1].samples is None:
        # Written with the loss before it; its step is the number of samples.
        run.points[-1] = replace(run.points[-1], samples=value.step)
    elif validation is not None and value.number is not None:
        run.add_validation(validation[1] or "", value.step, value.number)
    elif value.tag == _SEQUENCE_LENGTH and value.text is not None and value.text.isdecimal():
        run.sequence_length = int(value.text)
