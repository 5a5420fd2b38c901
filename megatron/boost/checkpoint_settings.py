"""What a checkpoint was trained as must agree with what it is loaded as.

Megatron stores all arguments with a checkpoint, ours among them, and compares some of its own after
it has loaded. Another activation fits the same weights and would go on training without a word;
another size ends in an error about shards. Both are found here, before any process group.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from boost_layers.config import PROJECTIONS, LowRankConfig, flag_of
from megatron.boost.flags import flags_of
from megatron.boost.stored_run import StoredRun

_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
)
_KINDS = ("arch", "lax_base", "act", "mlp", "lax_gate", "lax_norm", "layers")
"""Settings that change the function, other than ranks; what decides others comes first."""

_RANKS = ("ratio", "rank", "attn_rank", "mlp_rank", "ranks")

_SCHEDULES = ("act_anneal",)
"""Settings that change the function from step to step."""

FORGOTTEN_FLAGS = {
    "layernorm_epsilon": "--norm-epsilon",
    "use_rope_scaling": "--use-rope-scaling",
    "rope_scaling_factor": "--rope-scaling-factor",
    "rotary_seq_len_interpolation_factor": "--rotary-seq-len-interpolation-factor",
}
"""Arguments of Megatron's that change the function and that its `--use-checkpoint-args` does not
restore, with their flags."""

_FORGOTTEN_DEFAULTS = {
    "layernorm_epsilon": 1e-5,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rotary_seq_len_interpolation_factor": None,
}


def check_run(run: StoredRun, low_rank: LowRankConfig, arguments: Namespace) -> None:
    """Raise ValueError for the first size, setting or format by which a checkpoint is none of this
    run's, naming both values.

    Args:
        run: the checkpoint's run.
        low_rank: this run's settings.
        arguments: this run's, as Megatron validated them.
    """
    if low_rank.arch != "none":
        for name in _SIZES:
            ours, theirs = _size(arguments, name), _size(run.arguments, name)
            if theirs is not None and ours != theirs:
                raise _contradiction(f"--{name.replace('_', '-')}", ours, theirs)
    check_settings(run.arguments, low_rank, arguments.hidden_size)
    _check_annealing(run, low_rank, restarts=run.restarts or arguments.finetune)
    if not (arguments.no_load_optim or arguments.finetune):
        _check_optimizer_format(run, arguments)


def check_settings(stored: Namespace, low_rank: LowRankConfig, hidden_size: int) -> None:
    """Raise ValueError for the first setting that changes the function and differs from the
    checkpoint's, naming both values. Layout settings may differ.

    Args:
        stored: the arguments that the checkpoint holds.
        low_rank: this run's settings.
        hidden_size: this run's.
    """
    if not hasattr(stored, "low_rank_arch"):
        return
    then = _config(stored)
    ours, theirs = _kinds(low_rank, stored.num_layers), _kinds(then, stored.num_layers)
    for name in _KINDS:
        if ours[name] != theirs[name]:
            raise _contradiction(flag_of(name), ours[name], theirs[name])
    for projection in PROJECTIONS if low_rank.low_rank else ():
        rank = low_rank.rank_of(projection, hidden_size)
        before = then.rank_of(projection, stored.hidden_size)
        if rank != before:
            flag = low_rank.rank_flag(projection)
            raise _contradiction(flag, f"rank {rank} of {projection}", f"rank {before}")


def restored_flags(given: Mapping[str, Any], stored: Namespace) -> list[str]:
    """The flags that make a run compute what the checkpoint was trained as, for
    `--use-checkpoint-args`. They may follow the user's: those they repeat agree with them.

    Args:
        given: what the user gave, by field of `LowRankConfig`.
        stored: the arguments that the checkpoint holds.

    Raises:
        ValueError: for a flag of the user's that contradicts the checkpoint, naming both values.
    """
    if not hasattr(stored, "low_rank_arch"):
        return []
    then = _config(stored)
    if given.get("arch", then.arch) != then.arch:
        raise _contradiction(flag_of("arch"), given["arch"], then.arch)
    # Ranks only from the user's flags: which projections they speak of is the question.
    meant = {name: getattr(then, name) for name in _KINDS}
    meant |= {name: value for name, value in given.items() if name in (*_KINDS, *_RANKS)}
    now = LowRankConfig(**meant)
    ours, theirs = _kinds(now, stored.num_layers), _kinds(then, stored.num_layers)
    for name in _KINDS:
        if name in given and ours[name] != theirs[name]:
            raise _contradiction(flag_of(name), ours[name], theirs[name])
    given_flags = [flag_of(name) for name in given]
    for projection in PROJECTIONS if then.low_rank else ():
        flag = now.rank_flag(projection)
        rank, before = (config.rank_of(projection, stored.hidden_size) for config in (now, then))
        if flag in given_flags and rank != before:
            raise _contradiction(flag, f"rank {rank} of {projection}", f"rank {before}")
    flags = []
    for name in (*_KINDS, *_RANKS, *_SCHEDULES):
        if name in _SCHEDULES and name in given:
            # Whether it agrees depends on the iteration: `check_run` sees.
            continue
        value = getattr(then, name)
        if value != LowRankConfig.__dataclass_fields__[name].default:
            flags += [flag_of(name), str(value)]
    return flags


def _check_annealing(run: StoredRun, low_rank: LowRankConfig, *, restarts: bool) -> None:
    """Refuse another amount of φ than the checkpoint's. How many steps it grows over is free as
    long as none was taken, and of no matter when all of them are."""
    if not hasattr(run.arguments, "low_rank_arch"):
        return
    then = _config(run.arguments)
    before = then.activation_amount(run.iteration)
    ours = low_rank.activation_amount(0 if restarts else run.iteration)
    if ours == before:
        return
    flag = flag_of("act_anneal")
    if not restarts:
        raise _contradiction(flag, low_rank.act_anneal, then.act_anneal)
    if 0.0 < before < 1.0:
        raise ValueError(
            f"{run.where}: is {before:.0%} on the way to its φ ({flag} {then.act_anneal}, "
            f"iteration {run.iteration}), and a run that starts at iteration 0 cannot begin there; "
            f"nearest legal value: go on without --finetune to iteration {then.act_anneal} first"
        )
    legal = "0" if before == 1.0 else f"{then.act_anneal}"
    raise ValueError(
        f"{flag} {low_rank.act_anneal}: begins with {ours:.0%} of φ, but the checkpoint is at "
        f"{before:.0%}; nearest legal value: {legal}"
    )


def restored_megatron_flags(given: Mapping[str, Any], stored: Namespace) -> list[str]:
    """The flags of `FORGOTTEN_FLAGS` that make a run compute what the checkpoint was trained as,
    those at Megatron's defaults left out.

    Args:
        given: what the user gave of them, by argument.
        stored: the arguments that the checkpoint holds.

    Raises:
        ValueError: for a flag of the user's that contradicts the checkpoint, naming both values.
    """
    flags = []
    for name, flag in FORGOTTEN_FLAGS.items():
        default = _FORGOTTEN_DEFAULTS[name]
        if name == "layernorm_epsilon":
            # Its name in other releases.
            default = getattr(stored, "norm_epsilon", default)
        value = getattr(stored, name, default)
        if name in given and given[name] != value:
            raise _contradiction(flag, given[name], value)
        if name not in given and value != _FORGOTTEN_DEFAULTS[name]:
            flags += [flag] if value is True else [flag, str(value)]
    return flags


@contextmanager
def settings_checked_on_load(low_rank: LowRankConfig, hidden_size: int) -> Iterator[None]:
    """Context in which Megatron's check of a checkpoint's arguments includes ours: for the
    formats that `stored_run` does not read."""
    from megatron.training import checkpointing, get_args

    upstream = checkpointing.check_checkpoint_args

    def check(stored: Namespace, *args: Any, **kwargs: Any) -> None:
        check_settings(stored, low_rank, hidden_size)
        steps = getattr(stored, "low_rank_act_anneal", 0)
        if get_args().ckpt_format != "torch_dist" and steps != low_rank.act_anneal:
            raise _contradiction(flag_of("act_anneal"), low_rank.act_anneal, steps)
        upstream(stored, *args, **kwargs)

    with mock.patch.object(checkpointing, "check_checkpoint_args", check):
        yield


def _config(stored: Namespace) -> LowRankConfig:
    """The settings in a checkpoint's arguments. A flag that came later than the checkpoint had its
    default then."""
    return LowRankConfig(
        **{f.field: getattr(stored, f.destination, f.default) for f in flags_of(LowRankConfig)}
    )


def _kinds(low_rank: LowRankConfig, num_layers: int) -> dict[str, str]:
    """`_KINDS` with what is automatic resolved, so that other spellings of the same are equal."""
    last = low_rank.last_layer if low_rank.last_layer is not None else num_layers - 1
    return {
        "arch": low_rank.arch,
        "act": low_rank.activation,
        "mlp": low_rank.mlp_kind,
        "lax_base": low_rank.lax_base,
        "lax_gate": low_rank.lax_gate,
        "lax_norm": low_rank.lax_norm,
        "layers": f"{low_rank.first_layer}-{last}",
    }


def _size(arguments: Namespace, name: str) -> int | None:
    """A size in validated arguments; None in those of a checkpoint that lack it."""
    if name == "num_query_groups" and not getattr(arguments, "group_query_attention", False):
        name = "num_attention_heads"
    return getattr(arguments, name, None)


def _contradiction(flag: str, ours: object, theirs: object) -> ValueError:
    return ValueError(f"{flag}: {ours}, but the checkpoint was trained with {theirs}")


def _check_optimizer_format(run: StoredRun, arguments: Namespace) -> None:
    """Refuse the state of a distributed optimizer in a format that depends on its layout."""
    if run.optimizer_format in (None, "fully_reshardable"):
        return
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    same = all(getattr(arguments, name) == getattr(run.arguments, name, 1) for name in sizes)
    if same and arguments.use_distributed_optimizer:
        return
    needed = " ".join(
        f"--{name.replace('_', '-')} {getattr(run.arguments, name, 1)}" for name in sizes
    )
    raise ValueError(
        f"{run.where}: its optimizer state ({run.optimizer_format}) loads only with "
        f"--use-distributed-optimizer {needed}, since it was saved without "
        "--dist-ckpt-optim-fully-reshardable; nearest legal value: these flags, or --no-load-optim"
    )
