"""What `pretrain()` asks of a script: data sets, batches and the loss.

Written to give the same batches and the same loss as Megatron's own pre-training script, so that a
run without low-rank layers is Megatron's to the last bit.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, get_tokenizer, print_rank_0
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

if TYPE_CHECKING:
    from argparse import Namespace

    from torch import Tensor

Batch = dict[str, Any]
_SPIKE_FACTOR = 10
_straggler_timer = StragglerDetector()


def refuse_unsupported_data(arguments: Namespace) -> None:
    """Raise ValueError for kinds of data that this script does not feed."""
    for flag, given in (
        ("--sft", arguments.sft),
        ("--perform-rl-step", arguments.perform_rl_step),
        ("--hybrid-context-parallel", arguments.hybrid_context_parallel),
        ("--dataloader-inter-document-masking", arguments.dataloader_inter_document_masking),
        ("--logits-load-dir", arguments.logits_load_dir is not None),
    ):
        if given:
            raise ValueError(
                f"{flag}: this script pre-trains on indexed or mock data only; "
                "nearest legal value: leave it out"
            )


def refuse_missing_data(arguments: Namespace) -> None:
    """Raise ValueError where no data set is named, and for one whose two files are not there,
    naming the nearest that is. Megatron would notice after its start on all ranks."""
    try:
        blend, blend_per_split = get_blend_and_blend_per_split(arguments)
    except OSError as failure:
        raise ValueError(f"{failure.filename}: {failure.strerror}") from failure
    made_elsewhere = arguments.mock_data or arguments.dataloader_type == "external"
    if blend is None and blend_per_split is None and not made_elsewhere:
        raise ValueError(
            "--data-path: is missing, PREFIX of the PREFIX.bin and .idx to train on; nearest legal "
            "value: --mock-data, for made-up tokens"
        )
    for prefixes, _ in filter(None, (blend, *(blend_per_split or ()))):
        for prefix in prefixes:
            missing = [end for end in (".idx", ".bin") if not Path(prefix + end).is_file()]
            if missing and "://" not in prefix:
                known = [str(path.with_suffix("")) for path in Path(prefix).parent.glob("*.idx")]
                others = [name for name in known if name != prefix]
                near = difflib.get_close_matches(prefix, others, n=1, cutoff=0.0)
                raise ValueError(
                    f"{_data_flag(arguments, prefix)} {prefix}: there is no {prefix}{missing[0]}"
                    + (f"; the nearest is {near[0]}" if near else "")
                )


def _data_flag(arguments: Namespace, prefix: str) -> str:
    """The flag that brought a data set."""
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        if prefix in (getattr(arguments, name) or ()):
            return "--" + name.replace("_", "-")
    return "--data-args-path" if arguments.data_args_path else "--per-split-data-args-path"


def provide_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """The training, validation and test data sets of (at least) the given numbers of samples."""
    args = get_args()
    if args.mock_data:
        kind: type = MockGPTDataset
    else:
        kind = GPTFIMDataset if args.fim_data else GPTDataset
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    builder = BlendedMegatronDatasetBuilder(
        kind, num_samples, partial(_reads_data, vp_stage), dataset_config(args)
    )
    train, valid, test = builder.build()
    print_rank_0("> finished creating GPT datasets ...")
    return train, valid, test


# The builder synchronises the ranks itself, so pretrain() must call it on all of them.
provide_datasets.is_distributed = True  # type: ignore[attr-defined]


def _reads_data(vp_stage: int | None) -> bool:
    return is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Megatron's data-set configuration from its arguments."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path, encoding="utf-8") as file:
            sequences_per_dataset = json.load(file)
    settings: dict[str, Any] = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": get_tokenizer(),
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "object_storage_cache_path": args.object_storage_cache_path,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "sequences_per_dataset": sequences_per_dataset,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "context_parallel_size": args.context_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    if not args.fim_data:
        return GPTDatasetConfig(**settings)
    return GPTFIMDatasetConfig(
        **settings,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_extra_tokens={
            "prefix": args.fim_prefix_token,
            "middle": args.fim_middle_token,
            "suffix": args.fim_suffix_token,
            "pad": args.fim_pad_token,
            "eod": args.fim_eod_token,
        },
        fim_split_sample=args.fim_split_sample,
        fim_fragment_rate=args.fim_fragment_rate,
        fim_no_prefix=args.fim_no_prefix,
    )


def read_batch(batches: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """This rank's part of the next micro-batch: `tokens`, `labels`, `loss_mask` and `position_ids`
    `[b, s]`, each None where the stage has no use for it, and `attention_mask` or None. The first
    rank of the TP group reads and broadcasts; middle stages have nothing."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))
    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        assert batches is not None
        batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(batches).items()}
        batch.setdefault("attention_mask", None)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        # As Megatron's own loop tells training from evaluation.
        micro_batch_size=args.micro_batch_size
        if torch.is_grad_enabled()
        else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=args.mtp_num_layers is not None,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
    )
    result: Batch = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    return result


def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[Tensor, Any]:
    """One micro-batch through this stage: its output, and the function that makes a loss of it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _straggler_timer(bdata=True):
        batch = read_batch(batches, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    with _straggler_timer:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output, partial(language_model_loss, batch["loss_mask"])


def language_model_loss(
    loss_mask: Tensor, losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum of the unmasked tokens' losses `[b, s]`, their number, and both for the log.

    `--check-for-nan-in-loss-and-grad` and `--check-for-spiky-loss` act here, through Megatron's
    rerun machine.
    """
    args = get_args()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    rerun = get_rerun_state_machine()
    checks: list[tuple[Any, str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        checks += [
            (torch.isnan, "found NaN in local forward loss calculation", True),
            (torch.isinf, "found Inf in local forward loss calculation", True),
        ]
    if args.check_for_spiky_loss:
        spike = partial(rerun.is_unexpectedly_large, threshold=_SPIKE_FACTOR, context="loss")
        checks.append((spike, "Spiky loss", False))
    for rejected, message, fatal in checks:
        rerun.validate_result(
            result=loss, rejection_func=rejected, message=message, tolerance=0.0, fatal=fatal
        )
    tokens = mask.sum().detach().to(torch.int)
    logged = torch.cat([loss.detach().view(1), tokens.view(1)])
    return loss, tokens, {"lm loss": logged}
