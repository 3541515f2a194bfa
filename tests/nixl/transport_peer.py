"""A second process with a NIXL transport of its own, driven over a pipe."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvpush.bench.soak.link import End
from kvpush.plan.runs import Addresses, Runs
from kvpush.transport.base import Region, TransportError
from kvpush.transport.nixl import NixlTransport, NixlWrite

START_S = 120.0  # the first start imports NIXL and torch, which takes long on a loaded machine
CALL_S = 20.0
# Of the C library's headers.
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x20000
MS_REC, MS_SLAVE, MNT_DETACH = 0x4000, 0x80000, 2


def _one(value: int) -> Addresses:
    return np.array([value], dtype=np.uint64)


class Agent:
    """A transport and one buffer that it has registered. posted: the write of its last "post"."""

    posted: NixlWrite

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
        if what == "post":
            peer, target, length = args
            self.posted = self.transport.write(peer, Runs(*map(_one, (self.address, target, length))), None, None, b"")
            return None
        if what == "landed":
            return self.transport.done(self.posted)
        return getattr(self.transport, what)(*args)


def _serve(pipe: Connection, name: str, size: int, end: End | None) -> None:
    if end is not None:
        os.environ.update(end.environment)
        _enter(end.namespace)
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


def _enter(namespace: str) -> None:
    """Moves this process into a network namespace, with a /sys that shows its devices: UCX looks for them there."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *args: Any) -> None:
        if getattr(libc, name)(*args):
            raise OSError(ctypes.get_errno(), f"{name} for {namespace}: {os.strerror(ctypes.get_errno())}")

    with open(f"/run/netns/{namespace}") as file:
        call("setns", file.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS)
    call("mount", b"", b"/", None, ctypes.c_ulong(MS_REC | MS_SLAVE), None)
    call("umount2", b"/sys", MNT_DETACH)
    call("mount", namespace.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None)


class PeerProcess:
    """The far side of a test. Stopped and killed by its own process id. end: the side of a link that it lives on."""

    def __init__(self, name: str, size: int = 1 << 20, end: End | None = None) -> None:
        # The server imports NIXL (and with it torch) once and has no agent of its own, so its forks are quick and safe.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["nixl._api"])
        self.name = name
        self.size = size
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, name, size, end), daemon=True)
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
