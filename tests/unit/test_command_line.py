"""What a user sees when a tool is called wrongly or fails."""

import json
import re
import subprocess
import sys

import pytest

from megatron.boost.command_line import ToolParser, run_tool, whole_number, write_json
from tests.support.tools import TOOLS


@pytest.fixture
def parser():
    parser = ToolParser("a tool")
    parser.add_argument("--workers", type=whole_number(1), default=1)
    parser.add_argument("--input")
    return parser


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--worker 2", "--worker: no such argument; the nearest is --workers"),
        ("--zzz", "--zzz: no such argument"),
        ("--workers two", "--workers: 'two' is not a whole number of at least 1"),
        ("--workers 0", "--workers: 0 is not a whole number of at least 1; the nearest legal"),
        ("--input", "--input: expected one argument"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(parser, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args(arguments.split())

    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("failure", "code", "line"),
    [
        (ValueError("--rank 3: must be\neven"), 2, "error: --rank 3: must be even\n"),
        (OSError("No space left on device"), 1, "error: No space left on device\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_failures_are_one_line_with_their_exit_code(capsys, failure, code, line):
    def main(argv):
        raise failure

    with pytest.raises(SystemExit) as exit_:
        run_tool(main)

    assert exit_.value.code == code
    assert capsys.readouterr().err == line


def test_faults_of_ours_keep_their_traceback():
    def main(argv):
        raise TypeError("a bug")

    with pytest.raises(TypeError):
        run_tool(main)


def test_json_is_written_whole_into_a_new_folder(tmp_path):
    path = tmp_path / "new" / "result.json"

    write_json(path, {"loss": 1.5})

    assert json.loads(path.read_text()) == {"loss": 1.5}
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("there", "there is a folder; nearest legal value: there/result.json"),
        ("file/result.json", "file/result.json cannot be written: .*/file is no folder"),
        ("file/new/result.json", "file/new/result.json cannot be written: .*/file is no folder"),
        ("lost/result.json", "lost/result.json cannot be written: .*/lost is no folder"),
        ("/dev/null", "/dev/null is no regular file"),
        ("/proc/result.json", "/proc/result.json cannot be written: /proc: "),
    ],
)
def test_a_place_for_json_that_cannot_be_written_is_refused_before_any_work(
    parser, capsys, tmp_path, monkeypatch, path, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "lost").symlink_to("nowhere")

    with pytest.raises(SystemExit) as exit_:
        parser.parse_args(["--json", path])

    assert exit_.value.code == 2
    assert re.match(f"error: --json: {message}.*\n\\Z", capsys.readouterr().err)


def test_a_place_for_json_is_left_as_it_was_until_there_is_a_result(parser, tmp_path):
    for path in (tmp_path / "result.json", tmp_path / "new" / "folder" / "result.json"):
        assert parser.parse_args(["--json", str(path)]).json == path

    assert list(tmp_path.iterdir()) == []


def test_a_tool_runs_from_a_checkout_and_refuses_bad_input(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "x"}\n')

    run = subprocess.run(
        [sys.executable, TOOLS / "preprocess_data.py", "--input", "corpus.json"]
        + ["--output-prefix", "x", "--tokenizer-model", "nowhere"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == (
        "error: --input corpus.json: no such file or folder; the nearest is corpus.jsonl\n"
    )
