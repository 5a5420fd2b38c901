"""The demo as a whole, with trainings that only print."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megatron.boost.corpus import Corpus
from megatron.boost.demo import run as demo
from megatron.boost.demo.launch import TrainingFailed
from megatron.boost.demo.progress import show_run
from megatron.boost.demo.recipe import COLA_BTP, COLA_VANILLA, FULL_RANK, STRATEGIES, Recipe
from megatron.boost.training_log import Iteration
from tests.support.demo_results import STEPS, collectives_report
from tests.support.tools import TOOLS
from tests.support.training_output import training_lines

CORPUS = Corpus("c/train", "c/validation", "c/tokenizer", 4096, 90, 10, 1_000_000, 100_000)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose trainings print what a real one would, in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "prepare_corpus", lambda *args, **kwargs: CORPUS)
    output = training_lines([8 - step / 10 for step in range(STEPS)], [50.0] * STEPS, 4.5)
    (tmp_path / "output.txt").write_text("".join(output))
    (tmp_path / "pretrain_gpt.py").write_text(
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "assert os.environ['OMP_NUM_THREADS'] == '1'\n"
        "print(Path('output.txt').read_text())\n"
        "report = Path(sys.argv[sys.argv.index('--low-rank-comm-report') + 1])\n"
        f"report.write_text({json.dumps(collectives_report())!r})\n"
    )
    real_command = demo.training_command

    def without_launcher(*args):
        command = real_command(*args)
        return ["python", *command[command.index("pretrain_gpt.py") :]]

    monkeypatch.setattr(demo, "training_command", without_launcher)
    return tmp_path


def run_demo(checkout, terminal=False):
    text = io.StringIO()
    console = Console(file=text, width=160, force_terminal=terminal)
    result = demo.run_demo(checkout, Path("runs/demo"), Recipe(steps=STEPS), console)
    return result, text.getvalue()


def test_demo_leaves_table_report_picture_and_logs(checkout):
    result, text = run_demo(checkout)

    assert result["cola_btp_loss"] == pytest.approx(4.25, abs=1e-4)
    assert result["cola_vanilla_validation_loss"] == 4.5
    assert 0 < result["seconds"] < 300
    assert result["machine_python"] == sys.version.split()[0]
    for strategy in STRATEGIES:
        assert f"{strategy.title}: step 4/{STEPS}, loss 7.700, 20,480 tokens/s" in text
        log = checkout / "runs" / "demo" / strategy.folder / "log.txt"
        assert "validation loss at" in log.read_text()
    page = (checkout / "runs" / "demo" / "report.html").read_text()
    assert "--low-rank-tp vanilla" in page
    assert "c/train" in page
    assert str(checkout) not in page
    assert (checkout / "runs" / "demo" / "loss.png").is_file()
    assert not list((checkout / "runs" / "demo").glob("*.partial"))


def test_a_failing_run_ends_the_demo_and_leaves_no_old_report(checkout):
    run_demo(checkout)
    script = checkout / "pretrain_gpt.py"
    script.write_text(
        "import sys\n"
        "if 'vanilla' in sys.argv:\n"
        "    raise SystemExit('error: --low-rank-tp vanilla: not today')\n" + script.read_text()
    )

    with pytest.raises(TrainingFailed) as failure:
        run_demo(checkout)

    assert str(failure.value) == (
        "CoLA, vanilla TP: training failed with exit code 1: --low-rank-tp vanilla: not today "
        "(log: runs/demo/cola-vanilla/log.txt)"
    )
    assert not (checkout / "runs" / "demo" / "report.html").exists()
    assert not (checkout / "runs" / "demo" / "loss.png").exists()


def test_the_strategies_share_every_flag_but_their_own():
    def flags(strategy):
        command = demo.training_command(strategy, Recipe(), CORPUS, Path("."), Path("runs/demo"))
        values = {}
        for flag, value in zip(command, [*command[1:], "--"], strict=True):
            if flag.startswith("--"):
                values[flag] = None if value.startswith("--") else value
        return values

    btp, dense, vanilla = (flags(each) for each in (COLA_BTP, FULL_RANK, COLA_VANILLA))
    own = {"--low-rank-arch", "--low-rank-tp", "--low-rank-ratio", "--low-rank-comm-report"}
    for other in (dense, vanilla):
        assert {f: v for f, v in btp.items() if f not in own} == {
            f: v for f, v in other.items() if f not in own
        }
    assert (btp["--low-rank-arch"], dense["--low-rank-arch"]) == ("cola", "dense")
    # A rank would have no effect on full-rank layers, and is refused there.
    assert btp["--low-rank-ratio"] == vanilla["--low-rank-ratio"] == "0.25"
    assert "--low-rank-ratio" not in dense
    assert (btp["--low-rank-tp"], vanilla["--low-rank-tp"]) == ("btp", "vanilla")
    # What the design says the demo trains.
    for flag, value in {
        "--hidden-size": "512",
        "--ffn-hidden-size": "1376",
        "--num-layers": "4",
        "--num-attention-heads": "8",
        "--seq-length": "256",
        "--micro-batch-size": "4",
        "--train-iters": "250",
        "--tensor-model-parallel-size": "2",
        "--nproc-per-node": "2",
        "--device": "cpu",
    }.items():
        assert btp[flag] == value, flag


def test_off_a_terminal_progress_is_a_line_now_and_then():
    text = io.StringIO()

    with show_run(Console(file=text, width=120), "CoLA, BTP", 250) as show:
        for number in range(1, 251):
            show(Iteration(number, 250, 5.0, 500.0, 40), 2048.0)

    lines = text.getvalue().splitlines()
    assert lines[0] == "CoLA, BTP: step 1/250, loss 5.000, 2,048 tokens/s"
    assert lines[1] == "CoLA, BTP: step 25/250, loss 5.000, 2,048 tokens/s"
    assert len(lines) == 11


def test_on_a_terminal_progress_is_a_bar_with_loss_and_speed():
    text = io.StringIO()

    console = Console(file=text, width=120, force_terminal=True)
    with show_run(console, "CoLA, BTP", 250) as show:
        show(Iteration(250, 250, 5.125, 500.0, 1000), 2048.0)

    for shown in ("250/250", "loss 5.125", "2,048 tokens/s"):
        assert shown in text.getvalue()


def test_tool_refuses_too_few_steps():
    run = subprocess.run(
        [sys.executable, TOOLS / "demo.py", "--steps", "5"], capture_output=True, text=True
    )

    assert run.returncode == 2
    assert run.stderr == (
        "error: --steps: 5 is not a whole number of at least 20; the nearest legal value is 20\n"
    )
