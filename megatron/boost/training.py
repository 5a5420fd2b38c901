"""One training run: from a command line to Megatron's `pretrain()` and the report after it.

Both steps are for every rank and, on CPU, for inside `megatron_on_cpu()`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain, set_startup_timestamps, training
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.config import PretrainConfigContainer

from boost_layers.carry import width_between_stages
from boost_layers.communication import LEDGER
from megatron.boost import communication_report
from megatron.boost.annealing import annealed_activation
from megatron.boost.arguments import Settings, parse, prepare, refusals_of_megatron
from megatron.boost.builder import model_config, true_vocabulary
from megatron.boost.checkpoint_settings import check_run, settings_checked_on_load
from megatron.boost.command_line import write_json
from megatron.boost.data import (
    forward_step,
    provide_datasets,
    refuse_missing_data,
    refuse_unsupported_data,
)
from megatron.boost.learning_rate import check_course
from megatron.boost.low_rank_metrics import logged_metrics
from megatron.boost.patches.wide_pipeline_tensor import wide_pipeline_tensor
from megatron.boost.stored_run import TRUE_VOCABULARY, StoredRun, stored_run
from megatron.boost.vocabulary import keep_vocabulary

_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


@dataclass(frozen=True)
class Plan:
    """A run that was found possible, nothing of which has started."""

    settings: Settings
    container: PretrainConfigContainer


def configure(argv: Sequence[str]) -> Plan:
    """Everything that can be found wrong with a command line, before any process group is made.

    Args:
        argv: Megatron's flags and ours, without the program's name.

    Raises:
        ValueError: for a command line that cannot be run.
    """
    argv, said = prepare(argv)
    settings = parse(argv, _DEFAULTS)
    tokenizer = settings.megatron.tokenizer_model
    if tokenizer is not None and Path(tokenizer).exists():
        # Checkpoints store it, and are read from other folders than this one.
        settings.megatron.tokenizer_model = str(Path(tokenizer).resolve())
    refuse_unsupported_data(settings.megatron)
    refuse_missing_data(settings.megatron)
    with refusals_of_megatron():
        config = model_config(settings.megatron, settings.low_rank)
    run = stored_run(settings.megatron)
    if run is not None:
        check_run(run, settings.low_rank, settings.megatron)
        anew = run.restarts or settings.megatron.finetune or settings.megatron.no_load_optim
        if not (anew or settings.megatron.skip_train):
            check_course(run.arguments, settings.megatron)
        said += _leave_random_states(run, settings.megatron)
        said += keep_vocabulary(run, settings.megatron, true_vocabulary(settings.megatron))
    _require_writable(settings.launch.comm_report)
    _require_folder(settings.megatron.save)
    if settings.megatron.rank == 0:
        for line in said:
            print(f"> {line}", flush=True)
    return Plan(settings, pretrain_cfg_container_from_args(settings.megatron, config))


def _leave_random_states(run: StoredRun, arguments: Namespace) -> list[str]:
    """Do not load the states of random generators that are of another kind of device: CUDA's and
    those that stand in for them on CPU have not the same size."""
    backend, own = (
        getattr(run.arguments, "distributed_backend", "nccl"),
        arguments.distributed_backend,
    )
    loads = not (run.restarts or arguments.finetune or arguments.no_load_rng)
    if not loads or backend == own or "gloo" not in (backend, own):
        return []
    arguments.no_load_rng = True
    return [f"{run.where}: random states are not loaded, they are of a run over {backend}"]


def _require_writable(report: str | None) -> None:
    """Find out before the training that its report cannot be written."""
    folder = Path(report or ".").parent
    if report and Path(report).is_dir():
        raise ValueError(
            f"--low-rank-comm-report {report}: is a folder; nearest legal value: "
            f"{Path(report) / 'collectives.json'}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ValueError(f"--low-rank-comm-report {report}: {failure}") from failure


def _require_folder(save: str | None) -> None:
    """Find out before the training that no checkpoint can be saved."""
    if save is None or "://" in save:
        return
    for path in (Path(save), *Path(save).parents):
        if path.is_symlink() and not path.exists():
            raise ValueError(
                f"--save {save}: {path} is a link to {path.readlink()}, which is not there; "
                f"nearest legal value: a folder, {path.parent}"
            )
        if path.exists() and not path.is_dir():
            what = "is a file" if path == Path(save) else f"{path} is a file"
            raise ValueError(f"--save {save}: {what}; nearest legal value: a folder, {path.parent}")


def train(plan: Plan, started: float | None = None) -> None:
    """Run Megatron's `pretrain()`, then report the collectives where that was asked for.

    Args:
        plan: what `configure` returned.
        started: the process's start, in seconds since the epoch, for Megatron's start-up timers.
    """
    if started is not None:
        set_startup_timestamps(program_start=started, main_entry=started)
    launch = plan.settings.launch
    LEDGER.clear()
    LEDGER.timed = launch.comm_report is not None
    low_rank, hidden_size = plan.settings.low_rank, plan.settings.megatron.hidden_size
    tp_size = plan.settings.megatron.tensor_model_parallel_size
    checked = settings_checked_on_load(low_rank, hidden_size)
    widened = wide_pipeline_tensor(width_between_stages(low_rank, hidden_size, tp_size))
    annealed, logged = (
        annealed_activation(low_rank),
        logged_metrics(low_rank, launch.log_latents_interval),
    )
    with checked, widened, annealed, logged, _keeping_model() as built:
        try:
            pretrain(plan.container, provide_datasets, ModelType.encoder_or_decoder, forward_step)
        except SystemExit as end:
            # So ends a run that --exit-interval, --exit-duration or a signal stops in good order.
            if end.code:
                raise
    if launch.comm_report is not None:
        vocab_size = true_vocabulary(plan.settings.megatron)
        values = communication_report.report(LEDGER, built, vocab_size)
        if plan.settings.megatron.rank == 0:
            communication_report.print_report(values)
            if launch.comm_report:
                write_json(Path(launch.comm_report), values)


class _keeping_model:
    """Context that remembers the model chunks that `pretrain()` builds and does not return, and
    leaves the size of the vocabulary to the checkpoints."""

    def __enter__(self) -> list[torch.nn.Module]:
        built: list[torch.nn.Module] = []
        setup = training.setup_model_and_optimizer

        def keep(*args: Any, **kwargs: Any) -> Any:
            result = setup(*args, **kwargs)
            built.extend(result[0])
            setattr(get_args(), TRUE_VOCABULARY, true_vocabulary(get_args()))
            return result

        self._patch = mock.patch.object(training, "setup_model_and_optimizer", keep)
        self._patch.start()
        return built

    def __exit__(self, *_: Any) -> None:
        self._patch.stop()
