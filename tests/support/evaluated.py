"""Small checkpoints to evaluate, and evaluations on the ranks of a test."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, distributed

from megatron.boost.evaluation.evaluate import Request, evaluate
from tests.support.plain_llama import PlainConfig, PlainLlama
from tests.support.runs import forget_run, train_in_turn, whole_weights

HEADS, KV_HEADS = 4, 2
MODEL = (
    f"--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads {HEADS} "
    f"--group-query-attention --num-query-groups {KV_HEADS} "
    "--seq-length 24 --max-position-embeddings 48 --normalization RMSNorm --norm-epsilon 1e-2 "
    "--swiglu --position-embedding-type rope --rotary-base 500 --disable-bias-linear "
    "--init-method-std 0.2 --seed 1234 --make-vocab-size-divisible-by 64 --train-iters 2"
).split()
"""ε and the base of RoPE are none of Megatron's defaults, so a lost one shows."""


def save_checkpoints(runs: dict[str, str], tokenizer: Path, folder: Path) -> dict[str, Any]:
    """On a rank: train each of `runs`, flags by name, and save it to `folder`/name.

    Returns:
        by name the whole weights, by canonical name (Megatron's for its own layers).
    """
    flags = [
        f"{' '.join(MODEL)} {run} --tokenizer-type HuggingFaceTokenizer "
        f"--tokenizer-model {tokenizer} --save {folder / name} --save-interval 2"
        for name, run in runs.items()
    ]
    results = train_in_turn(flags, model=[])
    return {name: whole_weights([one]) for name, one in zip(runs, results, strict=True)}


def evaluate_in_turn(requests: Sequence[Request]) -> list[dict[str, object]]:
    """On a rank that has no world yet: one evaluation after the other, each in a world of its
    own."""
    port, rank, size = (int(os.environ[name]) for name in ("MASTER_PORT", "RANK", "WORLD_SIZE"))
    store = distributed.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    results = []
    for number, request in enumerate(requests):
        distributed.init_process_group(
            "gloo",
            store=distributed.PrefixStore(f"evaluation {number}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        results.append(evaluate(request, lambda read, total: None).as_flat_dict())
        if request.load is not None:
            forget_run()
    return results


def refusals(requests: Sequence[tuple[int, Request]]) -> list[str]:
    """On a rank that has no world yet: what is said of each request when so many ranks make it."""
    said = []
    for ranks, request in requests:
        try:
            with mock.patch.dict(os.environ, WORLD_SIZE=str(ranks)):
                evaluate(request, lambda read, total: None)
        except ValueError as refusal:
            said.append(str(refusal))
        assert not distributed.is_initialized()
        forget_run()
    return said


def plain_model(weights: dict[str, Tensor], vocab_size: int, **more: Any) -> PlainLlama:
    """The reference for a model of `MODEL`, in fp64."""
    config = PlainConfig(
        vocab_size=vocab_size,
        hidden=32,
        ffn=48,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=8,
        layers=2,
        norm_eps=1e-2,
        rope_base=500.0,
        **more,
    )
    return PlainLlama(config).load_canonical(weights)


def canonical_of_stock(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of Megatron's own layers, whole, under the canonical names of ours.

    Megatron keeps q, k and v in one matrix, KV group by KV group, and gate above up.
    """
    found = {}
    for name, tensor in weights.items():
        base, _, kind = name.rpartition(".")
        if base.endswith("self_attention.linear_qkv"):
            groups = tensor.unflatten(0, (KV_HEADS, HEADS // KV_HEADS + 2, 8))
            parts = groups.split([HEADS // KV_HEADS, 1, 1], dim=1)
            for part, one in zip("qkv", parts, strict=True):
                found[base.replace("linear_qkv", f"{part}_proj.weight")] = one.flatten(0, 2)
        elif base.endswith("linear_fc1"):
            gate, up = tensor.chunk(2)
            found[base.replace("linear_fc1", "gate_proj.weight")] = gate
            found[base.replace("linear_fc1", "up_proj.weight")] = up
        else:
            renamed = base.replace("linear_proj", "o_proj").replace("linear_fc2", "down_proj")
            found[f"{renamed}.{kind}"] = tensor
    return found


def mean_loss(
    nats: Any, ids: Sequence[int], window: int, stride: int | None = None
) -> tuple[float, int]:
    """The loss by the rule that the windows' docs state, token by token.

    Args:
        nats: from a context and the token after it, both lists, to that token's −ln p.
        ids: the text, its first token being context only.
        window: tokens in a window.
        stride: how far the next one moves on.

    Returns:
        the mean, and over how many tokens.
    """
    stride = stride or window
    last = len(ids) - 1
    losses = []
    for position in range(1, len(ids)):
        # The end of the window that scores this token, and from there its beginning.
        end = window
        while end < position:
            end += stride
        end = min(end, last)
        begin = max(0, end - window)
        losses.append(nats(list(ids[begin:position]), ids[position]))
    return float(np.mean(losses)), len(losses)


@torch.no_grad()
def nats_of_plain(model: PlainLlama) -> Any:
    """For `mean_loss`."""

    def nats(context: list[int], token: int) -> float:
        logits = model(torch.tensor([context]))[0][0, -1]
        return float(-logits.log_softmax(-1)[token])

    return nats
