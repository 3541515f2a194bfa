"""One connection that the server has accepted, in bounded memory and for a bounded time."""

from __future__ import annotations

import selectors
import socket

from kvpush.transfer.sidechannel.envelope import NotAnEnvelope, OtherVersion, frame_bytes
from kvpush.transfer.sidechannel.responder import MAX_QUESTION_BYTES, Responder

# From the connection, or the last answer, to the end of the next question: a client asks at once.
QUESTION_S = 5.0
# Until the peer has taken an answer: 4 MiB at 4 Mbit/s.
ANSWER_S = 10.0
# A handshake has two. Whoever has more to ask connects again, so that no connection lasts for ever.
MAX_QUESTIONS = 16
_DISCARD_BYTES = 64 * 1024


class Session:
    """Reads a question, sends the answer, reads the next one: never both at once, so that nothing piles up.

    It holds at most one question (4 KiB) and no copy of a rank's answer. All calls are for the server's thread;
    `connection` does not block. `now_s` is monotonic.
    """

    def __init__(self, connection: socket.socket, responder: Responder, now_s: float) -> None:
        self.connection = connection
        self.since_s = now_s  # when the peer's turn to ask began
        self.deadline_s = now_s + QUESTION_S
        self._responder = responder
        self._question = bytearray()
        self._questions = 0
        self._unsent: list[memoryview] = []
        self._last = False  # no further question is read
        self._discarded_bytes = 0

    @property
    def answering(self) -> bool:
        """True while the peer has not taken its answer."""
        return bool(self._unsent)

    @property
    def events(self) -> int:
        """What to wait for before the next `advance`."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def advance(self, now_s: float) -> bool:
        """Does what can be done without waiting. False: it is over, close it. Raises nothing that a peer can cause."""
        try:
            if self._unsent:
                return self._send(now_s)
            return self._discard() if self._last else self._read(now_s)
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Ends the connection and counts what was left undone."""
        if self._question:
            self._responder.drop()
        elif self._unsent:
            self._responder.counters.unread += 1
        elif not self._questions:
            self._responder.counters.silent += 1
        self.connection.close()

    def _read(self, now_s: float) -> bool:
        try:
            # At most what is missing: the next question stays where it is until this one has its answer.
            while missing := frame_bytes(self._question, MAX_QUESTION_BYTES) - len(self._question):
                piece = self.connection.recv(missing)
                if not piece:
                    return False
                self._question += piece
        except NotAnEnvelope:
            return False
        except OtherVersion:
            self._last = True  # where its frames end is not ours to know
        return self._answer(now_s)

    def _answer(self, now_s: float) -> bool:
        question = bytes(self._question)
        self._question.clear()
        self._questions += 1
        parts = self._responder.answer_parts(question, now_s)
        if parts is None:
            return False
        self._last = self._last or self._questions >= MAX_QUESTIONS
        self._unsent = [memoryview(part) for part in parts]
        self.deadline_s = now_s + ANSWER_S
        return self._send(now_s)

    def _send(self, now_s: float) -> bool:
        # Once, even if there is room for more: the others have their turn first.
        sent = self.connection.sendmsg(self._unsent)
        while self._unsent and sent >= len(self._unsent[0]):
            sent -= len(self._unsent.pop(0))
        if self._unsent:
            self._unsent[0] = self._unsent[0][sent:]
            return True
        self.since_s = now_s
        self.deadline_s = now_s + QUESTION_S
        if self._last:
            # To close with something unread would be a reset, and could cost the peer the answer.
            self.connection.shutdown(socket.SHUT_WR)
        return True

    def _discard(self) -> bool:
        piece = self.connection.recv(4096)
        self._discarded_bytes += len(piece)
        return bool(piece) and self._discarded_bytes < _DISCARD_BYTES
