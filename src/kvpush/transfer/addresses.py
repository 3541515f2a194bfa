"""Which addresses may be connected to.

Addresses come from clients (`kv_transfer_params`) and from peers (registrations). Connecting to whatever they name
would let them reach services that only this machine can reach, so an allow list decides.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Sequence

_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_HOST_CHARACTERS = 253
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
# The C library reads 127.1, 0x7f000001 and 2130706433 as addresses; a list that holds the usual form would miss them.
_NUMBER = re.compile(r"([0-9]+|0[xX][0-9A-Fa-f]*)")
_SCOPE = re.compile(r"[A-Za-z0-9._-]{1,32}")


class AddressRefused(Exception):
    """This address must not be connected to; the text names it and says why."""

    def __init__(self, host: object, port: object, reason: str) -> None:
        shown = host if isinstance(host, str) and len(host) <= 80 and host.isprintable() else f"{host!r:.80}"
        super().__init__(f"address {shown}:{port!r:.20} refused: {reason}")
        self.reason = reason


def address_text(host: str, port: int) -> str:
    """host:port as people write it: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def numeric_addresses(host: str, timeout_s: float) -> tuple[str, ...]:
    """The IPv4 and IPv6 addresses of a host, in the resolver's order; an address is returned as it is.

    Raises OSError naming the host if it has none or the resolver does not answer in time.
    """
    address = _as_ip(host)
    if address is not None:
        return (str(address),)
    found: list[str] = []
    failure: list[Exception] = []

    def resolve() -> None:
        try:
            for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                found.append(str(entry[4][0]))
        except (OSError, UnicodeError) as error:
            failure.append(error)

    # The resolver has no deadline of its own. If it hangs, its thread ends whenever it gives up.
    thread = threading.Thread(target=resolve, name="kvpush-resolve", daemon=True)
    thread.start()
    thread.join(max(timeout_s, 0.0))
    if thread.is_alive():
        raise TimeoutError(f"host name {host} could not be resolved within {timeout_s:.1f} s")
    if failure or not found:
        raise OSError(f"host name {host} could not be resolved: {failure[0] if failure else 'it has no address'}")
    return tuple(dict.fromkeys(found))


def check_form(host: object, port: object) -> tuple[str, int]:
    """Returns (host, port) in their normal form: a host name in lower case, or an address without brackets.

    Never resolves a name, so that any thread may call it. Raises AddressRefused if host or port cannot be the address
    of a peer: of another type, out of range, malformed, or an address that no single machine has (0.0.0.0, multicast).
    """
    if not isinstance(host, str):
        raise AddressRefused(host, port, f"the host must be a string, not {type(host).__name__}")
    if isinstance(port, bool) or not isinstance(port, int):
        raise AddressRefused(host, port, f"the port must be an integer, not {type(port).__name__}")
    if not 1 <= port <= 65535:
        raise AddressRefused(host, port, "the port must be 1 to 65535")
    if not host:
        raise AddressRefused(host, port, "the host is empty")
    if len(host) > MAX_HOST_CHARACTERS:
        raise AddressRefused(host, port, f"the host has {len(host)} characters, more than {MAX_HOST_CHARACTERS}")
    address = _as_ip(host)
    if address is None:
        try:
            return _normal_name(host), port
        except ValueError as error:
            raise AddressRefused(host, port, str(error)) from None
    if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise AddressRefused(host, port, "this is not the address of one machine")
    return str(address), port


class AllowList:
    """Host patterns that may be connected to: exact names, addresses, networks (10.0.0.0/8, fd00::/8), or "*" for all.

    A host that is a name is allowed if it stands in the list. Otherwise, if the list holds addresses or networks, it is
    resolved, once, and allowed if all its addresses are. An empty list allows nothing.
    resolve: host, timeout in seconds -> addresses, raising OSError. Raises ValueError naming a pattern that is none.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        resolve: Callable[[str, float], Sequence[str]] = numeric_addresses,
        resolve_timeout_s: float = 2.0,
    ) -> None:
        if isinstance(patterns, str):
            raise ValueError(f"the allow list must be a list of host patterns, got the string {patterns!r}")
        self.patterns = tuple(patterns)
        self._resolve = resolve
        self._resolve_timeout_s = resolve_timeout_s
        self._all = False
        self._names: set[str] = set()
        self._networks: list[_IPNetwork] = []
        for pattern in self.patterns:
            self._add(pattern)

    def check(self, host: object, port: object) -> str:
        """Returns the host to connect to; raises AddressRefused if it is not allowed.

        If a name had to be resolved, that is the first of the addresses that were checked: connecting to the name would
        ask the resolver again, and it may answer otherwise. May block for `resolve_timeout_s`, but only for a name that
        does not stand in the list; `check_form` never does.
        """
        name, number = check_form(host, port)
        if self._all or name in self._names:
            return name
        address = _as_ip(name)
        if address is not None:
            if not self._contains(address):
                raise AddressRefused(host, port, self._not_listed())
            return name
        if not self._networks:
            raise AddressRefused(host, port, self._not_listed())
        try:
            found = [(text, _as_ip(text)) for text in self._resolve(name, self._resolve_timeout_s)]
        except OSError as error:
            raise AddressRefused(host, port, str(error)) from error
        if not found:
            raise AddressRefused(host, port, "the host name has no address")
        for text, resolved in found:
            if resolved is None or not self._contains(resolved):
                raise AddressRefused(host, port, f"the name stands for {text}; {self._not_listed()}")
            check_form(text, number)
        return str(found[0][1])

    def _add(self, pattern: str) -> None:
        if pattern == "*":
            self._all = True
            return
        try:
            if not isinstance(pattern, str):
                raise ValueError(f"it is a {type(pattern).__name__}")
            address = _as_ip(pattern)
            if address is not None:
                self._networks.append(ipaddress.ip_network(str(address)))
            elif "/" in pattern:
                self._networks.append(ipaddress.ip_network(pattern))
            else:
                self._names.add(_normal_name(pattern))
        except ValueError as error:
            raise ValueError(f"allow list pattern {pattern!r}: {error}") from None

    def _contains(self, address: _IPAddress) -> bool:
        return any(address.version == network.version and address in network for network in self._networks)

    def _not_listed(self) -> str:
        return f"not in the allow list ({', '.join(self.patterns) or 'empty'})"


def _as_ip(host: str) -> _IPAddress | None:
    """The address that this text is, without brackets; an IPv4 address mapped into IPv6 is taken for what it is."""
    text = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None and not _SCOPE.fullmatch(address.scope_id):
            return None
        return address.ipv4_mapped or address
    return address


def _normal_name(host: str) -> str:
    name = host.removesuffix(".").lower()
    labels = name.split(".")
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("it is neither an address nor a host name")
    if _NUMBER.fullmatch(labels[-1]):
        raise ValueError("it ends in a number, but is no address in the usual form")
    return name
