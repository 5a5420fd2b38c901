"""What a user sees of a command line that cannot be run, and what is added to one that can.

Megatron keeps a run's arguments in globals, so command lines are tried on a rank of their own, many
in a row.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.boost import launch
from megatron.boost.cpu import CPU_FLAGS
from tests.support.distributed import run_ranks
from tests.support.refusals import COLA, DENSE, FEATURES, SIZES, TP2, WORDS, Refusal
from tests.support.runs import DATA, MODEL, TRAINING

REPOSITORY = Path(__file__).parents[2]
ACCEPTED = "accepted"


def answers(command_lines: list[tuple[int, list[str]]]) -> list[tuple[str, float]]:
    """For each number of ranks and command line the refusal or `ACCEPTED`, and the seconds of
    processor time that it took; no process group may be made meanwhile."""
    from megatron.boost.cpu import megatron_on_cpu, with_cpu_flags
    from megatron.boost.patches import apply_always

    result = []
    with megatron_on_cpu(), apply_always(), no_process_group():
        from megatron.training.global_vars import unset_global_variables

        from megatron.boost.training import configure

        for ranks, flags in command_lines:
            os.environ["WORLD_SIZE"] = str(ranks)
            begin = time.process_time()
            try:
                configure(with_cpu_flags(flags))
                answer = ACCEPTED
            except ValueError as refusal:
                answer = str(refusal)
            result.append((answer, time.process_time() - begin))
            unset_global_variables()
    return result


def no_process_group() -> Any:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a process group was made")

    return mock.patch("torch.distributed.init_process_group", forbidden)


def ask(*command_lines: tuple[int, str]) -> list[tuple[str, float]]:
    """`answers` to our small model with these flags."""
    given = [(n, [*MODEL, *DATA, *TRAINING, *flags.split()]) for n, flags in command_lines]
    (result,) = run_ranks(answers, 1, given, init_process_group=False)
    return result


def check(cases: list[Refusal], found: list[tuple[str, float]]) -> None:
    for case, (answer, seconds) in zip(cases, found, strict=True):
        assert answer.startswith(case.beginning), case.flags
        assert answer.endswith(
            (f"; nearest legal value: {case.proposal}", f"; the nearest is {case.proposal}")
        ), answer
        assert seconds < 2, case.flags


def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do() -> None:
    check(SIZES, ask(*((case.ranks, case.flags) for case in SIZES)))


def test_words_and_settings_are_refused_with_the_nearest_legal_ones() -> None:
    check(WORDS, ask(*((case.ranks, case.flags) for case in WORDS)))


@pytest.mark.slow
def test_what_is_proposed_is_accepted() -> None:
    cases = [case for case in SIZES + WORDS if case.legal is not None]
    found = ask(*((case.ranks, str(case.legal)) for case in cases))
    for case, (answer, _) in zip(cases, found, strict=True):
        assert answer == ACCEPTED, case.legal


@pytest.mark.slow
def test_features_that_a_llama_block_has_not_are_refused_by_name() -> None:
    found = ask(*((2 if "context" in feature else 1, f"{COLA} {feature}") for feature in FEATURES))
    for (feature, legal), (answer, seconds) in zip(FEATURES.items(), found, strict=True):
        flag = [word for word in feature.split() if word.startswith("--")][-1]
        assert re.match(rf"{flag}\b.*: not supported by --low-rank-arch cola", answer), feature
        # The flag stands in the proposal where it is another one than that refused.
        before, _, _ = feature.rpartition(" ")
        proposal = legal.removeprefix(before).strip() or "leave it out"
        assert answer.endswith(f"; nearest legal value: {proposal}"), answer
        assert seconds < 2
    instead = set(FEATURES.values())
    for legal, (answer, _) in zip(
        instead, ask(*((1, f"{COLA} {legal}") for legal in instead)), strict=True
    ):
        assert answer == ACCEPTED, legal


@pytest.mark.slow
def test_a_block_that_is_no_llama_block_is_refused() -> None:
    """Flags that the small model's own exclude."""

    def without(flag: str) -> list[str]:
        return [word for word in [*MODEL, *DATA, *TRAINING, *COLA.split()] if word != flag]

    command_lines = [(1, without("--disable-bias-linear")), (1, without("--swiglu"))]
    (found,) = run_ranks(answers, 1, command_lines, init_process_group=False)
    assert [answer for answer, _ in found] == [
        "--add-bias-linear: not supported by --low-rank-arch cola; "
        "nearest legal value: pass --disable-bias-linear",
        "an MLP without a gate: not supported by --low-rank-arch cola; "
        "nearest legal value: pass --swiglu",
    ]


@pytest.mark.slow
def test_other_refusals_name_what_is_wrong() -> None:
    cases = {
        "--spec no_such_module spec": "--spec no_such_module spec: cannot be imported: ModuleNotF",
        "--spec tests.support.stock_gpt no_spec": "module tests.support.stock_gpt has no no_spec",
        "--spec local": "--spec local: takes two values",
        f"{COLA} --low-rank-ratio half": "--low-rank-ratio: invalid float value: 'half'",
        f"{COLA} --low-rank-rank": "--low-rank-rank: expected one argument",
        f"{COLA} stray": "stray: stands where a flag is expected",
        f"{COLA} --transformer-impl transformer_engine": "nearest legal value: local",
        "--sft": "--sft: this script pre-trains on indexed or mock data only",
        # Megatron's own words, one with a message, one without.
        f"{COLA} --max-position-embeddings 16": "Megatron refuses these flags: max_position_emb",
        "--hidden-size 30": "Megatron refuses these flags: assert args.hidden_size % ",
        "--squared-relu": "Megatron refuses these flags: assert not args.swiglu",
        "--logits-load-dir logits": "--logits-load-dir: this script pre-trains on indexed or mock",
    }
    for (flags, expected), (answer, seconds) in zip(
        cases.items(), ask(*((1, flags) for flags in cases)), strict=True
    ):
        assert expected in answer, flags
        assert seconds < 2


def test_data_that_is_not_there_is_refused_with_the_nearest_that_is(tmp_path: Path) -> None:
    (tmp_path / "corpus_text_document.idx").touch()
    real_data = [word for word in DATA if word != "--mock-data"]

    model = [*MODEL, *real_data, *TRAINING, *COLA.split()]
    prefixes = [tmp_path / "corpus_text", tmp_path / "corpus_text_document"]

    command_lines = [(1, [*model, "--data-path", str(prefix)]) for prefix in prefixes]
    (found,) = run_ranks(answers, 1, command_lines, init_process_group=False)

    near, half = prefixes
    assert [answer for answer, _ in found] == [
        f"--data-path {near}: there is no {near}.idx; the nearest is {half}",
        f"--data-path {half}: there is no {half}.bin",
    ]


def prepared(command_lines: list[list[str]]) -> list[tuple[list[str], list[str]]]:
    from megatron.boost.arguments import prepare

    with mock.patch.dict(os.environ, WORLD_SIZE="2"):
        return [prepare(flags) for flags in command_lines]


def test_what_a_low_rank_model_needs_is_added_and_said() -> None:
    model = [*MODEL, *DATA, *TRAINING, *CPU_FLAGS]
    own = "--hidden-dropout 0 --attention-dropout=0 --sequence-parallel".split()
    tp2 = [*model, *TP2.split(), *COLA.split()]
    command_lines = [
        model,
        tp2,
        [*tp2, *own],
        [*model, *DENSE.split(), "--use-distributed-optimizer"],
    ]
    (found,) = run_ranks(prepared, 1, command_lines, init_process_group=False)
    none, cola, nothing, dense = found

    assert none == (model, [])
    dropout = ["--hidden-dropout", "0.0", "--attention-dropout", "0.0"]
    assert cola[0] == [*command_lines[1], *dropout, "--sequence-parallel"]
    assert len(cola[1]) == 2
    assert cola[1][0].startswith("dropout: 0")
    assert cola[1][1].startswith("sequence parallelism: on")
    assert nothing == (command_lines[2], [])
    assert dense[0] == [*command_lines[3], *dropout, "--dist-ckpt-optim-fully-reshardable"]


def rope_scaling_factors(command_lines: list[list[str]]) -> list[float]:
    from megatron.boost.cpu import megatron_on_cpu, with_cpu_flags
    from megatron.boost.patches import apply_always

    factors = []
    with megatron_on_cpu(), apply_always(), no_process_group():
        from megatron.training.global_vars import unset_global_variables

        from megatron.boost.training import configure

        for flags in command_lines:
            factors.append(configure(with_cpu_flags(flags)).container.model.rope_scaling_factor)
            unset_global_variables()
    return factors


@pytest.mark.slow
def test_the_factor_of_rope_scaling_reaches_the_model() -> None:
    """Megatron 0.19 drops it on the way."""
    scaled = [*MODEL, *DATA, *TRAINING, "--use-rope-scaling", "--rope-scaling-factor", "4"]
    command_lines = [[*scaled, *arch.split()] for arch in ("", COLA, DENSE)]
    (factors,) = run_ranks(rope_scaling_factors, 1, command_lines, init_process_group=False)
    assert factors == [8.0, 4.0, 4.0]


# The script as a user starts it.


def test_a_missing_device_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("torch.cuda.is_available", return_value=False):
        assert launch.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "error: --device cuda: there is no CUDA device; nearest legal value: cpu\n"
    )


def main_here(flags: list[str]) -> tuple[int, str]:
    with (
        contextlib.redirect_stderr(io.StringIO()) as errors,
        mock.patch("megatron.boost.launch._AFTER_RANK_0_SECONDS", 0),
        no_process_group(),
    ):
        code = launch.main(flags)
    return code, errors.getvalue()


def test_one_of_the_ranks_says_it() -> None:
    flags = [*MODEL, *DATA, *TRAINING, *f"{COLA} {TP2} --seq-length 31".split()]
    first, second = run_ranks(main_here, 2, flags, init_process_group=False)

    assert first[0] == second[0] == 2
    assert re.fullmatch("error: --seq-length 31: .*; nearest legal value: 32\n", first[1])
    assert second[1] == ""


def run_script(flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "pretrain_gpt.py", *MODEL, *DATA, *TRAINING, *flags.split()],
        cwd=REPOSITORY,
        # A process group would wait for its ranks there until this times out.
        env={**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "10.255.255.1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_script_refuses_in_one_line_with_exit_code_2() -> None:
    run = run_script(f"{COLA} {TP2} --num-attention-heads 1", RANK="0", MASTER_PORT="29400")

    assert run.returncode == 2
    assert run.stderr == (
        "error: --num-attention-heads 1: are split over --tensor-model-parallel-size 2; "
        "nearest legal value: 2\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (f"{COLA} --qk-layernorm", "--qk-layernorm: not supported by --low-rank-arch cola;"),
        (
            "--spec tests.support.broken_spec gpt_spec",
            "--spec tests.support.broken_spec gpt_spec: cannot be imported: ModuleNotFoundError",
        ),
    ],
)
def test_the_script_refuses_before_any_process_group(flags: str, error: str) -> None:
    run = run_script(flags, RANK="0", MASTER_PORT="29400")

    assert run.returncode == 2
    assert run.stderr.startswith(f"error: {error}")
    assert run.stderr.count("\n") == 1


@pytest.mark.slow
def test_under_torchrun_the_line_of_rank_0_is_not_lost() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + ["pretrain_gpt.py", *MODEL, *DATA, *TRAINING]
        + f"{COLA} {TP2} --seq-length 31".split(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    assert len(re.findall("^error: --seq-length 31: .* value: 32$", run.stderr, re.M)) == 1
