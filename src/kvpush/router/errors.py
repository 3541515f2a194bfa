"""Errors that reach a client, in the form that OpenAI's API and vLLM give them."""

from __future__ import annotations

import msgspec

JSON = "application/json"

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestEntityTooLargeError",
    499: "ClientClosedRequest",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """One JSON object `{"error": {"message", "type", "param", "code"}}`."""
    kind = _TYPES.get(status, "APIError")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def status_in(body: bytes) -> int:
    """The HTTP status that an error object names; 500 if it names none."""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return 500
    return code if isinstance(code, int) and 400 <= code <= 599 else 500


class ApiError(Exception):
    """What the client gets instead of an answer.

    status, body, content_type: the HTTP answer. outcome: the label under which the request is counted.
    retryable: whether another dispatch of the same request could succeed.
    """

    def __init__(
        self, status: int, message: str, *, outcome: str, param: str | None = None, retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, param)
        self.content_type = JSON
        self.outcome = outcome
        self.retryable = retryable


class MirroredError(ApiError):
    """An engine's own error answer, passed on as it is."""

    def __init__(self, status: int, body: bytes, content_type: str, *, outcome: str, retryable: bool) -> None:
        super().__init__(status, f"engine answered {status}", outcome=outcome, retryable=retryable)
        self.body = body
        self.content_type = content_type
