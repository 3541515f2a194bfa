"""The transport over NIXL: one agent per worker, one owner thread.

What NIXL does and the transport smooths over:

- Errors are exceptions of a dozen unrelated types; here they are TransportError and name the peer.
- Agent metadata is opaque and says nothing about the sender when it is refused. `metadata()` puts the name in front.
- Forgetting a peer makes the state of its handles unknowable, although their bytes go on landing. `disconnect`
  therefore waits for them: the peer is gone for new writes at once, and for NIXL when the last handle has ended.
- After one handle of a peer has failed, NIXL drops the peer by itself; so does this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvpush.plan.runs import Addresses, Runs
from kvpush.transport.base import Region, TransportError, WriteHandle, check_agent_name

T = TypeVar("T")

# A NIXL blob is some KiB; with thousands of registered regions it stays far below this.
_MAX_METADATA_BYTES = 16 << 20


class _Metadata(msgspec.Struct, frozen=True, tag="kvpush.nixl.1"):
    name: str
    blob: bytes


class NixlWrite:
    """One posted write; belongs to the transport that made it."""

    __slots__ = ("_cut_off", "_error", "_finished", "_peer", "_raw")

    def __init__(self, peer: str, raw: Any) -> None:
        self._peer = peer
        self._raw = raw
        self._finished = False
        self._cut_off = False  # its peer's endpoint is known to be dead
        self._error: TransportError | None = None

    @property
    def peer(self) -> str:
        return self._peer


class NixlTransport:
    """`Transport` over NIXL. See `kvpush.transport.base` for what each method promises."""

    def __init__(self, name: str, backends: Sequence[str] = ("UCX",), num_threads: int = 0) -> None:
        """Starts an agent.

        name: unique per process life. backends: NIXL plugins, all of which must be there. num_threads: threads that
        post the runs of one write side by side; 0 posts from the caller. 4 threads post thousands of runs about twice
        as fast, and are of no use for few.

        Raises TransportError if NIXL is not installed or an agent with these backends cannot start.
        """
        check_agent_name(name)
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            from nixl import _bindings
        except ImportError as error:
            remedy = "pip install 'nixl>=1.5.1,<2'"
            raise TransportError(f"NIXL cannot be imported ({error}); install it with: {remedy}") from error
        self._name = name
        # They have no base class in common.
        kinds = [kind for kind in vars(_bindings).values() if isinstance(kind, type)]
        nixl_errors: tuple[type[Exception], ...] = tuple(kind for kind in kinds if issubclass(kind, Exception))
        self._nixl_errors = nixl_errors
        self._disconnected: type[Exception] = _bindings.nixlRemoteDisconnectError
        self._agent: Any = None
        self._registered: list[Any] = []
        self._metadata_of: dict[str, bytes] = {}  # connected peers
        self._leaving: set[str] = set()  # disconnected, but with writes in flight
        self._in_flight: dict[str, set[NixlWrite]] = {}
        start_errors: tuple[type[Exception], ...] = (RuntimeError, *nixl_errors)
        config = nixl_agent_config(backends=list(backends), num_threads=num_threads)
        try:
            self._agent = nixl_agent(name, config)
        except start_errors as error:
            raise TransportError(f"NIXL agent {name} with backends {list(backends)}: {_text(error)}") from error
        missing = [backend for backend in backends if backend not in self._agent.backends]
        if missing:
            plugins = self._agent.get_plugin_list()
            self._agent = None
            raise TransportError(f"NIXL has no backend {missing}; its plugins are {plugins}")

    @property
    def name(self) -> str:
        return self._name

    def register(self, regions: Sequence[Region]) -> None:
        for memory, members in (
            ("DRAM", [r for r in regions if r.device is None]),
            ("VRAM", [r for r in regions if r.device is not None]),
        ):
            if members:
                rows = np.array([(r.address, r.length_bytes, r.device or 0) for r in members], dtype=np.uint64)
                register = partial(self._open().register_memory, rows, memory)
                self._registered.append(self._call(f"register {len(members)} regions of {memory}", None, register))

    def metadata(self) -> bytes:
        blob = self._call("give its metadata", None, lambda: self._open().get_agent_metadata())
        return msgspec.msgpack.encode(_Metadata(self._name, blob))

    def connect(self, metadata: bytes) -> str:
        if len(metadata) > _MAX_METADATA_BYTES:
            raise TransportError(f"metadata of {len(metadata)} bytes, at most {_MAX_METADATA_BYTES} are read")
        try:
            given = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.MsgspecError as error:
            raise TransportError(f"metadata is not of a NIXL transport: {error}") from error
        peer = given.name
        if peer == self._name:
            raise TransportError("metadata is this agent's own", peer)
        known = self._metadata_of.get(peer)
        if known is not None and known != metadata:
            # NIXL drops a peer if it is given other metadata that it cannot use, and the writes in flight with it.
            raise TransportError(f"{peer} is connected with other metadata; disconnect it first", peer)
        if known is None:
            self._add(peer, given.blob)
            self._metadata_of[peer] = metadata
        self._leaving.discard(peer)
        return peer

    def disconnect(self, peer: str) -> None:
        if peer in self._metadata_of:
            self._leaving.add(peer)
            self._leave_if_quiet(peer)

    def connected(self, peer: str) -> bool:
        return peer in self._metadata_of and peer not in self._leaving

    def write(
        self, peer: str, runs: Runs, device: int | None, peer_device: int | None, notification: bytes
    ) -> NixlWrite:
        if not len(runs):
            raise ValueError("a write needs at least one run")
        agent = self._open()
        self._check_connected(peer)
        what = f"prepare a write of {len(runs)} runs"

        def prepare() -> Any:
            local = agent.get_xfer_descs(*_descriptors(runs.src, runs.length, device))
            remote = agent.get_xfer_descs(*_descriptors(runs.dst, runs.length, peer_device))
            return agent.initialize_xfer("WRITE", local, remote, peer, notification)

        handle = NixlWrite(peer, self._call(what, peer, prepare))
        self._in_flight.setdefault(peer, set()).add(handle)
        failure: Exception | None = None
        try:
            state = agent.transfer(handle._raw)
        except self._nixl_errors as error:
            state, failure = "ERR", error
        if state == "ERR":
            lost = self._failed(handle, f"could not post a write of {len(runs)} runs", failure)
            self.release(handle)
            raise lost from failure
        if state == "DONE":
            self._finish(handle)
        return handle

    def done(self, handle: WriteHandle) -> bool:
        write = _own(handle)
        if write._error is not None:
            raise write._error
        if write._finished:
            return True
        if write._raw is None:
            raise ValueError("this write was released before it was done")
        try:
            state = self._open().check_xfer_state(write._raw)
        except self._nixl_errors as error:
            raise self._failed(write, "lost a write", error) from error
        if state == "ERR":
            raise self._failed(write, "lost a write", None)
        if state == "DONE":
            self._finish(write)
        return write._finished

    def release(self, handle: WriteHandle) -> None:
        write = _own(handle)
        raw, write._raw = write._raw, None
        if raw is not None and self._agent is not None:
            # NIXL keeps a handle that it cannot release and tries again when the agent ends.
            _quietly(lambda: self._agent.release_xfer_handle(raw))
        self._ended(write)

    def notify(self, peer: str, payload: bytes) -> None:
        agent = self._open()
        self._check_connected(peer)
        self._call("send a message", peer, lambda: agent.send_notif(peer, payload))

    def notifications(self) -> list[tuple[str, bytes]]:
        arrived = self._call("read its messages", None, lambda: self._open().get_new_notifs())
        return [(sender, payload) for sender, payloads in arrived.items() for payload in payloads]

    def close(self) -> None:
        if self._agent is None:
            return
        for write in [write for writes in self._in_flight.values() for write in writes]:
            self.release(write)
        for peer in list(self._metadata_of):
            self._forget(peer)
        for descriptors in self._registered:
            _quietly(partial(self._agent.deregister_memory, descriptors))
        self._registered.clear()
        self._agent = None

    def _open(self) -> Any:
        if self._agent is None:
            raise TransportError(f"NIXL agent {self._name} is closed")
        return self._agent

    def _check_connected(self, peer: str) -> None:
        if not self.connected(peer):
            raise TransportError(f"{peer} is not connected", peer)

    def _add(self, peer: str, blob: bytes) -> None:
        try:
            found = self._open().add_remote_agent(blob)
        except self._nixl_errors as error:
            # What is broken may also have named, and by that dropped, somebody else.
            for other in list(self._metadata_of):
                if not self._agent.check_remote_metadata(other):
                    self._forget(other)
            raise TransportError(f"NIXL refuses the metadata of {peer}: {_text(error)}", peer) from error
        found = found.decode(errors="replace") if isinstance(found, bytes) else found
        if found != peer:
            if found not in self._metadata_of:
                _quietly(partial(self._agent.remove_remote_agent, found))
            raise TransportError(f"metadata of {peer} holds the NIXL agent {found}", peer)

    def _call(self, what: str, peer: str | None, call: Callable[[], T]) -> T:
        """Runs a call into NIXL, with its exceptions turned into ours."""
        try:
            return call()
        except self._nixl_errors as error:
            if peer is not None and isinstance(error, self._disconnected):
                self._lose(peer)
            whom = f" to {peer}" if peer is not None else ""
            raise TransportError(f"NIXL agent {self._name} cannot {what}{whom}: {_text(error)}", peer) from error

    def _failed(self, write: NixlWrite, what: str, error: Exception | None) -> TransportError:
        """Books a write that has ended badly. On a dead endpoint nothing lands any more; else nobody knows."""
        if isinstance(error, self._disconnected):
            self._lose(write._peer)
        cause = _text(error) if error is not None else "no reason given"
        write._error = TransportError(
            f"NIXL {what} to {write._peer}: {cause}", write._peer, may_land=not write._cut_off
        )
        self._ended(write)
        return write._error

    def _finish(self, write: NixlWrite) -> None:
        write._finished = True
        self._ended(write)

    def _ended(self, write: NixlWrite) -> None:
        peer = write._peer
        writes = self._in_flight.get(peer)
        if writes is not None:
            writes.discard(write)
            if not writes:
                del self._in_flight[peer]
        self._leave_if_quiet(peer)

    def _leave_if_quiet(self, peer: str) -> None:
        if peer in self._leaving and peer not in self._in_flight:
            self._forget(peer)

    def _lose(self, peer: str) -> None:
        for write in self._in_flight.get(peer, ()):
            write._cut_off = True
        self._forget(peer)

    def _forget(self, peer: str) -> None:
        self._metadata_of.pop(peer, None)
        self._leaving.discard(peer)
        if self._agent is not None:
            # It may have gone by itself already.
            _quietly(lambda: self._agent.remove_remote_agent(peer))


def _own(handle: WriteHandle) -> NixlWrite:
    if not isinstance(handle, NixlWrite):
        raise TypeError(f"not a write of this transport: {handle!r}")
    return handle


def _descriptors(addresses: Addresses, lengths: Addresses, device: int | None) -> tuple[Addresses, str]:
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = lengths
    rows[:, 2] = device or 0
    return rows, "DRAM" if device is None else "VRAM"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        pass
