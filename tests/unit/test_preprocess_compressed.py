"""Compressed input: the documents of the plain file, and every kind of damage noticed."""

import gzip
import math
import tracemalloc

import pytest
import zstandard

from megatron.boost.preprocessing import pieces
from megatron.boost.preprocessing.inputs import InputFile
from megatron.boost.preprocessing.records import BadRecord, Position, RecordReader, parse_texts
from tests.support.preprocessing import TEXTS, json_lines, write_compressed

COMPRESS = {".gz": gzip.compress, ".zst": zstandard.compress}
SUFFIXES = tuple(COMPRESS)
LINES = json_lines(f"{text} {number}" for number in range(300) for text in TEXTS)

START = Position()


def reader_of(path, position=START):
    return RecordReader([InputFile.of(path)], position)


def contents(records):
    return [record[1:] for record in records]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_records_are_those_of_the_plain_file(tmp_path, monkeypatch, name, suffix):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 100_000)
    plain = write_compressed(tmp_path / name, LINES)
    packed = write_compressed(tmp_path / f"{name}{suffix}", LINES)
    assert packed.stat().st_size < len(LINES) / 10

    places = []
    for record in (reader := reader_of(plain)):
        places.append((reader.position, record))
    records = [record for _, record in places]

    assert len(records) == (1500 if name == "a.jsonl" else 9)
    assert contents(reader_of(packed)) == contents(records)
    for number in (0, len(records) // 2, len(records) - 1):
        position = places[number][0]
        assert contents(reader_of(packed, position)) == contents(records[number + 1 :])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_few_bytes_that_stand_for_many_are_not_decompressed_at_once(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](b"\n" * 100_000_000))
    assert path.stat().st_size < 100_000

    tracemalloc.start()
    records = sum(1 for _ in reader_of(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert records == math.ceil(100_000_000 / pieces.PIECE_BYTES)
    assert peak < 20_000_000


def broken(content, damage, suffix):
    packed = COMPRESS[suffix](content)
    if damage == "early end":
        return packed[: len(packed) * 2 // 3]
    if damage == "early end of the last":
        return packed + packed[:-3]
    if damage == "other format":
        return content
    if damage == "rubbish after it":
        return packed + b"rubbish after it"
    middle = len(packed) // 2
    return (
        packed[:middle]
        + bytes(byte ^ 0xFF for byte in packed[middle : middle + 64])
        + packed[middle + 64 :]
    )


DAMAGES = {
    "early end": "ends early",
    "early end of the last": "ends early",
    "other format": "is damaged",
    "rubbish after it": "is damaged",
    "flipped bits": "is damaged",
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_after_the_good_lines_before_it(tmp_path, suffix, damage):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(broken(LINES, damage, suffix))

    *good, last = reader_of(path)

    if damage != "flipped bits":  # which a checksum at the end tells
        content = b"".join(record.data for record in good)
        assert (LINES + LINES).startswith(content)
    with pytest.raises(BadRecord) as error:
        parse_texts(last, ["text"])
    assert str(error.value).startswith(
        f"{path}, line {len(good) + 1}: the compressed file {DAMAGES[damage]}"
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damage_to_a_text_file_ends_its_document(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 10_000)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(broken(LINES, "early end of the last", suffix))

    *good, last = reader_of(path)

    assert good[0].piece.first
    assert not any(record.piece.last for record in good)
    assert last.piece.last
    assert not last.piece.first
    with pytest.raises(BadRecord, match=rf"a\.txt\{suffix}: the compressed file ends early"):
        parse_texts(last, ["text"])


def test_a_damaged_short_text_file_is_no_document(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"text")[:-4])

    (record,) = reader_of(path)

    assert record.piece.first
    assert record.piece.last
    assert record.fault == "the compressed file ends early"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_empty_file_is_named(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    for content in (b"", COMPRESS[suffix](b"")):
        path.write_bytes(content)
        with pytest.raises(BadRecord, match="the file is empty"):
            parse_texts(*reader_of(path), ["text"])
