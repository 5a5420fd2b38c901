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
        unit = _unit(arguments)
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
    unit = _unit(arguments)
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


def check_course(stored: Namespace, arguments: Namespace) -> None:
    """Raise ValueError where a run that goes on from a checkpoint plans another course of learning
    rate and weight decay than the checkpoint's run did, by flag and both values; Megatron ends in
    an assertion when it loads the optimizer.

    Args:
        stored: the arguments in the checkpoint.
        arguments: this run's, as Megatron validated them.
    """
    if arguments.override_opt_param_scheduler or arguments.use_checkpoint_opt_param_scheduler:
        return
    theirs = _course(stored)
    for name, (flag, value, shown) in _course(arguments).items():
        flag_then, value_then, shown_then = theirs[name]
        if value == value_then:
            continue
        if (flag, shown) == (flag_then, shown_then):
            # The course is counted in samples.
            flag = flag_then = "--global-batch-size"
            shown, shown_then = arguments.global_batch_size, stored.global_batch_size
        then = shown_then if flag == flag_then else f"{flag_then} {shown_then}"
        raise ValueError(
            f"{flag} {shown}: the checkpoint's run planned learning rate and weight decay with "
            f"{then}; nearest legal value: {then}, or --override-opt-param-scheduler beside it, "
            "which takes the new plan"
        )


def _unit(arguments: Namespace) -> str:
    """What a run is measured in, as its flags end."""
    return "samples" if arguments.train_samples else "iters"


def _course(arguments: Namespace) -> dict[str, tuple[str, object, object]]:
    """What Megatron's scheduler compares, by its name there: the flag that decides it, the value
    compared (steps in samples), and the flag's own value."""
    unit = _unit(arguments)
    scale = 1 if unit == "samples" else arguments.global_batch_size
    trained = getattr(arguments, f"train_{unit}")
    decay = getattr(arguments, f"lr_decay_{unit}") or trained
    fraction = arguments.lr_warmup_fraction
    warm_up = getattr(arguments, f"lr_warmup_{unit}") if fraction is None else fraction * decay
    warm_up_flag = f"--lr-warmup-{unit}" if fraction is None else "--lr-warmup-fraction"
    course: dict[str, tuple[str, object, object]] = {
        name: (f"--{name.replace('_', '-')}", getattr(arguments, name), getattr(arguments, name))
        for name in (
            "lr",
            "min_lr",
            "lr_decay_style",
            "start_weight_decay",
            "end_weight_decay",
            "weight_decay_incr_style",
        )
    }
    return course | {
        "wd_incr_steps": (f"--train-{unit}", trained * scale, trained),
        "lr_decay_steps": (f"--lr-decay-{unit}", decay * scale, decay),
        "lr_warmup_steps": (
            warm_up_flag,
            warm_up * scale,
            warm_up if fraction is None else fraction,
        ),
    }
