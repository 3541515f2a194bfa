"""Opens a transfer for a call, anew if an engine failed before the client had anything."""

from __future__ import annotations

from kvpush.router.errors import ApiError
from kvpush.router.transfer import Call, Parts, Transfer


async def open_transfer(parts: Parts, call: Call) -> Transfer:
    """Returns an open transfer, which the caller closes. Raises ApiError."""
    attempt = 0
    while True:
        # A transfer id names one dispatch: an engine may still hold the state of a failed one.
        transfer_id = call.transfer_id if attempt == 0 else f"{call.transfer_id}-r{attempt}"
        transfer = Transfer(parts, call, transfer_id)
        try:
            await transfer.open()
        except ApiError as error:
            if not error.retryable or attempt >= parts.config.retries:
                raise
            attempt += 1
            parts.metrics.retries += 1
        else:
            return transfer
