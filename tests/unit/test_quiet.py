"""What a quiet run shows, and what it leaves to the log file."""

import logging
import sys
import warnings
from pathlib import Path

import pytest

from megatron.boost.quiet import quiet_output

ARGUMENTS = """------------------------ arguments ------------------------
  accumulate_allreduce_grads_in_fp32 .............. False
  adam_beta1 ...................................... 0.9
  inference_dynamic_batching_enable_prefix_caching  False
  data_path ....................................... ['a', 'b  c']
-------------------- end of arguments ---------------------
"""
ABSENT = "WARNING: one_logger package is required to enable e2e metrics tracking."
TRAINING = " [2026-11-30] iteration        1/       4 | lm loss: 5.6E+00 |"


def _run(log_path: Path | None, verbose: bool = False) -> None:
    """Says what Megatron says, in its ways."""
    torch_logger, stream = logging.getLogger("test_quiet.torch"), logging.StreamHandler(sys.stderr)
    torch_logger.addHandler(stream)
    torch_logger.propagate = False
    try:
        with quiet_output(log_path, verbose):
            logging.getLogger("test_quiet.megatron").warning("GPTModel IS DEPRECATED")
            torch_logger.warning("No CUDA runtime is found")
            torch_logger.error("disk is full")
            warnings.warn("Apex is not installed", stacklevel=1)
            print("using world size: 2")
            print(ARGUMENTS, end="")
            print(ABSENT)
            print(TRAINING)
            print("50 %", end="", flush=True)
            print(" done")
            print("error: bad", file=sys.stderr)
            print("no line end", end="")
    finally:
        torch_logger.removeHandler(stream)


SHOWN = f"using world size: 2\n{TRAINING}\n50 % done\nno line end"
HIDDEN = (
    "GPTModel IS DEPRECATED",
    "No CUDA runtime",
    "Apex is not installed",
    "adam_beta1",
    ABSENT,
)


@pytest.mark.filterwarnings("default")
def test_notices_go_to_the_log_and_the_rest_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "rank-0.log"
    before = (logging.Logger.callHandlers, warnings.showwarning, sys.stdout)
    _run(log)
    assert (logging.Logger.callHandlers, warnings.showwarning, sys.stdout) == before
    shown = capsys.readouterr()
    assert shown.out == SHOWN
    assert shown.err == "disk is full\nerror: bad\n"
    logged = log.read_text()
    for text in (*HIDDEN, TRAINING, "end of arguments", "disk is full"):
        assert text in logged


def test_verbose_leaves_everything_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "rank-0.log"
    with pytest.warns(UserWarning, match="Apex"):
        _run(log, verbose=True)
    shown = capsys.readouterr()
    assert ARGUMENTS in shown.out and ABSENT in shown.out
    assert "No CUDA runtime" in shown.err
    assert not log.exists()


def test_a_list_without_its_end_hides_no_training_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with quiet_output(tmp_path / "log"):
        print("\n".join([*ARGUMENTS.splitlines()[:-1], TRAINING, "  indented text"]))
    assert capsys.readouterr().out == f"{TRAINING}\n  indented text\n"


def test_rank_0_says_where_its_log_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with quiet_output() as log:
            assert log is not None
            print(ABSENT)
        shown = capsys.readouterr().out
        assert (str(log) in shown) == (rank == "0")
        assert log.read_text() == f"{ABSENT}\n"
        log.unlink()
