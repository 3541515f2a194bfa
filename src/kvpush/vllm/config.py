"""The connector's options (`kv_connector_extra_config`), validated as a whole when the engine starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from kvpush.plan.paths import Path
from kvpush.protocol.messages import MAX_SLOTS
from kvpush.protocol.timing import Timing
from kvpush.transfer.addresses import AddressRefused, AllowList, check_form
from kvpush.transfer.integrity import IntegrityMode
from kvpush.transfer.quarantine import default_max_blocks

DEFAULT_PORT = 14_600
HOST_VARIABLE = "KVPUSH_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "KVPUSH_SIDE_CHANNEL_PORT"
TRACE_VARIABLE = "KVPUSH_TRACE_FILE"

# Private networks and this host. Whoever serves across public addresses says so.
DEFAULT_ALLOWED = (
    "127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "localhost",
)  # fmt: skip


class ConfigError(ValueError):
    """An option is unknown or impossible; the text names it."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All options with their defaults. Times in seconds.

    side_channel_host, side_channel_port: where this engine's side channel listens, and what peers are told; with data
    parallelism each rank takes the next port. allowed_hosts: names, addresses or networks that may be connected to.
    backends, num_threads: of NIXL; by default 4 threads on GPUs, none on the CPU. switch_interval_s: how long the
    engine's main thread may keep the interpreter while the transfer thread wants it (Python's default is 5 ms; 0 leaves
    it). stream: push whole blocks after every chunk of the prompt. integrity: compare digests of the KV at both sides,
    `off`, `sample` (of the share `integrity_sample` of transfers, 0 to 1) or `always`; P decides, D checks whatever
    comes unless it says `off`. recompute_below_tokens: what D's own cache lacks and D computes itself rather than ask
    for it; default one block. preempt_wait_s: how long P may wait for writes before it takes blocks back.
    quarantine_max_blocks: with more blocks in quarantine D is unhealthy and loads nothing; by default a quarter of the
    pool, 0 sets no limit. path: how KV travels: `direct` (P writes into D's blocks), `staged` (packed, by way of slots
    of D's; what fails then leaves nothing in quarantine), `peer` (on one host, a kernel stores into D's blocks;
    elsewhere as `auto`) or `auto`, whichever is fastest. staging_bytes: memory for that on each device and for each
    role; default 512 MiB on GPUs, 64 MiB on the CPU. staging_slots: into how many slots D divides it; the first prefill
    rank that writes to D gets three quarters of them, the next one three quarters of the rest, and so on; who finds
    none left writes directly, or, where D takes staged transfers only, fails them. trace_file: gets a line of JSON for
    each transfer that has ended; engines of one host may share it. timing: the protocol's bounds; its fields stand
    beside the others in the configuration.
    """

    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = DEFAULT_PORT
    allowed_hosts: tuple[str, ...] = DEFAULT_ALLOWED
    backends: tuple[str, ...] = ("UCX",)
    num_threads: int | None = None
    switch_interval_s: float = 0.0005
    stream: bool = True
    integrity: IntegrityMode = "sample"
    integrity_sample: float = 0.01
    recompute_below_tokens: int | None = None
    preempt_wait_s: float = 0.05
    quarantine_max_blocks: int | None = None
    handshake_timeout_s: float = 10.0
    path: Path = "auto"
    staging_bytes: int | None = None
    staging_slots: int = 4
    trace_file: str | None = None
    timing: Timing = Timing()

    def __post_init__(self) -> None:
        if not 1 <= self.side_channel_port <= 65_535:
            raise ValueError(f"side_channel_port must be 1 to 65535, got {self.side_channel_port}")
        try:
            check_form(self.side_channel_host, self.side_channel_port)
        except AddressRefused as error:
            raise ValueError(f"side_channel_host is where peers reach this engine: {error}") from None
        if not self.backends:
            raise ValueError("backends is empty; UCX is the usual one")
        if self.num_threads is not None and not 0 <= self.num_threads <= 64:
            raise ValueError(f"num_threads must be 0 to 64, got {self.num_threads}")
        if not 0 <= self.switch_interval_s <= 1:
            raise ValueError(f"switch_interval_s must be 0 (leave it) to 1, got {self.switch_interval_s}")
        if not 0 <= self.integrity_sample <= 1:
            raise ValueError(f"integrity_sample must be 0 to 1 (a share of transfers), got {self.integrity_sample}")
        if self.recompute_below_tokens is not None and self.recompute_below_tokens < 1:
            raise ValueError(f"recompute_below_tokens must be at least 1, got {self.recompute_below_tokens}")
        if not 0 <= self.preempt_wait_s <= 1:
            raise ValueError(
                f"preempt_wait_s must be 0 to 1 second (the engine stands still), got {self.preempt_wait_s}"
            )
        if not 0 < self.handshake_timeout_s <= 300:
            raise ValueError(f"handshake_timeout_s must be above 0 and at most 300, got {self.handshake_timeout_s}")
        if self.staging_bytes is not None and not 2**16 <= self.staging_bytes <= 2**40:
            raise ValueError(f"staging_bytes must be 64 KiB to 1 TiB, got {self.staging_bytes}")
        if not 2 <= self.staging_slots <= MAX_SLOTS:
            raise ValueError(f"staging_slots must be 2 to {MAX_SLOTS}, got {self.staging_slots}")
        if self.quarantine_max_blocks is not None and self.quarantine_max_blocks < 0:
            raise ValueError(f"quarantine_max_blocks must be 0 (no limit) or more, got {self.quarantine_max_blocks}")
        if self.trace_file is not None and not os.path.isabs(self.trace_file):
            raise ValueError(f"trace_file must be an absolute path, got {self.trace_file!r}")
        AllowList(self.allowed_hosts)

    def max_quarantined(self, num_blocks: int) -> int:
        """How many of a pool's blocks may be in quarantine; 0: all of them."""
        if self.quarantine_max_blocks is None:
            return default_max_blocks(num_blocks)
        return self.quarantine_max_blocks

    @property
    def integrity_share(self) -> float:
        """Of its transfers, those that this engine sends digests of as P."""
        return {"off": 0.0, "sample": self.integrity_sample, "always": 1.0}[self.integrity]


def parse_options(extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Options:
    """Options from `kv_connector_extra_config`; the environment gives host, port and trace file where it does not.

    Raises ConfigError naming the key.
    """
    given = dict(extra)
    if HOST_VARIABLE in environment:
        given.setdefault("side_channel_host", environment[HOST_VARIABLE])
    if environment.get(TRACE_VARIABLE):
        given.setdefault("trace_file", environment[TRACE_VARIABLE])
    if PORT_VARIABLE in environment:
        try:
            given.setdefault("side_channel_port", int(environment[PORT_VARIABLE]))
        except ValueError:
            raise ConfigError(f"{PORT_VARIABLE} is not a number: {environment[PORT_VARIABLE]!r}") from None
    bounds = set(Timing.__struct_fields__)
    known = (set(Options.__struct_fields__) - {"timing"}) | bounds
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config: unknown key {unknown[0]!r}; known keys: {', '.join(sorted(known))}"
        )
    timing = {key: value for key, value in given.items() if key in bounds}
    try:
        return msgspec.convert(
            {**{key: value for key, value in given.items() if key not in bounds}, "timing": timing}, Options
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
