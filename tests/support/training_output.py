"""Lines as Megatron's training loop prints them, for tests of what reads them."""

from collections.abc import Sequence


def iteration_line(number: int, total: int, loss: float, milliseconds: float) -> str:
    """The line of one iteration, its numbers as given."""
    shown = "" if loss != loss else f" lm loss: {loss:.6E} |"
    return (
        f" [2025-11-30 07:30:00.123456] iteration {number:8d}/{total:8d} | consumed samples: "
        f"{number * 4:12d} | elapsed time per iteration (ms): {milliseconds:.1f} | learning rate: "
        f"{1e-3:.6E} | global batch size: {4:5d} |{shown} loss scale: 1.0 | grad norm: 1.234 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def validation_line(number: int, loss: float) -> str:
    """The line of an evaluation after iteration `number`."""
    return (
        f" validation loss at iteration {number} on validation set | lm loss value: {loss:.6E} | "
        f"lm loss PPL: {2.718281828**loss:.6E} | \n"
    )


def training_lines(
    losses: Sequence[float], milliseconds: Sequence[float], validation_loss: float
) -> list[str]:
    """The output of a whole run, with the second line's means over two iterations."""
    total = len(losses)
    shown = [list(losses), list(milliseconds)]
    for values in shown:
        values[1] = (values[0] + values[1]) / 2
    lines = ["> building train, validation, and test datasets ...\n"]
    for number, (loss, time) in enumerate(zip(*shown, strict=True), start=1):
        lines.append(iteration_line(number, total, loss, time))
    lines.append("-" * 80 + "\n")
    lines.append(validation_line(total, validation_loss))
    return lines
