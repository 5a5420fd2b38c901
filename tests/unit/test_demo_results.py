"""From logs and reports of collectives to numbers, table, curves and page."""

import io
import json
from html.parser import HTMLParser

import pytest
from rich.console import Console

from megatron.boost.demo.curves import loss_figure
from megatron.boost.demo.launch import TrainingFailed
from megatron.boost.demo.recipe import COLA_BTP, COLA_VANILLA, FULL_RANK, STRATEGIES, Recipe
from megatron.boost.demo.report import html_report
from megatron.boost.demo.results import flat_results, read_result
from megatron.boost.demo.run import findings_of
from megatron.boost.demo.table import ROWS, terminal_table
from megatron.boost.plotting.figure import save_png, smoothed, svg
from megatron.boost.training_log import TrainingLog
from tests.support.demo_results import STEPS, collectives_report, losses_of_run, made_up_result
from tests.support.training_output import training_lines


@pytest.fixture
def results(tmp_path):
    return [
        made_up_result(tmp_path, COLA_BTP, milliseconds=200.0),
        made_up_result(tmp_path, FULL_RANK, milliseconds=300.0, parameters=16_800_000),
        made_up_result(
            tmp_path,
            COLA_VANILLA,
            milliseconds=500.0,
            forward_all_reduce_calls_per_layer=7,
            forward_all_reduce_mib_per_layer=20.0,
            forward_all_gather_calls_per_layer=1,
            forward_all_gather_mib_per_layer=1.0,
        ),
    ]


def test_a_result_is_what_log_and_report_say(results):
    btp = results[0]

    assert btp.losses == pytest.approx(losses_of_run(), abs=1e-5)
    assert btp.loss == pytest.approx(sum(losses_of_run()[-4:]) / 4, abs=1e-5)
    assert btp.validation_loss == 5.25
    assert btp.iteration_ms == 200.0
    assert btp.tokens_per_second == 4 * 256 / 0.2
    assert (str(btp.forward), btp.forward.mib) == ("4 AR", 3.5)
    assert btp.parameters == 7_800_000
    assert btp.peak_memory_mib == 900.5
    assert (str(results[2].forward), results[2].forward.mib) == ("7 AR + 1 AG", 21.0)


def test_a_run_that_lacks_a_part_is_no_result(tmp_path):
    report = tmp_path / "collectives.json"
    report.write_text(json.dumps(collectives_report()))
    lines = training_lines([5.0] * STEPS, [10.0] * STEPS, 5.0)
    for output, missing in (
        (lines[:20], f"the log has 19 of {STEPS} iterations"),
        (lines[:-1], "no validation loss"),
    ):
        log = TrainingLog()
        for line in output:
            log.feed(line)
        with pytest.raises(TrainingFailed, match=f"CoLA, BTP: .*{missing}"):
            read_result(COLA_BTP, Recipe(steps=STEPS), log, report)


def test_json_is_flat_with_units_in_the_names(results):
    flat = flat_results(results)

    assert flat["cola_btp_iteration_ms"] == 200.0
    assert flat["full_rank_parameters"] == 16_800_000
    assert flat["cola_vanilla_forward_all_gather_calls_per_layer"] == 1
    assert flat["cola_vanilla_forward_mib_per_layer"] == 21.0
    assert all(isinstance(value, int | float) for value in flat.values())
    assert json.loads(json.dumps(flat)) == flat


def test_the_table_has_a_column_a_run_and_fits_a_terminal(results):
    text = io.StringIO()
    Console(file=text, width=80).print(terminal_table(results))

    rows = {}
    for line in text.getvalue().splitlines():
        if "│" in line:
            heading, *cells = (cell.strip() for cell in line.split("│")[1:-1])
            rows[heading] = cells
    assert rows == {
        "loss": ["4.250", "4.250", "4.250"],
        "validation loss": ["5.250", "5.250", "5.250"],
        "tokens/s": ["5,120", "3,413", "2,048"],
        "iteration, ms": ["200", "300", "500"],
        "collectives per layer, forward": ["4 AR", "4 AR", "7 AR + 1 AG"],
        "collectives per layer, backward": ["4 AR", "4 AR", "4 AR"],
        "MiB per layer, forward": ["3.50", "3.50", "21.00"],
        "MiB per layer, backward": ["3.50", "3.50", "3.50"],
        "parameters": ["7.80 M", "16.80 M", "7.80 M"],
        "peak memory of a rank, MiB": ["900", "900", "900"],
    }


def test_smoothing_looks_back_only():
    assert smoothed([4.0, 2.0, 0.0], 10) == [4.0, 3.0, 2.0]
    falling = [float(number) for number in range(30, 0, -1)]
    assert smoothed(falling, 10)[-1] == pytest.approx(5.5)


def test_curves_show_every_run_over_steps_and_over_time(results):
    figure = loss_figure(results)

    over_steps, over_time = figure.axes
    strong_by_steps = dict(zip(STRATEGIES, over_steps.lines[1::2], strict=True))
    strong_by_time = dict(zip(STRATEGIES, over_time.lines[1::2], strict=True))
    assert strong_by_steps[COLA_BTP].get_xdata()[-1] == STEPS
    # Ten iterations of a second, then thirty at each run's speed.
    assert strong_by_time[COLA_BTP].get_xdata()[-1] == pytest.approx(10 + 30 * 0.2, abs=1e-3)
    assert strong_by_time[COLA_VANILLA].get_xdata()[-1] == pytest.approx(10 + 30 * 0.5, abs=1e-3)
    assert over_steps.lines[0].get_ydata() == pytest.approx(losses_of_run(), abs=1e-5)
    names = [text.get_text() for text in over_steps.get_legend().get_texts()]
    assert names == [strategy.title for strategy in STRATEGIES]


def test_a_picture_is_saved(results, tmp_path):
    save_png(loss_figure(results), tmp_path / "loss.png")

    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


class Page(HTMLParser):
    """Collects the tags, what they refer to and the table cells of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.references, self.cells = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data"):
                self.references.append(value)

    def handle_data(self, data):
        self.cells.append(data)


def test_the_page_stands_alone_and_says_everything(results):
    text = html_report(
        ["BTP is fast & small."],
        results,
        svg(loss_figure(results)),
        {"Machine": {"processor": "A <fast> one", "commit": "abc1234"}},
        {"CoLA, BTP": "python pretrain_gpt.py --lr '1e-3'"},
    )

    page = Page(text)
    assert all(reference.startswith("#") for reference in page.references)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "url(http" not in text
    assert "@import" not in text
    assert page.tags.count("svg") == 1
    for expected in (
        "BTP is fast & small.",
        "A <fast> one",
        "python pretrain_gpt.py --lr '1e-3'",
        "abc1234",
        "training loss",
    ):
        assert expected in page.cells
    for result in results:
        for row in ROWS:
            assert row.cell(result) in page.cells


def test_the_same_results_give_the_same_curves(results):
    assert svg(loss_figure(results)) == svg(loss_figure(results))


def test_findings_are_ratios_to_btp(results):
    speed, quality = findings_of(results)

    assert "takes 200 ms" in speed
    assert "full-rank 1.50 times" in speed
    assert "parallelism 2.50 times" in speed
    assert "7.8 M parameters against 16.8 M" in quality
