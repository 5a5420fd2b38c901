"""A checkpoint loads only into the function that it was trained as, and says what that is."""

from __future__ import annotations

import dataclasses
import inspect
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from boost_layers.config import LowRankConfig, flag_of
from megatron.boost.checkpoint_settings import (
    FORGOTTEN_FLAGS,
    check_run,
    check_settings,
    restored_flags,
    restored_megatron_flags,
)
from megatron.boost.flags import flags_of
from megatron.boost.stored_run import StoredRun
from tests.support.distributed import RankFailure, run_ranks
from tests.support.runs import losses, train, train_here

SIZES = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 1,
    "group_query_attention": False,
    "kv_channels": 16,
}


def stored(settings: dict[str, Any], **sizes: Any) -> Namespace:
    """The arguments that a checkpoint holds."""
    config = LowRankConfig(**settings)
    values = {flag.destination: getattr(config, flag.field) for flag in flags_of(LowRankConfig)}
    return Namespace(**{**SIZES, **sizes}, **values)


CONTRADICTIONS = [
    ({"arch": "cola"}, {"arch": "dense"}, ("--low-rank-arch", "dense", "cola")),
    ({"arch": "cola"}, {"arch": "svd"}, ("--low-rank-arch", "svd", "cola")),
    ({"arch": "cola"}, {"arch": "cola", "act": "gelu"}, ("--low-rank-act", "gelu", "silu")),
    (
        {"arch": "cola", "mlp": "swiglu"},
        {"arch": "cola", "mlp": "product"},
        ("--low-rank-mlp", "product", "swiglu"),
    ),
    (
        {"arch": "cola", "rank": 8},
        {"arch": "cola", "ratio": 0.5},
        ("--low-rank-ratio", "rank 32 of q_proj", "rank 8"),
    ),
    (
        {"arch": "cola", "mlp_rank": 8},
        {"arch": "cola", "mlp_rank": 12},
        ("--low-rank-mlp-rank", "rank 12 of gate_proj", "rank 8"),
    ),
    (
        {"arch": "cola", "ranks": "q=8,o=12"},
        {"arch": "cola", "ranks": "q=8,o=16"},
        ("--low-rank-ranks", "rank 16 of o_proj", "rank 12"),
    ),
    ({"arch": "lax"}, {"arch": "lax", "lax_gate": "linear"}, ("--lax-gate", "linear", "tensor")),
    ({"arch": "lax"}, {"arch": "lax", "lax_base": "svd"}, ("--lax-base", "svd", "cola")),
    (
        {"arch": "cola", "layers": "1-2"},
        {"arch": "cola", "layers": "0-3"},
        ("--low-rank-layers", "0-3", "1-2"),
    ),
]


@pytest.mark.parametrize(("then", "now", "named"), CONTRADICTIONS)
def test_a_contradiction_names_flag_and_both_values(
    then: dict[str, Any], now: dict[str, Any], named: tuple[str, ...]
) -> None:
    for refuse in (
        lambda: check_settings(stored(then), LowRankConfig(**now), 64),
        lambda: restored_flags(now, stored(then)),
    ):
        with pytest.raises(ValueError) as refusal:
            refuse()
        assert all(word in str(refusal.value) for word in named), refusal.value


def test_layout_settings_and_other_spellings_of_the_same_may_differ() -> None:
    spelled = {"arch": "cola", "rank": 16, "act": "silu", "mlp": "product", "layers": "0-3"}
    now = LowRankConfig(**spelled, tp="vanilla", norm="sync", grouping=False)
    check_settings(stored({"arch": "cola"}), now, 64)
    # What is repeated is not in contradiction, and the rest comes from the checkpoint.
    assert restored_flags(spelled, stored({"arch": "cola"})) == ["--low-rank-arch", "cola"]


def test_megatrons_own_checkpoints_and_older_ones_of_ours_are_read() -> None:
    check_settings(Namespace(hidden_size=64), LowRankConfig(), 64)
    older = stored({"arch": "cola"})
    del older.core_attention
    check_settings(older, LowRankConfig(arch="cola"), 64)
    assert restored_flags({}, Namespace(hidden_size=64)) == []


@pytest.mark.parametrize("name", [name for name in SIZES if name != "group_query_attention"])
def test_another_size_is_refused(name: str) -> None:
    then = StoredRun("--load here", stored({"arch": "cola"}, group_query_attention=True), None)
    sizes = {**SIZES, "group_query_attention": True, name: SIZES[name] * 2}
    now = Namespace(**sizes, no_load_optim=False, finetune=False)
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}: {sizes[name]}, but .*with"):
        check_run(then, LowRankConfig(arch="cola", ranks="q=16,k=16"), now)


@pytest.mark.parametrize(
    ("now", "refused"),
    [
        ({}, False),
        ({"tensor_model_parallel_size": 2}, True),
        ({"use_distributed_optimizer": False}, True),
        ({"use_distributed_optimizer": False, "no_load_optim": True}, False),
        ({"tensor_model_parallel_size": 2, "finetune": True}, False),
    ],
)
def test_optimizer_state_that_is_bound_to_its_layout(now: dict[str, Any], refused: bool) -> None:
    layout = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    run = StoredRun("--load here", stored({"arch": "cola"}, **layout), "dp_reshardable")
    flags = {"use_distributed_optimizer": True, "no_load_optim": False, "finetune": False}
    arguments = Namespace(**{**SIZES, **layout, **flags, **now})
    if not refused:
        check_run(run, LowRankConfig(arch="cola"), arguments)
        return
    with pytest.raises(ValueError, match="--load here: .*--use-distributed-optimizer .*-size 1"):
        check_run(run, LowRankConfig(arch="cola"), arguments)


@pytest.mark.parametrize(
    ("then", "iteration", "now", "finetune", "refusal"),
    [
        (6, 3, 6, False, None),
        (6, 3, 9, False, "--low-rank-act-anneal: 9, but the checkpoint was trained with 6"),
        (6, 3, 0, False, "--low-rank-act-anneal: 0, but the checkpoint was trained with 6"),
        # Nothing was trained on the schedule yet: its length is free.
        (6, 0, 9, False, None),
        (6, 0, 0, False, "--low-rank-act-anneal: 0, but the checkpoint was trained with 6"),
        (0, 0, 9, False, "--low-rank-act-anneal: 9, but the checkpoint was trained with 0"),
        # It is over: φ is whole and stays so.
        (6, 6, 0, False, None),
        (6, 8, 7, False, None),
        (6, 8, 9, False, "--low-rank-act-anneal: 9, but the checkpoint was trained with 6"),
        # A run that starts at iteration 0 with the checkpoint's weights.
        (6, 3, 6, True, "--load here: is 50% .*6, iteration 3.*without --finetune to .* 6 first"),
        (6, 8, 0, True, None),
        (6, 8, 6, True, "--low-rank-act-anneal 6: begins with 0% .*at 100%.*legal value: 0$"),
        (6, 0, 4, True, None),
        (6, 0, 0, True, "--low-rank-act-anneal 0: begins with 100% .*at 0%.*legal value: 6$"),
    ],
)
def test_a_checkpoint_is_loaded_with_the_amount_of_activation_that_it_has(
    then: int, iteration: int, now: int, finetune: bool, refusal: str | None
) -> None:
    settings = {"arch": "cola", "act_anneal": then}
    run = StoredRun("--load here", stored(settings), None, iteration=iteration)
    arguments = Namespace(**SIZES, no_load_optim=False, finetune=finetune)
    low_rank = LowRankConfig(arch="cola", act_anneal=now)
    if refusal is None:
        check_run(run, low_rank, arguments)
        return
    with pytest.raises(ValueError, match=refusal):
        check_run(run, low_rank, arguments)


def test_the_schedule_is_restored_and_one_that_is_given_is_left_to_the_check() -> None:
    then = stored({"arch": "cola", "act_anneal": 6})
    assert restored_flags({}, then)[-2:] == ["--low-rank-act-anneal", "6"]
    assert "--low-rank-act-anneal" not in restored_flags({"act_anneal": 9}, then)


FUNCTIONS: list[dict[str, Any]] = [
    {"arch": "dense"},
    {"arch": "cola", "act": "gelu", "mlp": "swiglu", "rank": 8, "act_anneal": 5},
    {"arch": "svd", "ratio": 0.5, "attn_rank": 8, "layers": "1-2"},
    {"arch": "lax", "lax_base": "svd", "lax_gate": "linear", "lax_norm": "rmsnorm"},
    {"arch": "lax", "ranks": "q=8;down=12", "mlp_rank": 24},
]


@pytest.mark.parametrize("then", FUNCTIONS)
def test_the_restored_flags_make_the_stored_function(then: dict[str, Any]) -> None:
    flags = restored_flags({}, stored({**then, "core_attention": "local"}))
    by_flag = {flag.name: flag for flag in flags_of(LowRankConfig)}
    pairs = zip(flags[::2], flags[1::2], strict=True)
    values = {by_flag[name].field: by_flag[name].kind(value) for name, value in pairs}
    assert LowRankConfig(**values) == LowRankConfig(**then)


def test_every_field_is_a_setting_of_the_function_or_of_the_layout() -> None:
    """A new field must be put on one side."""
    from megatron.boost.checkpoint_settings import _KINDS, _RANKS, _SCHEDULES

    layout = {"tp", "norm", "grouping", "recompute", "recompute_residual", "recompute_shard"}
    layout |= {"vanilla_attention", "core_attention", "overlap", "seed"}
    fields = {field.name for field in dataclasses.fields(LowRankConfig)}
    function = {*_KINDS, *_RANKS, *_SCHEDULES}
    assert fields - function <= layout
    assert {flag_of(name) for name in function} <= {f.name for f in flags_of(LowRankConfig)}


COLA = "--low-rank-arch cola --low-rank-rank 12 --low-rank-act gelu"
ONE = "--train-iters 2 --save-interval 1 --exit-interval 1"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After one of two iterations."""
    folder = tmp_path_factory.mktemp("checkpoint")
    train(f"{COLA} {ONE} --save {folder}")
    return folder


@pytest.mark.slow
def test_another_activation_is_refused_before_anything_is_built(checkpoint: Path) -> None:
    flags = f"{COLA} --train-iters 2 --load {checkpoint} --low-rank-act silu"
    with pytest.raises(RankFailure, match="ValueError: --low-rank-act: silu, but .* with gelu"):
        train(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--load {} --ckpt-step 7", "--load .* --ckpt-step 7: .*nearest .*: --ckpt-step 1"),
        ("--load {} --hidden-size 64", "--hidden-size: 64, but .* with 32"),
        ("--load {} --low-rank-arch svd", "--low-rank-arch: svd, but .* with cola"),
    ],
)
def test_refusals(checkpoint: Path, flags: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        train(f"{COLA} --train-iters 2 {flags.format(checkpoint)}")


SIZELESS = "--normalization RMSNorm --swiglu --init-method-std 0.2 --seed 1234".split()


def train_sizeless(flags: list[str]) -> dict[str, Any]:
    """Trains on this rank with no flag that says what the model is."""
    return train_here(flags, model=SIZELESS)


@pytest.mark.slow
def test_use_checkpoint_args_needs_no_flag_of_the_model(checkpoint: Path) -> None:
    resumed = train(f"{COLA} --train-iters 2 --load {checkpoint}", 2)
    flags = f"--train-iters 2 --load {checkpoint} --use-checkpoint-args"
    layout = "--low-rank-tp vanilla --no-low-rank-grouping"
    restored = run_ranks(train_sizeless, 2, flags.split(), init_process_group=False)
    assert losses(restored) == losses(resumed)
    other = run_ranks(train_sizeless, 2, f"{flags} {layout}".split(), init_process_group=False)
    assert losses(other) == pytest.approx(losses(resumed), rel=2e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--low-rank-act silu", "--low-rank-act: silu, but the checkpoint .* gelu"),
        ("--low-rank-ratio 0.25", "--low-rank-ratio: rank 8 of q_proj, but .* rank 12"),
        ("--tensor-model-parallel-size 3", "--num-attention-heads 4: .* nearest legal value: 3"),
    ],
)
def test_use_checkpoint_args_refuses_before_anything_is_built(
    checkpoint: Path, flags: str, message: str
) -> None:
    line = f"--train-iters 2 --load {checkpoint} --use-checkpoint-args {flags}"
    ranks = 3 if "3" in flags else 1
    with pytest.raises(RankFailure, match=message):
        run_ranks(train_sizeless, ranks, line.split(), init_process_group=False)


def test_what_megatron_forgets_of_a_checkpoint_is_restored() -> None:
    then = Namespace(
        layernorm_epsilon=1e-6,
        use_rope_scaling=True,
        rope_scaling_factor=32.0,
        rotary_seq_len_interpolation_factor=None,
    )
    restored = restored_megatron_flags({}, then)
    assert " ".join(restored) == (
        "--norm-epsilon 1e-06 --use-rope-scaling --rope-scaling-factor 32.0"
    )
    assert restored_megatron_flags({"layernorm_epsilon": 1e-6}, then) == restored[2:]
    assert restored_megatron_flags({}, Namespace(norm_epsilon=1e-6)) == restored[:2]
    assert restored_megatron_flags({}, Namespace()) == []
    with pytest.raises(ValueError, match="--norm-epsilon: 1e-05, but the checkpoint .* 1e-06"):
        restored_megatron_flags({"layernorm_epsilon": 1e-5}, then)


def test_megatron_still_forgets_them() -> None:
    """Once it restores them itself, ours can go."""
    from megatron.training.checkpointing import load_args_from_checkpoint

    source = inspect.getsource(load_args_from_checkpoint)
    assert [name for name in FORGOTTEN_FLAGS if f"'{name}'" in source] == []
