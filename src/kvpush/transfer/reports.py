"""What a worker owes to its engine: the ledger of reports, and which blocks of a load hold nothing.

Used by the engine's main thread only; the worker half runs it in production, the simulator in virtual time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvpush.protocol.ids import RequestId
from kvpush.protocol.ledger import Direction, ReportLedger
from kvpush.transfer.commands import Cancel, Command, Fetch, Offer, Preempt, Refuse
from kvpush.transfer.results import LoadFailed, Received, Released, Result, Sent


class Reports:
    """Books commands on their way to the transfer thread and results on their way back.

    Each request is reported once for each direction, and only while the engine holds it; anything else ends vLLM's
    engine.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ledger = ReportLedger()
        self._loading: dict[RequestId, tuple[int, ...]] = {}  # blocks that hold nothing until the load has ended well
        self._finished: set[RequestId] = set()
        self._early: list[Sent] = []
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._invalid: set[int] = set()
        self._failures: set[str] = set()

    @property
    def idle(self) -> bool:
        """Nothing is owed, and nothing is left to be taken."""
        reports = self._early or self._sent or self._received or self._failed or self._invalid or self._failures
        return not (reports or self._loading or self._finished or len(self._ledger))

    def admit(self, commands: Iterable[Command], poisoned: Collection[RequestId]) -> list[Command]:
        """The commands that go on to the transfer thread. poisoned: requests that the fence had to poison."""
        admitted: list[Command] = []
        for command in commands:
            match command:
                case Offer():
                    self._ledger.open(command.request_id, Direction.SENDING)
                case Fetch() | Refuse():
                    self._ledger.open(command.request_id, Direction.RECEIVING)
                    self._loading[command.request_id] = self._unloaded(command)
                case Cancel() if not self._ledger.owes(command.request_id, Direction.RECEIVING):
                    continue  # reported already: late
                case Preempt():
                    command = Preempt(command.request_id, poisoned=command.request_id in poisoned)
            admitted.append(command)
        return admitted

    def collect(
        self, finished_req_ids: Iterable[str], results: Iterable[Result]
    ) -> tuple[set[str], set[str], set[str]]:
        """(finished_sending, finished_recving, failed_recving) of a step.

        Each request once, and only while the engine holds it. Those whose load has failed stand in the last two, when
        their blocks are released; long before that their blocks are named as invalid. finished_req_ids: requests that
        the engine has ended since the last call.
        """
        for name in finished_req_ids:
            request_id = RequestId(name)
            if self._ledger.owes(request_id, Direction.SENDING) or self._ledger.owes(request_id, Direction.RECEIVING):
                self._finished.add(request_id)
            self._ledger.close(request_id)
        early, self._early = self._early, []
        for result in (*early, *results):
            self._book(result)
        sent, self._sent = self._sent, set()
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return sent, received, failed

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of failed loads that hold nothing, named once."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_failures(self) -> set[str]:
        """Requests whose load has failed, each once, as soon as that is known: their blocks may be held for long."""
        failures, self._failures = self._failures, set()
        return failures

    def _book(self, result: Result) -> None:
        request_id = result.request_id
        match result:
            case Sent():
                if request_id not in self._finished:
                    self._early.append(result)  # the engine has not yet said that it is finished
                elif self._ledger.report(request_id, Direction.SENDING):
                    self._sent.add(request_id)
                    self._forget(request_id)
            case LoadFailed():
                self._invalidate(request_id)
            case Received() | Released():
                if isinstance(result, Released):
                    self._invalidate(request_id)  # unless that was done before: a load without it counts as received
                self._loading.pop(request_id, None)
                if self._ledger.report(request_id, Direction.RECEIVING):
                    self._received.add(request_id)
                    if isinstance(result, Released):
                        self._failed.add(request_id)
                    if request_id in self._finished:
                        self._forget(request_id)

    def _unloaded(self, command: Fetch | Refuse) -> tuple[int, ...]:
        """The blocks that hold nothing before the load has ended; a failure that names none would count as success."""
        blocks = command.blocks[0]
        return blocks[command.first_token // self._block_size :] or blocks[-1:]

    def _invalidate(self, request_id: RequestId) -> None:
        """Names the blocks of a failed load, once."""
        blocks = self._loading.pop(request_id, ())
        # After the request has ended its blocks concern nobody; naming them could hit another request.
        if blocks and request_id not in self._finished:
            self._invalid.update(blocks)
            self._failures.add(request_id)

    def _forget(self, request_id: RequestId) -> None:
        self._finished.discard(request_id)
        self._ledger.close(request_id)
