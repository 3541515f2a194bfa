"""A network between a prefill and a decode engine that can be cut while both still answer their clients.

Each side lives in a network namespace of its own. A bridge in a third one joins them: that is the link. Another pair of
interfaces leads from each side to this namespace, where router and clients are. A cut takes one side off the bridge:
packets vanish without a word to anybody, as in a switch that has failed.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

PREFILL, DECODE = "prefill", "decode"
SIDES = (PREFILL, DECODE)
COMMAND_TIMEOUT_S = 20.0
# Inside a side's namespace.
LINK_DEVICE, HOST_DEVICE = "link0", "host0"
NAME = re.compile(r"kvp(\d+)-\d+[lpd]")
_numbers = itertools.count()


class LinkError(Exception):
    """The network could not be made or changed; the text names the command."""


def _ip(*words: str) -> str:
    """Runs `ip`. Raises LinkError."""
    argv = ["ip", *words]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LinkError(f"{' '.join(argv)}: {error}") from None
    if done.returncode:
        raise LinkError(f"{' '.join(argv)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def _quietly(*words: str) -> None:
    try:
        _ip(*words)
    except LinkError:
        pass


def why_not() -> str:
    """Why no link can be made here, or ""."""
    if shutil.which("ip") is None:
        return "the command ip is not installed (Debian: iproute2)"
    try:
        with Link():
            return ""
    except LinkError as error:
        return f"network namespaces are not permitted here ({error})"


@dataclass(frozen=True, slots=True)
class End:
    """One side. link_address: where the other side reaches it; host_address: where this namespace does."""

    namespace: str
    link_address: str
    host_address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What starts a command there."""
        return ("ip", "netns", "exec", self.namespace)

    @property
    def environment(self) -> dict[str, str]:
        """What keeps UCX on the link: shared memory does not care for network namespaces."""
        return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK_DEVICE, "VLLM_HOST_IP": "127.0.0.1"}


class Link:
    """A context manager; the ends exist until it is left. Raises LinkError.

    What a killed process has left behind is removed by the next one.
    """

    def __init__(self) -> None:
        remove_leftovers()
        self._stem = f"kvp{os.getpid()}-{next(_numbers)}"
        self._bridge = f"{self._stem}l"
        self.is_cut = False
        network = self._free_network()
        self.ends = {
            side: End(f"{self._stem}{side[0]}", f"{network}.{number}", f"{network}.{16 * number + 2}")
            for number, side in enumerate(SIDES, 1)
        }
        try:
            self._make(network)
        except LinkError:
            self.close()
            raise

    def cut(self) -> None:
        """Nothing gets from one side to the other any more. Idempotent."""
        _ip("-n", self._bridge, "link", "set", DECODE, "nomaster")
        self.is_cut = True

    def mend(self) -> None:
        """Everything gets through again. Idempotent."""
        _ip("-n", self._bridge, "link", "set", DECODE, "master", "br0")
        self.is_cut = False

    def close(self) -> None:
        """Removes everything. Processes that still run there keep a network without a way out."""
        _remove(self._stem)

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self, network: str) -> None:
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "br0", "up")
        for number, (side, end) in enumerate(self.ends.items(), 1):
            space, here = end.namespace, f"{self._stem}{side[0]}"
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            pair = ("type", "veth", "peer", "name")
            _ip("-n", space, "link", "add", LINK_DEVICE, *pair, side, "netns", self._bridge)
            _ip("-n", self._bridge, "link", "set", side, "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"{end.link_address}/28", "dev", LINK_DEVICE)
            _ip("link", "add", here, *pair, HOST_DEVICE, "netns", space)
            _ip("addr", "add", f"{network}.{16 * number + 1}/28", "dev", here)
            _ip("-n", space, "addr", "add", f"{end.host_address}/28", "dev", HOST_DEVICE)
            _ip("link", "set", here, "up")
            _ip("-n", space, "link", "set", LINK_DEVICE, "up")
            _ip("-n", space, "link", "set", HOST_DEVICE, "up")

    @staticmethod
    def _free_network() -> str:
        """The first three numbers of a private network that no interface here is in."""
        taken = _ip("-o", "-4", "addr", "show")
        for _ in range(100):
            network = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
            if f" {network}." not in taken:
                return network
        raise LinkError("no private network is free")


def remove_leftovers() -> None:
    """Removes namespaces of processes that do not run any more."""
    for line in _ip("netns", "list").splitlines():
        found = NAME.match(line)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            _remove(found[0][:-1])


def _remove(stem: str) -> None:
    names: Sequence[str] = [f"{stem}{letter}" for letter in "lpd"]
    for name in names[1:]:
        _quietly("link", "del", name)  # the end in this namespace; its peer goes with it
    for name in names:
        _quietly("netns", "del", name)
