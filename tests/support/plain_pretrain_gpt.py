"""A Megatron-LM user's pre-training script, equal in effect to upstream's own: everything about the
model comes from Megatron's flags, `--spec` among them. Nothing of BOOST is named in it.
"""

from functools import partial

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def datasets(num_samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


# Every rank reads the data itself.
datasets.is_distributed = True


def loss(loss_mask, losses):
    total = torch.sum(losses.view(-1).float() * loss_mask.view(-1))
    tokens = loss_mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def forward_step(batches, model):
    batch = {name: value.cuda() for name, value in next(batches).items()}
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
    )
    return losses, partial(loss, batch["loss_mask"])


if __name__ == "__main__":
    arguments = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    container = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
