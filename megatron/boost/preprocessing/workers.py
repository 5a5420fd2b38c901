"""Encoding in several processes at once, in the order of the input.

Each worker is joined to this process by a connection of its own, and there is no lock between any
two of them: one that is killed, whenever that is, can't keep the others waiting. It is noticed at
once, and so is the end of this process by the workers.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterable
from multiprocessing.connection import Connection, wait

from megatron.boost.preprocessing.encoding import Batch, EncodedBatch, Encoder
from megatron.boost.preprocessing.records import Record

BATCHES_PER_WORKER = 2
"""How many are read ahead: one is encoded, one waits."""
BYTES_PER_WORKER = 4 << 20
"""No more is read ahead once that much is, however few batches it is in."""


def encode_in_order(
    batches: Iterable[Batch], encoder: Encoder, workers: int
) -> Generator[tuple[Batch, EncodedBatch]]:
    """Each batch and what becomes of it, in order; the result does not depend on `workers`.

    With one worker this process encodes, on all cores. With more, each encodes on one core in a
    process of its own, and so few batches are read ahead that memory does not grow with the input.
    The processes start by importing the main module, as Python's do. Raises `ChildProcessError`
    when one dies; all have ended when this iterator ends or is closed.
    """
    if workers == 1:
        for batch in batches:
            yield batch, encoder.encode(batch.records)
        return
    with contextlib.closing(_Pool(encoder, workers)) as pool:
        tasks: deque[_Task] = deque()
        held_bytes = 0
        for batch in batches:
            while tasks and (
                len(tasks) >= workers * BATCHES_PER_WORKER
                or held_bytes + batch.size > workers * BYTES_PER_WORKER
            ):
                held_bytes -= tasks[0].batch.size
                yield pool.result(tasks.popleft())
            task = _Task(batch)
            pool.submit(task)
            tasks.append(task)
            held_bytes += batch.size
        while tasks:
            yield pool.result(tasks.popleft())


class _Task:
    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.encoded: EncodedBatch | None = None


class _Worker:
    def __init__(self) -> None:
        # Forked children would inherit the locks of the tokenizers library's threads.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        # Ctrl-C reaches the whole process group; this process alone decides what happens then. A
        # signal blocked here stays so in the child, even while it starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.tasks: deque[_Task] = deque()


class _Pool:
    def __init__(self, encoder: Encoder, workers: int) -> None:
        self._workers: list[_Worker] = []
        try:
            # Started together, and only then given their (large) encoder.
            for _ in range(workers):
                self._workers.append(_Worker())
            for worker in self._workers:
                self._send(worker, encoder)
        except BaseException:
            self.close()
            raise

    def submit(self, task: _Task) -> None:
        """Hand the task to the worker that has least to do."""
        worker = min(self._workers, key=lambda worker: len(worker.tasks))
        worker.tasks.append(task)
        self._send(worker, task.batch.records)

    def result(self, task: _Task) -> tuple[Batch, EncodedBatch]:
        """Wait for the task to be done."""
        while task.encoded is None:
            self._take_results()
        return task.batch, task.encoded

    def close(self) -> None:
        """End all workers at once, whatever they are doing."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()

    def _take_results(self) -> None:
        connections = [worker.connection for worker in self._workers]
        ready = wait([*connections, *(worker.process.sentinel for worker in self._workers)])
        for worker in self._workers:
            if worker.process.sentinel in ready:
                raise self._death(worker)
            if worker.connection not in ready:
                continue
            try:
                answer: EncodedBatch | str = worker.connection.recv()
            except (EOFError, OSError):
                raise self._death(worker) from None
            if isinstance(answer, str):
                raise RuntimeError(f"in a worker process:\n{answer}")
            worker.tasks.popleft().encoded = answer

    def _send(self, worker: _Worker, message: object) -> None:
        try:
            worker.connection.send(message)
        except OSError:
            raise self._death(worker) from None

    def _death(self, worker: _Worker) -> ChildProcessError:
        worker.process.join(timeout=5)
        code = worker.process.exitcode
        how = "" if code is None else f" with exit code {code}"
        if code is not None and code < 0:
            how = f", killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (out of memory?)"
        where = ""
        if worker.tasks:
            path, line, *_ = worker.tasks[0].batch.records[0]
            where = f", at or after {path}" + ("" if line is None else f", line {line}")
        return ChildProcessError(f"a worker process died{how}{where}")


def _serve(connection: Connection) -> None:
    """Encode what comes until this process is killed, or its parent has ended."""
    # The processes are the parallelism; threads in each would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder: Encoder = connection.recv()
    batches: queue.SimpleQueue[list[Record]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, batches), daemon=True).start()
    while True:
        records = batches.get()
        try:
            answer: EncodedBatch | str = encoder.encode(records)
        except Exception:  # whatever it is, the parent ends the run with it
            answer = traceback.format_exc()
        try:
            connection.send(answer)
        except OSError:
            os._exit(1)


def _receive(connection: Connection, batches: "queue.SimpleQueue[list[Record]]") -> None:
    # In a thread, so that a parent that sends never waits for a worker that does so as well.
    while True:
        try:
            batches.put(connection.recv())
        except (EOFError, OSError):
            os._exit(1)
