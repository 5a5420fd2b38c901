"""A low-rank GPT in a plain Megatron-Core program: `low_rank_spec` gives `GPTModel` its layers.

torchrun --nproc-per-node 2 examples/plain_gpt_model.py                          # on GPUs
torchrun --nproc-per-node 2 -m megatron.boost.cpu examples/plain_gpt_model.py    # without
"""

import torch
from megatron.core import distributed, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from boost_layers import LowRankConfig, finish_model, low_rank_spec

VOCABULARY, LENGTH, BATCH, STEPS, SEED = 100, 64, 16, 60, 1234
COLA = LowRankConfig(arch="cola", ratio=0.25, seed=SEED)


def build_model(tp, low_rank):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        ffn_hidden_size=344,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        finalize_model_grads_func=distributed.finalize_model_grads,
    )
    layers = low_rank_spec(config, low_rank)
    padded = -(-VOCABULARY // (64 * tp)) * 64 * tp  # so that TP divides it
    model = GPTModel(config, layers, padded, LENGTH, position_embedding_type="rope").cuda()
    finish_model(model, VOCABULARY, SEED)
    ddp_config = distributed.DistributedDataParallelConfig()
    return distributed.DistributedDataParallel(config, ddp_config, model)


def sequences():
    """They count up from anywhere, by 1 to 4 at a time."""
    while True:
        start, step = torch.randint(VOCABULARY, (BATCH, 1)), torch.randint(1, 5, (BATCH, 1))
        yield ((start + step * torch.arange(LENGTH + 1)) % VOCABULARY).cuda()


def forward_step(data, model):
    tokens = next(data)
    positions = torch.arange(LENGTH, device="cuda").expand(BATCH, LENGTH)
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return losses, lambda losses: (losses.mean(), {"loss": losses.mean().item()})


def main(low_rank=COLA):
    torch.cuda.set_device(torch.distributed.get_node_local_rank())
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(torch.distributed.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    torch.manual_seed(SEED)  # The ranks of a tensor-parallel group read the same data.
    model = build_model(torch.distributed.get_world_size(), low_rank)
    optimizer, data = get_megatron_optimizer(OptimizerConfig(lr=3e-3), [model]), sequences()
    for step in range(1, STEPS + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        (logged,) = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=[model],
            num_microbatches=1, seq_length=LENGTH, micro_batch_size=BATCH,
        )  # fmt: skip
        optimizer.step()
        if torch.distributed.get_rank() == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}: loss {logged['loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
