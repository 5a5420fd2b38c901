"""A `torch.cuda` that is the CPU: what Megatron needs of it to run without a GPU.

One device, numbered 0. Streams and events are there but order nothing: CPU operations have
finished when their call returns. Memory is the process's resident set.

The random generator is the delicate part. Megatron draws weights and dropout masks from CUDA's
default generator, whose state its tracker swaps to make ranks differ or agree, and warns if the
CPU's generator moves meanwhile. So the stand-in has a generator of its own, and `CudaOnCpuMode`
lends its state to the CPU's generator for the length of each operation that a GPU would have
drawn. Which those are is told by the operation, since a tensor of the CPU and one that stands for
CUDA's look alike: weights that `--use-cpu-initialization` draws come from it too.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.random
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from megatron.boost.patches.replacement import replaced


class Stream:
    """`torch.cuda.Stream` whose work is always done."""

    device = torch.device("cpu")
    priority = 0
    cuda_stream = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        """Waits for nothing: `stream` has no work outstanding."""

    def wait_event(self, event: Event) -> None:
        """Waits for nothing: `event` has happened."""

    def record_event(self, event: Event | None = None) -> Event:
        """Records `event`, or a new one, and returns it."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Waits for nothing."""

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass


class Event:
    """`torch.cuda.Event` that happens at the moment it is recorded."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Notes the time of the call."""
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event's recording to that of `end_event`."""
        if self._recorded_s is None or end_event._recorded_s is None:
            raise RuntimeError("both events must be recorded before their distance is asked for")
        return (end_event._recorded_s - self._recorded_s) * 1e3

    def wait(self, stream: Stream | None = None) -> None:
        """Waits for nothing."""

    def synchronize(self) -> None:
        """Waits for nothing."""

    def query(self) -> bool:
        """True: the event has happened."""
        return True


_STREAM = Stream()


def _no_op() -> Callable[..., None]:
    # A new one each time: TorchDynamo, once imported, tells torch's functions apart by identity.
    return lambda *_args, **_kwargs: None


def _no_context() -> Callable[..., contextlib.nullcontext[None]]:
    return lambda *_args, **_kwargs: contextlib.nullcontext()


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return _most_resident_bytes()


def _peak_resident_bytes() -> int:
    # The kernel brings its maximum up to date now and then only.
    return max(_most_resident_bytes(), _resident_bytes())


def _most_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _memory_stats(device: Any = None) -> dict[str, int]:
    current, peak = _resident_bytes(), _peak_resident_bytes()
    stats: dict[str, int] = defaultdict(int)
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{kind}.all.current"], stats[f"{kind}.all.peak"] = current, peak
    return stats


def _device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="CPU", major=0, minor=0, total_memory=0, multi_processor_count=1, warp_size=32
    )


def _stand_ins(generator: torch.Generator) -> dict[str, Any]:
    """What each name of `torch.cuda` becomes."""
    return {
        "is_available": lambda: False,
        # Initialised, or torch queues its calls for later instead of making them.
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _no_op(),
        "device": _no_context(),
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": _device_properties,
        "get_device_capability": lambda device=None: (0, 0),
        "default_generators": (generator,),
        "synchronize": _no_op(),
        "Stream": Stream,
        "Event": Event,
        "stream": _no_context(),
        "set_stream": _no_op(),
        "current_stream": lambda device=None: _STREAM,
        "default_stream": lambda device=None: _STREAM,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": _no_op(),
        "memory_allocated": lambda device=None: _resident_bytes(),
        "memory_reserved": lambda device=None: _resident_bytes(),
        "max_memory_allocated": lambda device=None: _peak_resident_bytes(),
        "max_memory_reserved": lambda device=None: _peak_resident_bytes(),
        "device_memory_used": lambda device=None: _resident_bytes(),
        "reset_peak_memory_stats": _no_op(),
        "memory_stats": _memory_stats,
    }


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _functions(owner: Any, names: str) -> set[Any]:
    return {getattr(owner, name) for name in names.split()}


_FACTORIES_THAT_DRAW = _functions(torch, "normal rand randint randn randperm")
# Tensor.random_ is not among them: DataLoader draws its base seed with it, from the CPU's
# generator on a GPU machine too, once per start, and a resumed run must not differ by that.
_DRAW = (
    _functions(torch, "bernoulli dropout dropout_ multinomial native_dropout")
    | _functions(torch, "rand_like randint_like randn_like")
    | _functions(torch.Tensor, "bernoulli bernoulli_ cauchy_ exponential_ geometric_")
    | _functions(torch.Tensor, "log_normal_ multinomial normal_ uniform_")
    | _functions(functional, "alpha_dropout dropout dropout1d dropout2d dropout3d")
    | _functions(functional, "feature_alpha_dropout gumbel_softmax rrelu")
    | _functions(functional, "multi_head_attention_forward scaled_dot_product_attention")
    | _functions(nn.init, "kaiming_normal_ kaiming_uniform_ normal_ orthogonal_ sparse_")
    | _functions(nn.init, "trunc_normal_ uniform_ xavier_normal_ xavier_uniform_")
)


class CudaOnCpuMode(TorchFunctionMode):
    """Runs torch functions that ask for a CUDA device on the CPU.

    Args:
        generator: what operations without a generator of their own draw from, see the module.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `func` with the CPU for a CUDA device, unpinned, on the right generator."""
        on_cuda = False
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": "cpu"}
                on_cuda = True
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        if func in _DRAW or (on_cuda and func in _FACTORIES_THAT_DRAW):
            if not kwargs or kwargs.get("generator") is None:
                with self._generator_lent():
                    return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def _generator_lent(self) -> Iterator[None]:
        cpu_state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._generator.get_state())
        try:
            yield
        finally:
            self._generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(cpu_state)


def _device(*args: Any, **kwargs: Any) -> torch.device:
    """`torch.device`, a CUDA one being the CPU. A lone number names a CUDA device."""
    named = kwargs.get("type", kwargs.get("device", args[0] if args else None))
    return torch.device("cpu") if _is_cuda(named) else torch.device(*args, **kwargs)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and _is_cuda(args[0]):
        args = ("cpu", *args[1:])
    return tensor.to(*args, **kwargs)


def _self(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return tensor


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.device: _device,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _self,
    torch.Tensor.pin_memory: _self,
}


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Lets code written for CUDA run on the CPU in this thread and in those started inside."""
    generator = torch.Generator()
    mode = CudaOnCpuMode(generator)
    run_engine = torch.autograd._engine_run_backward
    run_thread = threading.Thread.run

    # backward() is itself a torch function, inside which a mode is off: back on for what the
    # engine calls, such as the forward that a checkpoint repeats.
    @functools.wraps(run_engine)
    def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_engine(*args, **kwargs)

    # A mode belongs to one thread; Megatron builds data sets in others.
    @functools.wraps(run_thread)
    def thread_run(thread: threading.Thread) -> None:
        with mode:
            run_thread(thread)

    with contextlib.ExitStack() as stack:
        for name, value in _stand_ins(generator).items():
            stack.enter_context(replaced(torch.cuda, name, value))
            if hasattr(torch.cuda.random, name):
                stack.enter_context(replaced(torch.cuda.random, name, value))
        # Refuses a stream that is none of torch's before a mode sees the call.
        stack.enter_context(replaced(torch.Tensor, "record_stream", _no_op()))
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", engine_run_backward))
        stack.enter_context(replaced(threading.Thread, "run", thread_run))
        stack.enter_context(mode)
        yield
