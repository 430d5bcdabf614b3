"""Ranks for tests: gloo processes for truth, threads for speed.

`RankPool(n).run(fn, *args)` calls `fn` on n processes that share a gloo group and live as long as
the pool, so that starting them is paid once. `run_threads(n, fn, *args)` calls `fn(transport,
*args)` on n threads of this process: for the engine only, since the active step is a variable of
the process.
"""

import contextlib
import copy
import faulthandler
import fcntl
import gc
import itertools
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.private.groups import num_process_groups
from tests.torch_names import code_generator, compile_here

# Processes fork from a server that has imported these: a rank starts in a tenth of a second. Where
# there is a GPU, nothing else: a library that looks for GPUs when it is imported spoils the fork.
_PRELOAD = [
    "tests.imports_without_collecting",
    "torch",
    "torch.distributed",
    "lightning_cp.parallel",
    "lightning_cp.lightning.strategy",
]
if not torch.cuda.is_available():
    _PRELOAD += ["pytest", "hf_patches.adapter", "peft", "tests.lightning.steps.generated_steps"]
    _PRELOAD += ["tests.parity.media", "tests.parity.sdpa_models", "recipes.cli"]
    _PRELOAD += ["tests.hf_patches.trainers.trainer_jobs"]
_context = get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)

TIME_LIMIT = 600
"""Seconds until ranks that do not answer count as hanging: far beyond what any job takes, since
other machines may take most of a shared core's time."""

# A gloo group has a connection to each rank, which stays. Ranks that start anew cost more: each
# finds out again how torch shards every operator.
MANY_GROUPS = 160


class RankError(AssertionError):
    """A rank failed; carries its traceback, or how its process ended and what it said last."""


class RankPool:
    """``world_size`` processes that run functions together, on gloo or on NCCL and one GPU.

    A function and its arguments must pickle: module-level, in an importable module. When a rank
    fails or the time limit passes, all processes are ended and the pool starts anew at the next
    run.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.backend = backend
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self.patience = 2.0  # seconds for the others once a rank has failed
        self._tired = False

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = TIME_LIMIT) -> list[Any]:
        """Return what ``fn(*args)`` returned on each rank."""
        if not self._processes:
            self._start()
        job = pickle.dumps((fn, args))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        dead: set[int] = set()
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < self.world_size:
            waiting = [
                p for r, p in enumerate(self._pipes) if r not in results and r not in failures
            ]
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    good, value, tired = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    good, value, tired = False, self._last_words(rank), True
                    dead.add(rank)
                self._tired = self._tired or tired
                (results if good else failures)[rank] = value
            if failures:  # the others may wait for the failed rank for ever
                deadline = min(deadline, time.monotonic() + self.patience)
        if failures:
            self.stop()
            # A rank that died is the cause: the others only lost their connection to it.
            rank, text = min(failures.items(), key=lambda item: (item[0] not in dead, item[0]))
            raise RankError(f"rank {rank} of {self.world_size} failed:\n{text}")
        if len(results) < self.world_size:
            late = sorted(set(range(self.world_size)) - set(results))
            where = self._where(late[0])
            self.stop()
            raise RankError(
                f"rank {late[0]} said, and stands at:\n{where}"
                f"ranks {late} of {self.world_size} did not finish in {timeout} s"
            )
        if self._tired:
            self.stop()
        return [results[rank] for rank in range(self.world_size)]

    def _start(self) -> None:
        self._tired = False
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        for rank in range(self.world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve,
                args=(theirs, self._said(rank), rank, self.world_size, self.backend, rendezvous),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _said(self, rank: int) -> Path:
        """Return the file that takes what a rank writes to stderr."""
        return Path(self._folder.name) / f"stderr{rank}"

    def _tail(self, rank: int) -> str:
        said = self._said(rank)
        if not said.exists():
            return "(before it could write anything)\n"
        text = said.read_text(errors="replace")
        died = text.find("Fatal Python error")  # a deep stack is longer than what is shown
        return (
            text[-6000:] if died < 0 else text[max(0, died - 1000) : died + 5000]
        ).rstrip() + "\n"

    def _last_words(self, rank: int) -> str:
        """Say how a rank's process ended: nobody has seen a traceback."""
        process = self._processes[rank]
        process.join(5)
        code = process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        return f"{self._tail(rank)}the process died: {how}"

    def _where(self, rank: int) -> str:
        """Let a rank that is late write its stacks down."""
        with contextlib.suppress(ProcessLookupError):
            before, end = self._said(rank).stat().st_size, time.monotonic() + 1
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            while self._said(rank).stat().st_size == before and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(0.1)  # until it has written the rest
        return self._tail(rank)

    def stop(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        # Ranks on a GPU end by themselves if they can: who is killed amid a transfer of NCCL takes
        # all processes down that share the GPU with it by NVIDIA's multi-process service.
        patience = time.monotonic() + (5 if self.backend == "nccl" else 0)
        for process in self._processes:
            process.join(max(0.0, patience - time.monotonic()))
            process.kill()
            process.join()
        if self._processes:
            self._folder.cleanup()
        self._pipes, self._processes = [], []


def _serve(
    pipe: Any, said: Path, rank: int, world_size: int, backend: str, rendezvous: str
) -> None:
    # What glibc and C++ say before they abort goes to stderr, where no traceback follows it.
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.write(2, b"(before its first job)\n")  # gone when a job starts
    gc.freeze()  # what the server imported stays shared, and is not visited again
    gc.enable()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    if backend == "nccl":
        from benchmarks.measure import share_gpu

        share_gpu(rank)
        torch.cuda.set_device(0)
        _compile_in_turn(said.parent / "compiling")
    else:
        _share_device()
    dist.init_process_group(
        backend,
        init_method=rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIME_LIMIT / 2),
    )
    if backend == "gloo":  # a job that ends its process would cut the others off amid connecting
        dist.barrier()
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            end_process(0)
        os.ftruncate(2, 0)
        if backend == "nccl":
            litter()
        try:
            fn, args = pickle.loads(job)
            result = fn(*args)
            if backend == "nccl":
                torch.cuda.synchronize()  # what its kernels did wrong is this job's error
            answer = pickle.dumps((True, result, _is_tired()))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc(), True))
        pipe.send_bytes(answer)


# Python documents it under this name: no handler and no other thread of the process runs on.
end_process = os._exit


def _share_device() -> None:
    """Let all groups of this process share one device of gloo.

    A device has a thread that wakes up a hundred times a second, also while the rank waits for its
    next job: with a device for each group, as by default, 2% of a core for a rank with 36 groups.
    """
    group = dist.ProcessGroupGloo
    device, build = group.create_default_device(), group.__init__

    def build_on_device(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        enable_reconfigure: bool = False,  # of torch 2.15
    ) -> None:
        assert not enable_reconfigure
        options = group._Options()  # torch has no public ones for gloo
        options._devices, options._timeout = [device], timeout
        build(self, store, rank, size, options)

    group.__init__ = build_on_device


_keep_bits = False


@contextlib.contextmanager
def same_bits() -> Iterator[None]:
    """Give each tensor that is averaged a message of its own.

    The order of a sum of three depends on the place in the message, and with it the bits, which
    tools/golden.json holds.
    """
    global _keep_bits
    previous, _keep_bits = _keep_bits, True
    try:
        yield
    finally:
        _keep_bits = previous


def average_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Average tensors over all ranks in place, those of one dtype in one message."""
    size = dist.get_world_size()  # noqa: TID251
    if _keep_bits and size > 2:
        for work in [dist.all_reduce(x, async_op=True) for x in tensors]:
            work.wait()
    else:
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            alike = [x for x in tensors if x.dtype == dtype]
            flat = torch.cat([x.flatten() for x in alike])
            dist.all_reduce(flat)
            for x, part in zip(alike, flat.split([x.numel() for x in alike]), strict=True):
                x.copy_(part.view_as(x))
    for x in tensors:
        x /= size


def litter() -> None:
    """Leave NaN in memory of the GPU that is taken again: who reads what nobody wrote is seen."""
    # Numbers in one piece, and in pieces of the allocator's pool for small ones.
    sizes = [2**26] + [2**17] * 64
    kept = [torch.full((size,), float("nan"), device="cuda") for size in sizes]
    del kept


def _compile_in_turn(lock: Path) -> None:
    """Let one rank compile at a time: the others mostly find the same in the compiler's cache."""
    compile_here()
    generator = code_generator()
    # The function that compiles one graph: the public ones hold it, or the one around it.
    compile_graph = generator._compile_fx_inner

    def compile_alone(*args: Any, **kwargs: Any) -> Any:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return compile_graph(*args, **kwargs)

    generator._compile_fx_inner = compile_alone


def _is_tired() -> bool:
    return num_process_groups() > MANY_GROUPS


class _Hub:
    """Where threads leave messages for each other.

    As in NCCL, messages of one pair of ranks are matched by the order in which they are started, on
    either side, not by the order in which they are awaited. One thread runs at a time, until it
    waits for a message: every operator releases the interpreter's lock, and threads that compete
    for it after each of them take several times as long.
    """

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self._boxes: dict[tuple[int, int, int], Tensor] = {}
        self._failed = False

    def put(self, box: tuple[int, int, int], x: Tensor) -> None:
        self._boxes[box] = x
        self.turn.notify_all()

    def get(self, box: tuple[int, int, int]) -> Tensor:
        self.turn.wait_for(lambda: box in self._boxes or self._failed, timeout=120)
        assert box in self._boxes, "a message that never came"
        return self._boxes.pop(box)

    def fail(self) -> None:
        """End the threads that wait for a message."""
        self._failed = True
        self.turn.notify_all()


class ThreadTransport:
    """A transport between threads of one process, which writes down what it was asked to do.

    Args:
        hub: shared by all threads.
        rank: which thread this is.
        size: number of threads.
    """

    device = torch.device("cpu")

    def __init__(self, hub: _Hub, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.log: list[str] = []
        self.numbers_sent = 0
        self.bytes_reduced = 0
        self.dtypes_reduced: list[torch.dtype] = []
        self._hub = hub
        self._calls = itertools.count()
        self.peers = list(range(size))
        self._sent = [itertools.count() for _ in range(size)]
        self._received = [itertools.count() for _ in range(size)]

    def _start(
        self, what: str, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Callable[[], None]:
        call = f"{what} {next(self._calls)}"
        self.log.append(f"start {call}")
        for peer, x in sends:
            assert x.is_contiguous()
            assert x.numel(), "an empty message"
            if peer != self.rank:
                self.numbers_sent += x.numel()
            self._hub.put(self._box(self.rank, peer, self._sent), x.clone())
        due = [(self._box(peer, self.rank, self._received), x) for peer, x in receives]

        def finish() -> None:
            for box, x in due:
                message = self._hub.get(box)
                assert (message.dtype, message.shape) == (x.dtype, x.shape), "a message misread"
                x.copy_(message)
            self.log.append(f"wait {call}")

        return finish

    def _box(self, source: int, target: int, counts: Any) -> tuple[int, int, int]:
        source, target = self.peers[source], self.peers[target]
        other = target if counts is self._sent else source
        return source, target, next(counts[other])

    def exchange(self, sends: Any, receives: Any) -> Callable[[], None]:
        return self._start("exchange", sends, receives)

    def all_gather(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        peers = range(self.size)
        return self._start("all_gather", [(p, x) for p in peers], [(p, out[p]) for p in peers])

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        self.dtypes_reduced.append(x.dtype)
        self.bytes_reduced += (self.size - 1) * out.nbytes
        parts = [torch.empty_like(out) for _ in range(self.size)]
        wait = self._start("reduce_scatter", list(enumerate(x)), list(enumerate(parts)))

        def finish() -> None:
            wait()
            torch.sum(torch.stack(parts), 0, out=out)

        return finish

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Callable[[], None]:
        sends = [(p, part) for p, part in enumerate(x.split(list(sizes))) if part.numel()]
        parts = enumerate(out.split(list(out_sizes)))
        return self._start("all_to_all", sends, [(p, part) for p, part in parts if part.numel()])

    def all_reduce(self, x: Tensor) -> None:
        raise NotImplementedError("the engine does not all-reduce")

    def part(self, ranks: Sequence[int]) -> "ThreadTransport":
        """Return the transport of some of the threads, this one among them."""
        part = copy.copy(self)
        part.rank, part.size = list(ranks).index(self.rank), len(ranks)
        # Two groups have no other thread in common, so that counts of messages can be.
        part.peers = [self.peers[r] for r in ranks]
        return part


def run_threads(
    size: int, fn: Callable[..., Any], *args: Any, timeout: float = TIME_LIMIT
) -> list[Any]:
    """Return what ``fn(transport, *args)`` returned on each of ``size`` threads."""
    hub = _Hub()
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        with hub.turn:
            try:
                results[rank] = fn(ThreadTransport(hub, rank, size), *args)
            except BaseException as error:
                failures.append((rank, error))
                hub.fail()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:  # as daemons they do not keep pytest from ending
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            stacks = file.read()
        raise RankError(
            f"{failures}\nall threads stand at:\n{stacks}"
            f"threads {late} of {size} did not finish in {timeout} s"
        )
    if failures:  # the first one to fail; the others end after it
        raise failures[0][1]
    return results
