"""From a dense LLaMA to a low-rank one and back to Hugging Face, on a CPU in less than two minutes.

    python examples/llama_to_low_rank.py [--folder FOLDER] [--iterations 40]

A tiny LLaMA is trained by transformers on the source of Python's standard library. It is imported
by truncated SVD, trained on with BTP on two ranks, exported again and asked to go on with a prompt.
Every step after the first is a command of `tools/` or `pretrain_gpt.py`, printed as it runs, and
what it does to the loss stands in a table at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 1024
POSITIONS = 128
ROWS = 16
MODULES = 50
END = "<|end|>"


def main() -> None:
    """Run all steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="a new one (default: the next in runs/)")
    parser.add_argument("--iterations", type=int, default=40, help="of training with BTP")
    parser.add_argument("--source-steps", type=int, default=160, help="of the dense model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON too")
    args = parser.parse_args()
    numbered = (ROOT / "runs" / f"llama-to-low-rank-{number}" for number in count(1))
    folder = args.folder or next(path for path in numbered if not path.exists())
    if folder.exists():
        sys.exit(f"error: --folder {folder}: exists; nearest legal value: a new folder")
    folder.mkdir(parents=True)

    write_text(folder)
    train_dense(folder, args.source_steps)
    losses = {"dense LLaMA": evaluate(folder, "--hf", "llama")}

    tool(folder, "checkpoint/convert.py", "import --hf llama --save low-rank --low-rank-arch svd "
         "--energy 0.99 --calibration sample.txt --check")  # fmt: skip
    losses["imported by SVD"] = evaluate(folder, "--load", "low-rank")

    tool(folder, "preprocess_data.py", "--input train.jsonl --output-prefix train "
         "--tokenizer-model llama --append-eod")  # fmt: skip
    run(
        folder,
        "torchrun --nproc-per-node 2 pretrain_gpt.py --load low-rank --use-checkpoint-args "
        f"--tensor-model-parallel-size 2 --seq-length {POSITIONS} "
        f"--micro-batch-size {ROWS} --global-batch-size {ROWS} --train-iters {args.iterations} "
        "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --clip-grad 1.0 "
        "--data-path train_text_document --split 100,0,0 --eval-interval 1000 --eval-iters 0 "
        "--save trained --save-interval 1000 --log-interval 10",
    )
    losses["trained on with BTP"] = evaluate(folder, "--load", "trained")

    tool(folder, "checkpoint/convert.py", "export --load trained --hf exported --check")
    losses["exported"] = evaluate(folder, "--hf", "exported", "--trust-remote-code")
    tool(folder, "generate.py", "--hf exported --trust-remote-code --max-new-tokens 40 "
         "--prompt 'def __init__(self'")  # fmt: skip

    print(f"\nEverything is in {folder}. Held-out loss, in nats a token:")
    for name, loss in losses.items():
        print(f"  {name:<20} {loss:.3f}")
    if args.json is not None:
        named = {f"{name.replace(' ', '_')}_loss": loss for name, loss in losses.items()}
        args.json.write_text(json.dumps(named, indent=2) + "\n")


def write_text(folder: Path) -> None:
    """Text to train on, as lines of JSON and plain, a sample of it and a held-out file: modules of
    the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.glob("*.py") if path.stat().st_size > 2000)
    random.Random(0).shuffle(files)
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    held_out, training = texts[:3], texts[3:MODULES]
    (folder / "held-out.txt").write_text("\n".join(held_out)[:60_000], encoding="utf-8")
    (folder / "train.txt").write_text("\n".join(training), encoding="utf-8")
    (folder / "sample.txt").write_text("\n".join(training)[:60_000], encoding="utf-8")
    lines = (json.dumps({"text": text}) + "\n" for text in training)
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")


def train_dense(folder: Path, steps: int) -> None:
    """Train a tokenizer and a LLaMA with transformers, and save both in `folder`/llama."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(folder / "train.txt")], vocab_size=VOCABULARY, special_tokens=[END])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = batches_of(tokenizer((folder / "train.txt").read_text(encoding="utf-8")).input_ids)
    for step in range(steps):
        tokens = next(batches)
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 40 == 0:
            print(f"dense LLaMA: step {step + 1}/{steps}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")


def batches_of(tokens: list[int]) -> Iterator[torch.Tensor]:
    """Batches `[ROWS, POSITIONS]` from random places of the text."""
    text, generator = torch.tensor(tokens), torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - POSITIONS, (ROWS,), generator=generator)
        yield torch.stack([text[start : start + POSITIONS] for start in starts])


def evaluate(folder: Path, *model: str) -> float:
    """The loss on the held-out text."""
    words = f"{shlex.join(model)} --text held-out.txt --json loss.json"
    tool(folder, "evaluate.py", words)
    loss: float = json.loads((folder / "loss.json").read_text())["loss_nats_per_token"]
    return loss


def tool(folder: Path, name: str, flags: str) -> None:
    """Run a script of tools/."""
    run(folder, f"python tools/{name} {flags}")


def run(folder: Path, line: str) -> None:
    """Print a command and run it in `folder`, with this Python; ends the program if it fails."""
    print(f"\n$ {line}", flush=True)
    words = [str(ROOT / word) if word.endswith(".py") else word for word in shlex.split(line)]
    if words[0] == "torchrun":
        words = ["-m", "torch.distributed.run", *words[1:]]
    else:
        words = words[1:]
    done = subprocess.run([sys.executable, *words], cwd=folder)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
