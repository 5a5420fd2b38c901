"""The flags that name a model and say how it is loaded, alike for every tool that takes one."""

from __future__ import annotations

from pathlib import Path

from megatron.boost.command_line import ToolParser, whole_number


def add_model_flags(parser: ToolParser) -> None:
    """Add `--load` and `--hf`, one of which is needed, and what goes with them."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--load", type=Path, metavar="DIR", help="a Megatron checkpoint")
    model.add_argument("--hf", type=Path, metavar="DIR", help="a Hugging Face folder")
    parser.add_argument(
        "--ckpt-step", type=whole_number(1), metavar="N", help="the iteration to load (the last)"
    )
    parser.add_argument(
        "--tokenizer-model",
        metavar="DIR",
        help="folder of a Hugging Face tokenizer (the model's own)",
    )
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights (as they are stored)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the modelling code that a Hugging Face folder brings",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show the libraries' notices, on standard error"
    )
