"""A recipe of Megatron-LM's runs with our `pretrain_gpt.py` as it stands: the flags that
`examples/llama/train_llama3_8b_h100_fp8.sh` gives in its bf16 mode with mock data, on CPU with only
its sizes cut and `--profile` left out."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.programs import finished_python

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Its model and training flags, word by word; `SIZES` are cut below.
RECIPE = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
--seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
--init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
--untie-embeddings-and-output-weights --disable-bias-linear
--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000
--lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001
--decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0
--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1
--sequence-parallel --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
--data-cache-path CACHE --tiktoken-pattern v2 --split '99,1,0'
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1
--eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
--profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
--distributed-timeout-minutes 60 --save CHECKPOINT --load CHECKPOINT --tensorboard-dir LOGS
"""
SIZES = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--ffn-hidden-size": "96",
    "--num-attention-heads": "8",
    "--num-query-groups": "2",
    "--kv-channels": "8",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--global-batch-size": "4",
    "--train-samples": "20",
    "--lr-decay-samples": "18",
    "--lr-warmup-samples": "4",
    "--vocab-size": "256",
    "--eval-iters": "1",
    "--eval-interval": "4",
    "--save-interval": "5",
}


def cut(recipe: str, folder: Path) -> list[str]:
    """The recipe with small sizes and without the profiler, in the folder."""
    # The script leaves its arrays unquoted, so that the quotes of '99,1,0' stay.
    words = recipe.split()
    for flag, value in SIZES.items():
        words[words.index(flag) + 1] = value
    start = words.index("--profile")
    del words[start : words.index("--ckpt-format")]
    places = {name: str(folder / name.lower()) for name in ("CACHE", "CHECKPOINT", "LOGS")}
    return [places.get(word, word) for word in words]


@pytest.mark.slow
def test_a_recipe_of_upstreams_trains_logs_and_saves(tmp_path: Path) -> None:
    output, _ = finished_python([*TORCHRUN, "pretrain_gpt.py", *cut(RECIPE, tmp_path)])
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", output)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert "throughput per GPU" in output
    assert (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").read_text() == "5"
    if find_spec("tensorboard") is not None:
        assert list((tmp_path / "logs").iterdir())
