"""Raw files: what a benchmark wrote down, one JSON file per run. The only thing that figures are made from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from kvpush.bench.environment import Environment
from kvpush.bench.handoffs import HandoffRecord
from kvpush.bench.observe import Transfers
from kvpush.bench.record import RequestRecord

POOLS = ("fresh", "aged", "random")


class RawError(ValueError):
    """A raw file that cannot be used; the message begins with its name."""


class Load(msgspec.Struct, kw_only=True):
    """Requests that prepared an engine pair: warm-up or ageing. failures: error text -> how often."""

    requests: int
    errors: int
    wall_s: float
    failures: dict[str, int] = {}


class CellResult(msgspec.Struct, kw_only=True):
    """One cell. complete: every request was sent and answered (or failed) before the time limit.

    repeat: counts measurements of the same cell from 0. started_s: its start on this machine's monotonic clock.
    transfers: from our engines' logs, None for vLLM's connectors. handoffs: the legs of each transfer, from our
    engines' records. prefill_counters and decode_counters: increase of the engines' transfer counters over the cell.
    dead_engines: engines that had ended by themselves after it.
    """

    pool: str
    isl: int
    qps: float
    n: int
    osl: int
    seed: int
    date: str
    complete: bool
    wall_s: float
    late_max_ms: float
    requests: list[RequestRecord]
    repeat: int = 0
    started_s: float = 0.0
    transfers: Transfers | None = None
    handoffs: list[HandoffRecord] = []
    prefill_counters: dict[str, float] = {}
    decode_counters: dict[str, float] = {}
    dead_engines: list[str] = []
    warnings: list[str] = []

    @property
    def errors(self) -> list[RequestRecord]:
        return [record for record in self.requests if record.error is not None]


class Slo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a good answer is: bounds on its time to first token and on its time per token; None bounds nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met(self, record: RequestRecord) -> bool:
        """Whether this request was answered, and within every bound."""
        if record.error is not None:
            return False
        pairs = ((self.ttft_ms, record.ttft_ms), (self.tpot_ms, record.tpot_ms))
        return all(bound is None or value is None or value <= bound for bound, value in pairs)

    def text(self) -> str:
        bounds = (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms))
        return ", ".join(f"{name} at most {bound:g} ms" for name, bound in bounds if bound is not None)


class ServeRaw(msgspec.Struct, kw_only=True, tag_field="what", tag="serve"):
    """One engine pair. variant: a name for anything that differs from the standard set-up, empty for that.

    asked: everything that decides what is measured; a run is resumed only if it is equal. resumed: when that was done.
    unfinished: cells (pool/isl/qps, and the number of the repeat) that were asked and not measured. problem: why.
    """

    shape: str
    connector: str
    date: str
    command: str
    environment: Environment
    variant: str = ""
    engines: dict[str, list[str]] = {}
    kvpush_config: dict[str, Any] = {}
    preset: str = ""
    slo: Slo | None = None
    asked: dict[str, Any] = {}
    resumed: list[str] = []
    start_s: float = 0.0
    warm_up: Load | None = None
    ageing: Load | None = None
    cells: list[CellResult] = []
    unfinished: list[str] = []
    problem: str | None = None


class TransferRow(msgspec.Struct, kw_only=True):
    """Bare writes of one size, block table and path. samples_ms: each run; ms and gb_s: their median.

    regions and page_bytes: the geometry. runs: pieces after merging (median, tables differ), of `descriptors` before.
    single_ms: the same number of bytes as one write, the ceiling. verified: every run was compared at the target.
    """

    device: str
    tokens: int
    table: str
    path: str
    regions: int
    page_bytes: int
    block_size: int
    bytes: int
    descriptors: int
    runs: int
    ms: float
    gb_s: float
    single_ms: float
    samples_ms: list[float]
    verified: bool
    detail_ms: dict[str, float] = {}


class TransferRaw(msgspec.Struct, kw_only=True, tag_field="what", tag="transfer"):
    """A run of the raw transfer benchmark."""

    date: str
    command: str
    rows: list[TransferRow]
    environment: Environment | None = None


class PlanRow(msgspec.Struct, kw_only=True):
    """Time to plan one request's runs for one kind of block table."""

    case: str
    ms: float


class PlanRaw(msgspec.Struct, kw_only=True, tag_field="what", tag="plan"):
    """A run of the planner benchmark; rows may hold more than is read here."""

    date: str
    command: str
    rows: list[PlanRow]


class SoakFault(msgspec.Struct, kw_only=True):
    """One fault of a soak. at_s: after the start of the faults. detail: how long, which process, how many."""

    at_s: float
    name: str
    detail: str = ""


class SoakRequest(msgspec.Struct, kw_only=True):
    """A request that came to what must not be. outcome: `wrong` or `stuck`. texts: what each choice was."""

    at_s: float
    took_s: float
    outcome: str
    prompt_tokens: int
    fields: dict[str, Any]
    expected: str
    texts: list[str]
    detail: str = ""


class SoakProcess(msgspec.Struct, kw_only=True):
    """One process of a soak. kind: which of its role's. growth: of its own memory after its warm-up, as a share; None
    if it did not live long enough. handles_first, handles_last: open at rest, before all faults and after them."""

    role: str
    kind: str
    lived_s: float
    first_bytes: int
    last_bytes: int
    growth: float | None
    handles_first: int | None
    handles_last: int | None


class SoakRaw(msgspec.Struct, kw_only=True, tag_field="what", tag="soak"):
    """A soak. outcomes: what requests came to -> how many; errors: what clients were told -> how many. longest_s: of a
    request that was not aborted. faults: in order. counters: role -> the engine's counters over all its lives.
    problems: why it was not passed; empty if it was."""

    date: str
    command: str
    environment: Environment
    seed: int
    minutes: float
    policies: list[str]
    integrity: str
    link: str
    concurrency: int
    outcomes: dict[str, int]
    errors: dict[str, int]
    longest_s: float
    bad: list[SoakRequest]
    faults: list[SoakFault]
    processes: list[SoakProcess]
    counters: dict[str, dict[str, float]]
    problems: list[str]

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())


Raw = ServeRaw | TransferRaw | PlanRaw | SoakRaw
DECODER: msgspec.json.Decoder[Raw] = msgspec.json.Decoder(Raw)


def read_raw(path: Path) -> Raw:
    """Raises RawError naming the file and the place in it that is wrong."""
    try:
        return DECODER.decode(path.read_bytes())
    except OSError as error:
        raise RawError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise RawError(f"{path}: {error}") from None


def write_raw(path: Path, raw: Raw) -> None:
    """Replaces the file in one step, so that an interrupted run leaves the last whole state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(msgspec.json.encode(raw))
    os.replace(partial, path)


def rounded(records: list[RequestRecord]) -> list[RequestRecord]:
    """Records with times cut to a microsecond: finer digits are noise and make half of a file."""
    for record in records:
        for name in ("prefill_response_ms", "ttft_ms", "handoff_ms", "tpot_ms"):
            value = getattr(record, name)
            setattr(record, name, None if value is None else round(value, 3))
        record.scheduled_s = round(record.scheduled_s, 6)
        record.arrival_s = round(record.arrival_s, 6)
    return records
