"""A guided tour of one transformer block: every tensor, its shard, and every collective.

    python examples/tour_of_a_block.py [--tp 2] [--strategy btp|vanilla|dense] [--arch cola]

Two layers of a small model are built on as many gloo ranks of this machine as --tp says, and the
second is run forward and backward. Nothing that is printed is written down here: steps are the
autograd Functions that run, in the order in which they run, tensors what they are given and the
gradients that they return, collectives what the ledger sees. How a tensor is split is found by
comparing the ranks' with those of the same block on one rank, which has the same weights.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from unittest import mock

import gated_latent  # noqa: F401 (registers "gated", an --arch like any other)
import torch
from torch import distributed, multiprocessing

from boost_layers import LowRankConfig
from boost_layers.architecture import architecture_names
from boost_layers.communication import LEDGER
from megatron.boost.command_line import ToolParser, run_tool, write_json

SEQUENCE, BATCH = 16, 2
TOKENS = SEQUENCE * BATCH
SIZES = {
    "num_layers": 3,
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 16,
}
RANK = 24
SEED = 1234
TOLERANCE = 1e-4


def main(argv=None):
    parser = ToolParser(__doc__.splitlines()[0])
    parser.add_argument(
        "--tp", type=int, choices=(1, 2, 4), default=2, help="ranks, among which heads are split"
    )
    parser.add_argument("--strategy", choices=("btp", "vanilla", "dense"), default="btp")
    low_rank = [name for name in architecture_names() if name not in ("none", "dense")]
    parser.add_argument("--arch", choices=low_rank, default="cola", help="of a low-rank block")
    args = parser.parse_args(argv)
    settings_of(args)
    # Megatron names every optional package that it does without; imported once for all ranks.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    importlib.import_module("boost_layers.specs")

    with tempfile.TemporaryDirectory(prefix="tour-") as folder:
        multiprocessing.start_processes(
            on_rank, (args, folder), nprocs=args.tp, start_method="fork"
        )


def settings_of(args):
    if args.strategy == "dense":
        return LowRankConfig(arch="dense", core_attention="sdpa", seed=SEED)
    return LowRankConfig(
        arch=args.arch, tp=args.strategy, rank=RANK, core_attention="sdpa", seed=SEED
    )


def config_of(settings, tp):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        **SIZES,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=settings.hidden_sharded and tp > 1,
        use_cpu_initialization=True,
    )


def on_rank(rank, args, folder):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.tp
    )
    steps = tour(settings_of(args))
    if rank == 0:
        show(args, steps)
        if args.json is not None:
            write_json(args.json, summary(steps))
    distributed.destroy_process_group()


def tour(settings):
    """The steps of a block on all ranks, with the layout of their tensors."""
    tp = distributed.get_world_size()
    alone = [distributed.new_group([rank]) for rank in range(tp)][distributed.get_rank()]
    whole = run_block(settings, alone, alone)
    steps = run_block(settings, distributed.group.WORLD, alone)
    for step in steps:
        for tensor in step.tensors:
            tensor.layout, tensor.whole_shape = layout_of(tensor, step, whole, tp)
    return steps


@dataclass
class Named:
    """A tensor as one rank has it."""

    name: str
    value: torch.Tensor
    layout: str = ""
    whole_shape: torch.Size | None = None


@dataclass
class Step:
    """What one autograd Function took, or its backward gave, and the collectives meanwhile."""

    title: str
    phase: str
    of: Step | None = None
    """That whose backward this is."""
    tensors: list[Named] = field(default_factory=list)
    collectives: list[tuple[str, torch.Tensor]] = field(default_factory=list)


class Recorder:
    """Steps in the order in which they run."""

    def __init__(self, parameters):
        self.parameters = {id(parameter): name for name, parameter in parameters}
        self.steps = []
        self.alive = []

    def name(self, tensor, argument):
        """A parameter's own, else that of the argument as which it is taken."""
        return self.parameters.get(id(tensor), argument)

    def apply(self, function, *args):
        """`function.apply(*args)` as a step, and its backward as another; Functions of ours."""
        if not function.__module__.startswith("boost_layers"):
            return APPLY.__get__(None, function)(*args)
        taken = [
            (self.name(value, argument), value)
            for argument, value in arguments_of(function, args)
            if isinstance(value, torch.Tensor)
        ]
        title = title_of(function)
        step = Step(title, "forward", tensors=[Named(n, copy_of(value)) for n, value in taken])
        self.steps.append(step)
        result = APPLY.__get__(None, function)(*args)
        outputs = result if isinstance(result, tuple) else (result,)
        nodes = {o.grad_fn for o in outputs if isinstance(o, torch.Tensor) and o.grad_fn}
        node = next(n for n in nodes if n.name() == f"{function.__name__}Backward")
        node.register_prehook(lambda _: self.steps.append(Step(title, "backward", of=step)))
        node.register_hook(lambda gradients, _: self.returned(taken, gradients))
        self.alive.append(node)
        return result

    def returned(self, taken, gradients):
        """The gradients that a step's backward has given."""
        self.steps[-1].tensors += [
            Named(f"d {name}", copy_of(gradient))
            for (name, _), gradient in zip(taken, gradients, strict=True)
            if gradient is not None
        ]

    def attends(self, module, inputs):
        """A core attention's forward, which is PyTorch's; its backward by its inputs' gradients."""
        names = list(inspect.signature(module.forward).parameters)
        taken = [Named(n, v) for n, v in zip(names, inputs, strict=False) if v is not None]
        title = title_of(type(module))
        step = Step(title, "forward", tensors=[Named(t.name, copy_of(t.value)) for t in taken])
        self.steps.append(step)
        backward = Step(title, "backward", of=step)

        def arrived(name, gradient):
            if not backward.tensors:
                self.steps.append(backward)
            backward.tensors.append(Named(f"d {name}", copy_of(gradient)))

        for tensor in taken:
            tensor.value.register_hook(lambda g, name=tensor.name: arrived(name, g))

    def communicates(self, scope, phase, operation, tensor):
        """A collective of the ledger's."""
        self.steps[-1].collectives.append((operation, copy_of(tensor)))


APPLY = torch.autograd.Function.__dict__["apply"]


def arguments_of(function, args):
    """Names and values, one by one, of what an autograd Function's forward is given."""
    parameters = list(inspect.signature(function.forward).parameters.values())[1:]
    bound = inspect.Signature(parameters).bind(*args).arguments
    for name, value in bound.items():
        several = isinstance(value, tuple) and name == parameters[-1].name
        yield from ((name, each) for each in (value if several else (value,)))


def title_of(function):
    """The first sentence about a Function, or its name."""
    text = " ".join((function.__doc__ or "").split())
    return text.partition(". ")[0].rstrip(".") or function.__name__.strip("_")


def copy_of(tensor):
    return tensor.detach().clone()


@contextmanager
def recording(recorder, layer):
    def apply(cls, *args):
        return recorder.apply(cls, *args)

    core = layer.self_attention.core_attention
    hook = core.register_forward_pre_hook(recorder.attends)
    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(LEDGER, "observer", recorder.communicates),
    ):
        yield
    hook.remove()


def run_block(settings, group, alone):
    """The second layer of a model on the ranks of `group`, forward and backward."""
    from megatron.core.transformer.spec_utils import build_module

    from boost_layers.specs import layer_spec

    config = config_of(settings, group.size())
    groups = SimpleNamespace(tp=group, pp=alone, cp=alone)
    first, layer = (
        build_module(
            layer_spec(settings, index),
            config=config,
            layer_number=index + 1,
            pg_collection=groups,
        )
        for index in (0, 1)
    )
    generator = torch.Generator().manual_seed(SEED)
    shape = SEQUENCE, BATCH, config.hidden_size
    x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
    angles = rope_angles(config.kv_channels)
    with torch.no_grad():
        x, context = first(sequence_share(x, settings, group), rotary_pos_emb=angles)
    # Latents of the layer before, where they cross over.
    context = context and [
        replace(latent, value=latent.value.requires_grad_()) for latent in context
    ]
    recorder = Recorder(layer.named_parameters())
    with recording(recorder, layer):
        y, _ = layer(x.requires_grad_(), context=context, rotary_pos_emb=angles)
        # Between BTP layers [s, b, d/T] is viewed as [s/T, b, d].
        result = Named("x", copy_of(y).view(SEQUENCE, BATCH, -1))
        recorder.steps.append(Step("What the block gives", "forward", tensors=[result]))
        y.backward(hidden_share(dy, settings, group).view(y.shape))
    return recorder.steps


def rope_angles(head):
    frequency = 10000.0 ** -(torch.arange(0, head, 2) / head)
    angles = torch.outer(torch.arange(SEQUENCE), frequency)
    return torch.cat([angles, angles], dim=1)[:, None, None, :]


def sequence_share(x, settings, group):
    """What the embedding gives a rank: BTP layers its share of the sequence."""
    return x.chunk(group.size())[group.rank()] if settings.hidden_sharded else x


def hidden_share(x, settings, group):
    """What a layer of the middle gives a rank: BTP layers its share of hidden."""
    return (x.chunk(group.size(), -1)[group.rank()] if settings.hidden_sharded else x).contiguous()


def layout_of(tensor, step, whole, tp):
    """How the ranks hold a tensor, and the shape of the whole, by comparison with `whole`."""
    parts = [torch.empty_like(tensor.value) for _ in range(tp)]
    distributed.all_gather(parts, tensor.value.contiguous())
    same_step = [each for each in whole if (each.title, each.phase) == (step.title, step.phase)]
    candidates = [t for each in same_step for t in each.tensors if t.name == tensor.name]
    candidates += [t for each in whole for t in each.tensors]
    for candidate in candidates:
        found = relation(parts, candidate.value)
        if found is not None:
            return found, candidate.value.shape
    return "not a part of one tensor of the block on one rank", None


def relation(parts, whole):
    """How `parts`, one of each rank, make up `whole`; None if they do not."""
    if parts[0].dim() != whole.dim():
        return None
    if parts[0].shape == whole.shape:
        if all(close(part, whole) for part in parts):
            return "on every rank"
        if close(sum(parts), whole):
            return "a summand"
        alike = all(close(part.sort().values, whole.sort().values) for part in parts)
        return "on every rank, in another order" if alike else None
    for axis in range(whole.dim()):
        joined = torch.cat(parts, dim=axis)
        if joined.shape != whole.shape:
            continue
        if close(joined, whole):
            return f"split along axis {axis}"
        if close(joined.sort(axis).values, whole.sort(axis).values):
            return f"split along axis {axis}, each projection's part apart"
    return None


def close(a, b):
    return bool((a - b).norm() <= TOLERANCE * b.norm())


def show(args, steps):
    settings = settings_of(args)
    what = f"{settings.arch} block" + ("" if settings.arch == "dense" else f" under {settings.tp}")
    print(
        f"One {what} on {args.tp} ranks, as rank 0 sees it: s {SEQUENCE}, b {BATCH}, "
        f"d {SIZES['hidden_size']}, f {SIZES['ffn_hidden_size']}, "
        f"{SIZES['num_attention_heads']} heads, "
        + ("" if settings.arch == "dense" else f"r {RANK}, ")
        + "in fp32"
    )
    print(f"\n{'':>7}{'':<34}{'whole':<15}{'on a rank':<15}layout")
    numbers = {id(step): number for number, step in enumerate(steps, start=1)}
    phase = None
    for step in steps:
        if step.phase != phase:
            phase = step.phase
            print(f"\n{phase}")
        of = "" if step.of is None else f"backward of {numbers[id(step.of)]}: "
        print(f"{numbers[id(step)]:>4}   {of}{step.title}")
        for tensor in step.tensors:
            shape = "" if tensor.whole_shape is None else str(list(tensor.whole_shape))
            local = str(list(tensor.value.shape))
            print(f"{'':>7}{tensor.name:<34}{shape:<15}{local:<15}{tensor.layout}")
        for operation, message in step.collectives:
            size = message.numel() * message.element_size()
            print(
                f"{'':>5}> {operation.replace('_', '-')} of {size:,} bytes: "
                f"{message.numel() / TOKENS:g} numbers a token"
            )
    print()
    for key, value in summary(steps).items():
        print(f"{key.replace('_', ' ')}: {value:,}")


def summary(steps):
    """Calls and bytes of this rank's collectives by phase and operation."""
    totals = {}
    for step in steps:
        for operation, message in step.collectives:
            for unit, amount in (("calls", 1), ("bytes", message.numel() * message.element_size())):
                key = f"{step.phase}_{operation}_{unit}"
                totals[key] = totals.get(key, 0) + amount
    return totals


if __name__ == "__main__":
    run_tool(main)
