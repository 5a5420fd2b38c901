"""The course of learning rate and weight decay, checked before anything is built: Megatron's
scheduler finds out after the model stands, in bare assertions."""

from __future__ import annotations

from argparse import Namespace


def check_schedule(arguments: Namespace) -> None:
    """Raise ValueError for a course that Megatron's scheduler does not take, by flag and value.

    Args:
        arguments: as Megatron parsed them, of a run that trains.
    """
    lr, least = arguments.lr, arguments.min_lr or 0.0
    if least < 0.0:
        raise ValueError(f"--min-lr {least}: must not be negative; nearest legal value: 0.0")
    for flag, value in (("--min-lr", least), ("--lr-warmup-init", arguments.lr_warmup_init)):
        if value > lr:
            raise ValueError(f"{flag} {value}: is above --lr {lr}; nearest legal value: {lr}")
    _check_warm_up(arguments)
    if arguments.lr_decay_style == "WSD":
        unit = "samples" if arguments.train_iters is None else "iters"
        if getattr(arguments, f"lr_wsd_decay_{unit}") is None:
            raise ValueError(
                f"--lr-decay-style WSD: needs --lr-wsd-decay-{unit}, over how many it falls at the "
                "end, and that is missing"
            )
    start, end = arguments.start_weight_decay, arguments.end_weight_decay
    if start is not None and end is not None and not 0.0 <= start <= end:
        raise ValueError(
            f"--start-weight-decay {start}: must lie between 0 and --end-weight-decay {end}; "
            f"nearest legal value: {min(max(start, 0.0), max(end, 0.0))}"
        )


def _check_warm_up(arguments: Namespace) -> None:
    """A warm-up that ends before the course does."""
    unit = "samples" if arguments.train_iters is None else "iters"
    trained = getattr(arguments, f"train_{unit}")
    given = getattr(arguments, f"lr_decay_{unit}")
    decay_flag, decay = (
        (f"--train-{unit}", trained) if given is None else (f"--lr-decay-{unit}", given)
    )
    if decay < 1:
        raise ValueError(f"{decay_flag} {decay}: must be positive; nearest legal value: 1")
    fraction = arguments.lr_warmup_fraction
    if fraction is not None:
        if not 0.0 <= fraction < 1.0:
            raise ValueError(
                f"--lr-warmup-fraction {fraction}: must be from 0 to below 1; nearest legal value: "
                f"{0.0 if fraction < 0.0 else 0.99}"
            )
        return
    warm_up = getattr(arguments, f"lr_warmup_{unit}")
    if warm_up >= decay:
        raise ValueError(
            f"--lr-warmup-{unit} {warm_up}: must end before the learning rate's course does, "
            f"{decay_flag} {decay}; nearest legal value: {decay - 1}"
        )
