"""Real ranks for tests: processes with one gloo group, each waiting for what it is to do."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from cudnn_autotune.store import settings as store_settings
from support.processes.subprocesses import fork_server

_START_S = 120.0


@dataclass(frozen=True)
class Ran:
    """What became of a function on one rank."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0
    died: bool = False


class Ranks:
    """``size`` processes; ``host`` hosts their store: ``launcher`` (as torchrun) or ``rank 0``.

    ``after``: earlier ranks, whose store serves these too, as after a restart by torchrun.
    """

    def __init__(self, size: int, host: str = "launcher", after: Ranks | None = None) -> None:
        self.size = size
        self.store: dist.TCPStore | None = None
        if after is not None:
            self.store = after.store
            port = self.store.port
            for key in self.store.list_keys():
                if "cudnn_autotune" not in key:  # gloo's own, with addresses that are no more
                    self.store.delete_key(key)
        elif host == "launcher":
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self.store.port
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        context = fork_server()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, port, self.store is None, there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        assert [self._result(rank, _START_S).value for rank in range(size)] == list(range(size))

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Ran]:
        """Calls a function of a module (not a closure) on all ranks at once."""
        for rank in range(self.size):
            self.begin(rank, function, *args)
        return [self.end(rank, timeout_s) for rank in range(self.size)]

    def values(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What it returns, on all ranks; raises what one of them has raised."""
        done = self.run(function, *args)
        for ran in done:
            if ran.error is not None:
                raise ran.error
        return [ran.value for ran in done]

    def begin(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        self._pipes[rank].send((function, args))

    def end(self, rank: int, timeout_s: float = 60.0) -> Ran:
        return self._result(rank, timeout_s)

    def kill(self) -> None:
        for rank in range(self.size):
            self.send(rank, signal.SIGKILL)
        for process in self._processes:
            process.join()

    def send(self, rank: int, signal_number: signal.Signals) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal_number)

    def stored(self) -> list[str]:
        """The keys of this package's calls in the store."""
        keys = [key for key in self.store.list_keys() if "cudnn_autotune" in key]
        return [key for key in keys if not key.endswith("/latest")]

    def wait_for_key(self, end: str, timeout_s: float = 30.0) -> None:
        """Returns once the store has a key of this package with such an end."""
        until_s = time.monotonic() + timeout_s
        while not any(key.endswith(end) for key in self.stored()):
            if time.monotonic() > until_s:
                raise TimeoutError(f"no key that ends in {end!r} within {timeout_s} s")
            time.sleep(0.005)

    def _result(self, rank: int, timeout_s: float) -> Ran:
        try:
            if not self._pipes[rank].poll(timeout_s):
                raise TimeoutError(f"rank {rank} does not answer within {timeout_s} s")
            ran: Ran = self._pipes[rank].recv()
            return ran
        except (EOFError, ConnectionResetError):
            return Ran(died=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(rank: int, size: int, port: int, hosts: bool, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store_settings.set_store(mode="off")  # whatever the server was started with
    if hosts:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    else:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    pipe.send(Ran(rank))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        start_s = time.perf_counter()
        try:
            value, error = function(*args), None
        except Exception as raised:
            value, error = None, raised
        pipe.send(Ran(value, error, time.perf_counter() - start_s))
