"""A second process with a NIXL transport of its own, driven over a pipe."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvpush.transport.base import Region, TransportError
from kvpush.transport.nixl import NixlTransport

START_S = 120.0  # the first start imports NIXL and torch, which takes long on a loaded machine
CALL_S = 20.0


class Agent:
    """A transport and one buffer that it has registered."""

    def __init__(self, name: str, size: int, num_threads: int = 0) -> None:
        self.memory = np.zeros(size, dtype=np.uint8)
        self.transport = NixlTransport(name, num_threads=num_threads)
        self.transport.register([Region(self.address, size)])

    @property
    def address(self) -> int:
        return int(self.memory.__array_interface__["data"][0])

    def call(self, what: str, *args: Any) -> Any:
        if what == "address":
            return self.address
        if what == "read":
            first, end = args
            return self.memory[first:end].copy()
        if what == "fill":
            self.memory[:] = args[0]
            return None
        return getattr(self.transport, what)(*args)


def _serve(pipe: Connection, name: str, size: int) -> None:
    agent = Agent(name, size)
    pipe.send(None)
    while True:
        try:
            what, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, agent.call(what, *args)))
        except TransportError as error:
            pipe.send((False, str(error)))


class PeerProcess:
    """The far side of a test. Stopped and killed by its own process id."""

    def __init__(self, name: str, size: int = 1 << 20) -> None:
        # The server imports NIXL (and with it torch) once and has no agent of its own, so its forks are quick and safe.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["nixl._api"])
        self.name = name
        self.size = size
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, name, size), daemon=True)
        self._process.start()
        far.close()
        if not self._pipe.poll(START_S):
            self.kill()
            raise TimeoutError(f"peer {name} did not start within {START_S} s")
        self._pipe.recv()

    def call(self, what: str, *args: Any) -> Any:
        self._pipe.send((what, args))
        if not self._pipe.poll(CALL_S):
            raise TimeoutError(f"peer {self.name} did not answer {what} within {CALL_S} s")
        good, result = self._pipe.recv()
        if not good:
            raise TransportError(result, self.name)
        return result

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process.is_alive():
            self.signal(signal.SIGKILL)
        self._process.join(10)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        self.kill()
