r"""Let a model go on with a prompt, shown as it comes.

    python tools/generate.py --load checkpoints --prompt "Once upon a time"
    python tools/generate.py --hf llama/ --prompt "Once upon a time" --top-p 0.9 --temperature 0.8
    python tools/generate.py --hf llama/ < prompt.txt > story.txt

Greedy, unless --top-k, --top-p or --temperature ask for samples. Under torchrun the ranks share
several prompts out, each with the whole model.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megatron.boost.command_line import ToolParser, run_tool, write_json
from megatron.boost.cpu import process_group_ended
from megatron.boost.evaluation.folders import require_hugging_face
from megatron.boost.evaluation.generation import (
    Completion,
    Sampling,
    complete_all,
    prompts_of,
)
from megatron.boost.evaluation.model_flags import add_model_flags
from megatron.boost.evaluation.of_checkpoint import load_checkpoint, tokenizer_in_checkpoint
from megatron.boost.evaluation.of_hugging_face import load_folder
from megatron.boost.evaluation.ranks import (
    device_of,
    join_world,
    notices_kept_away,
    one_refusal,
    rank,
    world_size,
)
from megatron.boost.evaluation.tokenizers import required, tokenizer_of_folder

if TYPE_CHECKING:
    from argparse import Namespace

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str] | None) -> None:
    """Run the tool with `argv`, or the command line when it is None."""
    with one_refusal():
        args = _parser().parse_args(argv)
        sampling = Sampling(
            max_new_tokens=args.max_new_tokens,
            top_k=args.top_k,
            top_p=args.top_p,
            temperature=args.temperature,
            seed=args.seed,
        )
        prompts = prompts_of(args.prompt, args.prompt_file, sys.stdin)
        with notices_kept_away(args.verbose):
            model, tokenizer = _load(args)
            if world_size() > 1:
                # What the ranks send each other is text.
                join_world(torch.device("cpu"))
        done: list[Completion] = []
        try:
            with process_group_ended():
                done = complete_all(model, tokenizer, prompts, sampling, sys.stdout)
        except BrokenPipeError:
            # Who reads has enough, as `head` does. Python would complain once more on exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if rank() == 0 and args.json is not None:
        write_json(args.json, _as_flat_dict(done))


def _load(args: "Namespace") -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    device = device_of(args.device)
    dtype = None if args.dtype is None else _DTYPES[args.dtype]
    if args.hf is not None:
        require_hugging_face(args.hf)
        found = tokenizer_of_folder(args.hf, args.tokenizer_model)
        tokenizer = required(found, f"--hf {args.hf}", "--prompt")
        trust = args.trust_remote_code
        return load_folder(args.hf, dtype=dtype, device=device, trust_remote_code=trust), tokenizer
    found = tokenizer_in_checkpoint(args.load, args.ckpt_step, args.tokenizer_model)
    tokenizer = required(found, f"--load {args.load}", "--prompt")
    return load_checkpoint(args.load, args.ckpt_step, dtype=dtype, device=device), tokenizer


def _as_flat_dict(done: Sequence[Completion]) -> dict[str, object]:
    new, seconds = sum(one.new_tokens for one in done), sum(one.seconds for one in done)
    result: dict[str, object] = {
        "prompts": len(done),
        "new_tokens": new,
        "seconds": seconds,
        "tokens_per_second": new / seconds if seconds else None,
    }
    for number, one in enumerate(done):
        result |= {
            f"prompt_{number}": one.prompt,
            f"prompt_{number}_tokens": one.prompt_tokens,
            f"completion_{number}": one.text,
            f"completion_{number}_tokens": one.new_tokens,
            f"completion_{number}_ended": one.ended,
        }
    return result


def _parser() -> ToolParser:
    parser = ToolParser(
        "Let a model go on with a prompt, shown as it comes. Under torchrun the ranks share out "
        "several prompts, each with the whole model."
    )
    add_model_flags(parser)
    parser.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        default=[],
        metavar="TEXT",
        help='one or several; "-" reads standard input, as does leaving it out',
    )
    parser.add_argument(
        "--prompt-file",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="UTF-8 text files, one prompt each",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=Sampling.max_new_tokens, metavar="N", help="(128)"
    )
    parser.add_argument(
        "--top-k", type=int, metavar="N", help="sample among the N most probable tokens"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample among the fewest tokens that together have probability P",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="sample with the logits divided by T"
    )
    parser.add_argument(
        "--seed", type=int, default=Sampling.seed, metavar="N", help="of the samples (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    run_tool(main)
