"""Reading TensorBoard's event files, and a run from them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from megatron.boost.plotting.event_file import (
    CutOff,
    is_event_file,
    masked_crc32c,
    read_values,
)
from megatron.boost.plotting.event_run import read_events
from tests.support.event_files import Entry, scalars, write_event_file

NAME = "events.out.tfevents.1000.host"
LOSSES = [(step, 8.0 - step / 4) for step in range(1, 9)]


@pytest.mark.parametrize(
    ("data", "crc"),
    # RFC 3720, B.4.
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_the_crc_is_the_one_of_the_standard(data: bytes, crc: int) -> None:
    turned = (masked_crc32c(data) - 0xA282EAD8) & 0xFFFFFFFF
    assert ((turned << 15) | (turned >> 17)) & 0xFFFFFFFF == crc


def test_an_event_file_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    # Of any file that TensorBoard writes: 24 bytes, `brain.Event:2` among them.
    (tmp_path / "real").write_bytes(bytes.fromhex("1800000000000000a37f4b22"))
    (tmp_path / "log").write_text(" [2025-11-30 07:30:00.123456] iteration        1/")
    (tmp_path / "short").write_bytes(b"\x18")
    written = write_event_file(tmp_path / NAME, [])
    assert written[:12] == (tmp_path / "real").read_bytes()
    assert [is_event_file(tmp_path / name) for name in ("real", NAME, "log", "short")] == [
        True,
        True,
        False,
        False,
    ]


def test_numbers_and_texts_are_read_however_they_are_stored(tmp_path: Path) -> None:
    entries = [
        Entry("a", 3, 0.0, 1.5),
        Entry("b", 300, -2.5, 2.5, "float"),
        Entry("c", 1 << 40, 1e300, 3.5, "double"),
        Entry("d", 0, 0.75, 4.5, "content"),
        Entry("seq_length", 7, "256", 5.5),
        Entry("é", 8, float("nan"), 6.5),
    ]
    write_event_file(tmp_path / NAME, entries)

    values = list(read_values(tmp_path / NAME))

    assert [value.tag for value in values] == ["a", "b", "c", "d", "seq_length/text_summary", "é"]
    assert [value.step for value in values] == [entry.step for entry in entries]
    assert [value.wall_time for value in values] == [entry.wall_time for entry in entries]
    assert [value.number for value in values[:4]] == [0.0, -2.5, 1e300, 0.75]
    assert (values[4].number, values[4].text) == (None, "256")
    assert values[5].number != values[5].number


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


def test_a_damaged_length_ends_the_file(tmp_path: Path) -> None:
    whole = bytearray(write_event_file(tmp_path / NAME, scalars(LOSSES)))
    (length,) = struct.unpack_from("<Q", whole)
    whole[12 + length + 4] ^= 1
    (tmp_path / NAME).write_bytes(whole)
    with pytest.raises(CutOff):
        list(read_values(tmp_path / NAME))


def test_a_run_is_what_megatron_writes(tmp_path: Path) -> None:
    entries = scalars(LOSSES)
    entries.insert(0, Entry("seq_length", 0, "32"))
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
