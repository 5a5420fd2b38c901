"""Reading TensorBoard's event files, and a run from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from megatron.boost.plotting.event_file import CutOff, is_event_file, read_values
from megatron.boost.plotting.event_run import read_events
from tests.support.event_files import Entry, scalars, text, write_event_file, write_records

ROOT = Path(__file__).resolve().parents[2]
NAME = "events.out.tfevents.1000.host"
LOSSES = [(step, 8.0 - step / 4) for step in range(1, 9)]


def test_event_files_are_told_by_their_names() -> None:
    names = (NAME, f"{NAME}.v2", "run.log", "events.out")
    assert [is_event_file(Path("runs") / name) for name in names] == [True, True, False, False]


def test_numbers_and_texts_are_read_however_they_are_stored(tmp_path: Path) -> None:
    entries = [
        Entry("a", 3, 0.0, 1.5),
        Entry("b", 300, np.float32(-2.5), 2.5),
        Entry("c", 1 << 40, np.array(1e300), 3.5),
        Entry("d", 0, np.array([0.75]), 4.5),
        Entry("é", 8, float("nan"), 5.5),
        text("seq_length", "256"),
        Entry("histogram", 9, np.ones((2, 3)), 6.5),
        Entry("empty", 9, np.ones(0), 6.5),
    ]
    write_event_file(tmp_path / NAME, entries)

    values = list(read_values(tmp_path / NAME))

    assert [value.tag for value in values] == [entry.tag for entry in entries]
    assert [value.step for value in values] == [entry.step for entry in entries]
    assert [value.wall_time for value in values] == [entry.wall_time for entry in entries]
    assert [value.number for value in values[:4]] == [0.0, -2.5, 1e300, 0.75]
    assert values[4].number != values[4].number
    assert [value.number for value in values[5:]] == [None] * 3
    assert [value.text for value in values] == [None] * 5 + ["256", None, None]


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("lm loss", torch.tensor(2.5), 7)
        writer.add_text("seq_length", "256")
        writer.add_histogram("weights", torch.arange(8.0), 7)
        writer.add_hparams({"lr": 0.1}, {"hparam/loss": 1.0}, run_name=".")
    files = sorted(tmp_path.iterdir())
    values = {value.tag: value for file in files for value in read_values(file)}
    assert (values["lm loss"].number, values["lm loss"].step) == (2.5, 7)
    assert values["seq_length/text_summary"].text == "256"
    assert values["weights"].number is None
    assert values["_hparams_/experiment"].number is None


@pytest.mark.parametrize("missing", [1, 4, 15, 40])
def test_what_stands_before_a_cut_off_record_is_read(tmp_path: Path, missing: int) -> None:
    whole = write_event_file(tmp_path / NAME, scalars(LOSSES))
    complete = len(list(read_values(tmp_path / NAME)))
    (tmp_path / NAME).write_bytes(whole[:-missing])

    values = []
    with pytest.raises(CutOff):
        values.extend(read_values(tmp_path / NAME))
    run = read_events([tmp_path / NAME], "run")

    assert complete == 3 * len(LOSSES)
    assert len(run.points) == len(LOSSES)
    assert run.incomplete == 1


@pytest.mark.parametrize("at", [2, 9, 20, -2], ids=["length", "its CRC", "data", "their CRC"])
def test_a_damaged_record_ends_the_file(tmp_path: Path, at: int) -> None:
    entries = scalars(LOSSES)
    before = write_event_file(tmp_path / NAME, entries[:-3])
    through = write_event_file(tmp_path / NAME, entries[:-2])
    damaged = bytearray(write_event_file(tmp_path / NAME, entries))
    damaged[(len(through) if at < 0 else len(before)) + at] ^= 1
    (tmp_path / NAME).write_bytes(damaged)

    run = read_events([tmp_path / NAME], "run")

    assert [(point.step, point.loss) for point in run.points] == LOSSES[:-1]
    assert run.incomplete == 1


def test_records_of_something_else_are_no_events(tmp_path: Path) -> None:
    write_records(tmp_path / NAME, [b"\xff\xff"])
    with pytest.raises(CutOff):
        list(read_values(tmp_path / NAME))


def test_reading_needs_no_tensorflow_and_says_nothing(tmp_path: Path) -> None:
    """Where TensorFlow is installed, it stays out too; here a package of its name, which fails."""
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was started')\n")
    write_event_file(tmp_path / NAME, [*scalars(LOSSES), text("seq_length", "32")])
    program = (
        "import sys; from pathlib import Path; from megatron.boost.plotting import event_file\n"
        "assert 'tensorboard' not in sys.modules\n"
        f"print(len(list(event_file.read_values(Path({str(tmp_path / NAME)!r})))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (f"{3 * len(LOSSES) + 1}\n", "")


def test_a_run_is_what_megatron_writes(tmp_path: Path) -> None:
    entries = scalars(LOSSES)
    entries.insert(0, text("seq_length", "32"))
    entries.append(Entry("lm loss validation", 8, 5.5, 1050.0))
    entries.append(Entry("lm loss validation vs samples", 32, 5.5, 1050.0))
    # Of the test set, after it and under the same name.
    entries.append(Entry("lm loss validation", 8, 9.5, 1060.0))
    entries.append(Entry("lm loss validation-wiki", 8, 4.5, 1060.0))
    entries.append(Entry("lm loss validation-wiki ppl", 8, 90.0, 1060.0))
    write_event_file(tmp_path / NAME, entries)

    run = read_events([tmp_path / NAME], "run")

    assert [(point.step, point.loss) for point in run.points] == LOSSES
    assert run.validations == {"": {8: 5.5}, "wiki": {8: 4.5}}
    assert run.x("tokens") == [4.0 * 32 * step for step, _ in LOSSES]
    assert run.x("time") == [2.0 * number for number in range(8)]
    assert run.incomplete == 0


def test_a_resumed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Whatever order the files' names have: the clock decides."""
    late, early = tmp_path / f"{NAME}.a", tmp_path / f"{NAME}.b"
    first = [*scalars(LOSSES, begin=1000.0), Entry("lm loss validation", 8, 5.5, 1020.0)]
    write_event_file(early, first, begin=999.0)
    again = [(step, 1.0) for step in range(5, 7)]
    write_event_file(late, scalars(again, begin=9000.0), begin=8999.0)

    run = read_events([late, early], "run")

    assert [(point.step, point.loss) for point in run.points] == LOSSES[:4] + again
    assert run.validations == {"": {}}
    # Four losses of the first process, two of the second; not the hours between them.
    assert run.x("time")[-1] == 3 * 2.0 + 2.0


def test_files_without_the_loss_are_refused_with_what_they_have(tmp_path: Path) -> None:
    write_event_file(tmp_path / NAME, [Entry("loss/train", 1, 3.0), Entry("accuracy", 1, 0.5)])
    with pytest.raises(ValueError, match="run: .* no scalar 'lm loss'; it has accuracy, loss/tra"):
        read_events([tmp_path / NAME], "run")
