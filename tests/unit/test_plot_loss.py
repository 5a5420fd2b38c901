"""`tools/plot_loss.py`: pictures, pages and numbers of runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from megatron.boost.plotting.figure import smoothed
from megatron.boost.plotting.loss_plot import LossPlot
from megatron.boost.plotting.sources import read_runs
from tests.support.event_files import Entry, scalars, write_event_file
from tests.support.event_files import text as text_entry
from tests.support.tools import load_tool
from tests.support.training_output import iteration_line, validation_line

STEPS = range(10, 210, 10)


def loss_at(step: int, start: float = 8.0) -> float:
    return start - step / 50


def log_text(start: float = 8.0, milliseconds: float = 100.0) -> str:
    text = "".join(iteration_line(s, 200, loss_at(s, start), milliseconds) for s in STEPS)
    return text + validation_line(200, start - 3.5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two logs of the same name and a TensorBoard folder with one run."""
    for name, start in (("btp", 8.0), ("full-rank", 7.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").write_text(log_text(start))
    entries = scalars([(step, loss_at(step, 7.0)) for step in STEPS])
    entries += [text_entry("seq_length", "32"), Entry("lm loss validation", 200, 3.25)]
    write_event_file(tmp_path / "board" / "events.out.tfevents.1000.host", entries)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plot_loss(*argv: object) -> None:
    load_tool("plot_loss").main([*map(str, argv)])


class Page(HTMLParser):
    """The tags of a page with their attributes, and the text inside of each kind of tag."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.words.setdefault(self._open[-1], []).append(data)


def test_logs_and_event_files_in_one_picture_on_one_page_and_as_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot_loss(
        *("btp/log.txt", "full-rank/log.txt", "TB=board"),
        *("--output", "new/loss.png", "--html", "loss.html", "--json", "loss.json"),
        *("--smooth", 5),
    )

    with Image.open("new/loss.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    for color in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)):
        assert (pixels == color).all(axis=-1).sum() > 500
    numbers = json.loads(Path("loss.json").read_text())
    assert (numbers["x"], numbers["smooth"]) == ("steps", 5)
    for key, start in (("btp_log", 8.0), ("full_rank_log", 7.5), ("tb", 7.0)):
        assert numbers[f"{key}_points"] == len(STEPS)
        assert numbers[f"{key}_last_step"] == 200
        assert numbers[f"{key}_last_loss"] == pytest.approx(loss_at(180, start), abs=1e-5)
        assert numbers[f"{key}_lowest_loss"] == pytest.approx(loss_at(200, start), abs=1e-5)
        assert numbers[f"{key}_nan_points"] == numbers[f"{key}_incomplete_entries"] == 0
    assert numbers["btp_log_seconds"] == pytest.approx(20.0)
    assert numbers["btp_log_tokens"] is None
    assert numbers["tb_tokens"] == 200 * 4 * 32
    assert numbers["tb_seconds"] == 19 * 2.0
    assert (numbers["btp_log_validation_loss"], numbers["tb_validation_loss"]) == (4.5, 3.25)
    said = capsys.readouterr().out
    assert "written: new/loss.png" in said and "written: loss.html" in said
    assert re.search(r"btp/log\W+200\W+4\.4000\W+4\.0000\W+4\.5000\W+20 s", said)


def test_the_page_stands_alone_light_and_dark(folder: Path) -> None:
    plot_loss("a <b> & c=btp/log.txt", "--html", "loss.html")
    text = Path("loss.html").read_text()
    page = Page(text)

    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "data"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "url(http" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text
    svg = text[text.index("<svg") : text.index("</svg>") + len("</svg>")]
    ElementTree.fromstring(svg)
    # What is black or white would be lost on the ground of one of the two.
    assert not re.search(r"#0{6}|#0{3}\b|#f{6}|#f{3}\b|\bblack\b|\bwhite\b", svg)
    assert svg.count("currentColor") > 10
    assert "a <b> & c" in page.words["td"] and "200" in page.words["td"]
    assert not Path("loss.png").exists()


def test_values_show_where_the_curves_are(folder: Path) -> None:
    """The places that are pointed at, against those where matplotlib drew the line."""
    plot = LossPlot(runs=read_runs(["btp/log.txt"]))
    svg = plot.html()
    line = re.search(r'<path d="([^"]*)" [^>]*stroke: #0072b2; stroke-width: 1.8', svg)
    assert line is not None
    drawn = [tuple(map(float, p)) for p in re.findall(r"([\d.]+) ([\d.]+) *\n?", line[1])]
    circles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>([^<]*)<', svg)
    *of_training, of_validation = circles

    assert [words for _, _, words in of_training] == [
        f"log: step {step}, {loss_at(step):.4f}" for step in STEPS
    ]
    assert of_validation[2] == "log, validation: step 200, 4.5000"
    places = [(float(x), float(y)) for x, y, _ in of_training]
    # A straight line is drawn with fewer points; both ends are among them.
    assert drawn[0] == pytest.approx(places[0], abs=0.02)
    assert drawn[-1] == pytest.approx(places[-1], abs=0.02)
    assert float(of_validation[0]) == places[-1][0]
    across = places[-1][1] - places[0][1]
    expected = places[0][1] + across * (8.0 - 4.5 - 0.2) / (8.0 - 4.0 - 0.2)
    assert float(of_validation[1]) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("unit", "label", "ends"),
    [
        ("steps", "step", (10, 200)),
        ("tokens", "tokens", (10 * 4 * 256, 200 * 4 * 256)),
        ("time", "seconds of training", (1.0, 20.0)),
    ],
)
def test_a_curve_over_steps_tokens_and_time(
    folder: Path, unit: str, label: str, ends: Sequence[float]
) -> None:
    runs = read_runs(["btp/log.txt"])
    figure = LossPlot(runs=runs, unit=unit, sequence_length=256).figure()  # type: ignore[arg-type]
    (axes,) = figure.axes
    line, validation = axes.lines
    x = line.get_xdata()
    assert axes.get_xlabel() == label
    assert (x[0], x[-1]) == pytest.approx(tuple(ends))
    assert list(validation.get_xdata()) == pytest.approx([ends[1]])
    assert list(line.get_ydata()) == pytest.approx([loss_at(step) for step in STEPS], abs=1e-5)


def test_long_trainings_are_shown_in_hours(folder: Path) -> None:
    Path("slow.log").write_text(log_text(milliseconds=3_600_000.0))
    figure = LossPlot(runs=read_runs(["slow.log", "btp/log.txt"]), unit="time").figure()
    assert figure.axes[0].get_xlabel() == "hours of training"
    assert figure.axes[0].lines[0].get_xdata()[-1] == pytest.approx(200.0)


def test_smoothing_keeps_gaps_and_does_not_spread_them() -> None:
    nan = float("nan")
    assert smoothed([4.0, nan, 2.0, 6.0], 3) == pytest.approx([4.0, nan, 3.0, 4.0], nan_ok=True)
    assert smoothed([nan, 1.0], 2) == pytest.approx([nan, 1.0], nan_ok=True)
    assert smoothed([3.0, float("inf"), 1.0], 1) == [3.0, float("inf"), 1.0]


def test_many_points_make_no_large_page(folder: Path) -> None:
    text = "".join(iteration_line(step, 8000, 5.0 + step % 7, 1.0) for step in range(1, 8001))
    Path("long.log").write_text(text)
    plot_loss("long.log", "--html", "loss.html", "--smooth", "100")
    page = Page(Path("loss.html").read_text())
    pictures = [a["xlink:href"] for tag, a in page.tags if tag == "image"]
    assert pictures and all(str(p).startswith("data:image/png;base64,") for p in pictures)
    assert Path("loss.html").stat().st_size < 500_000


def test_runs_are_named_by_what_tells_them_apart(folder: Path) -> None:
    def labels(*sources: str) -> list[str]:
        return [run.label for run in read_runs(sources)]

    assert labels("btp/log.txt") == ["log"]
    assert labels("btp/log.txt", "full-rank/log.txt") == ["btp", "full-rank"]
    assert labels("btp/log.txt", "board") == ["log", "board"]
    assert labels("x=btp/log.txt", "y=full-rank/log.txt") == ["x", "y"]
    Path("a=b.log").write_text(log_text())
    assert labels("a=b.log") == ["a=b"]


def test_each_folder_of_event_files_below_is_a_run(folder: Path) -> None:
    for name in ("one", "two/deeper"):
        entries = scalars([(1, 5.0), (2, 4.0)])
        write_event_file(Path("boards") / name / "events.out.tfevents.7.h", entries)
    assert [run.label for run in read_runs(["boards"])] == ["one", "deeper"]


def test_what_is_left_out_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = log_text().replace(" lm loss: 7.200000E+00 |", "")
    Path("run.log").write_text(text[:-300])
    plot_loss("run.log", "--output", "loss.png")
    said = capsys.readouterr().out
    assert "note: run: no number at step 40\n" in said
    assert "note: run: incomplete entries left out: 1\n" in said


def test_means_over_unlike_numbers_of_steps_are_said(folder: Path) -> None:
    Path("often.log").write_text(
        "".join(iteration_line(step, 200, loss_at(step), 100.0) for step in range(1, 201))
    )
    notes = LossPlot(runs=read_runs(["often.log", "board"]), window=5).notes()
    assert notes == ["the mean of 5 spans unlike numbers of steps: 5 (often), 50 (board)"]
    assert not LossPlot(runs=read_runs(["often.log", "board"])).notes()
    assert not LossPlot(runs=read_runs(["btp/log.txt", "board"]), window=5).notes()


def test_without_a_file_to_write_a_picture_is_made(folder: Path) -> None:
    plot_loss("btp/log.txt", "--json", "numbers.json")
    assert not Path("loss.png").exists()
    plot_loss("btp/log.txt")
    assert Path("loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere.log"], "nowhere.log: there is no such file or folder"),
        (["empty.log"], "empty.log: is empty"),
        (["words.log"], "words.log: has no training loss"),
        (["btp"], "btp: is a folder without TensorBoard's event files .*value: btp/log.txt"),
        (["none"], r"none: is a folder without TensorBoard's event files \(\*tfevents\*\)$"),
        (["btp/log.txt", "./btp/log.txt"], "btp/log.txt: is given 2 times"),
        (["x=btp/log.txt", "x=full-rank/log.txt"], "x: names 2 runs; give each a name"),
        (["btp/log.txt", "--x", "tokens"], "--x tokens: log does not say .* give --seq-length"),
        (["nosamples", "--x", "tokens"], "--x tokens: nosamples .*nearest legal value: steps"),
    ],
)
def test_what_cannot_be_drawn_is_refused(folder: Path, argv: list[str], message: str) -> None:
    Path("empty.log").touch()
    Path("words.log").write_text("no line of Megatron's\n")
    Path("none").mkdir()
    entries = [entry for entry in scalars([(1, 5.0)]) if "samples" not in entry.tag]
    entries.append(text_entry("seq_length", "32"))
    write_event_file(Path("nosamples") / "events.out.tfevents.1.h", entries)
    with pytest.raises(ValueError, match=message):
        plot_loss(*argv, "--output", "loss.png")
    assert not Path("loss.png").exists()


@pytest.mark.parametrize("run", ["btp/log.txt", "BTP=btp/log.txt"])
def test_a_run_is_not_written_over(folder: Path, run: str) -> None:
    before = Path("btp/log.txt").read_bytes()
    with pytest.raises(ValueError, match="--json btp/log.txt: is one of the runs"):
        plot_loss(run, "--json", "btp/log.txt")
    assert Path("btp/log.txt").read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--output", "loss.pdf"], "--output: loss.pdf: a PNG is written; nearest .*: loss.png"),
        (["--smooth", "0"], "--smooth: 0 is not a whole number of at least 1"),
        (["--x", "epochs"], "--x: invalid choice: 'epochs'"),
    ],
)
def test_flags_that_make_no_sense_are_one_line(
    folder: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        plot_loss("btp/log.txt", *argv)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert re.match(f"error: {message}", said) and said.count("\n") == 1
