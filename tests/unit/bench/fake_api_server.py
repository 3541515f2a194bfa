"""Stands in for vLLM's API server: a process with its command line, health, completions, counters and log lines.

A test copies it to where `python -m vllm.entrypoints.openai.api_server` finds it. FAKE_* variables make it fail:
FAKE_DIE_AT_START names a role (producer or consumer) that exits at once; FAKE_DIE_AFTER=N ends the consumer at its
N-th request; FAKE_LOSE=1 keeps the consumer from logging that it received anything; FAKE_STUBBORN=1 ignores SIGTERM.
Where its configuration has a trace_file, it writes records as our connector does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time

from aiohttp import web

from kvpush.transfer.sidechannel import host_id
from kvpush.transfer.trace import RankTrace, TransferTrace, to_line


class Server:
    def __init__(self, role: str, config: dict[str, object]) -> None:
        self.role = role
        self.config = config
        self.requests = 0
        self.moved = 0

    def trace(self, transfer_id: str, tokens: int) -> None:
        extra = self.config.get("kv_connector_extra_config")
        path = extra.get("trace_file") if isinstance(extra, dict) else None
        if not path:
            return
        now_s, producer = time.monotonic(), self.role == "producer"
        moments = (
            ("computed", "matched", "last_write", "landed", "committed") if producer else ("commit_seen", "collected")
        )
        trace = TransferTrace(
            transfer_id=transfer_id, request_id="r", side="prefill" if producer else "decode", engine_id=self.role,
            host_id=host_id(), num_tokens=tokens, outcome="sent" if producer else "received",
            times_s={} if producer else {"reported": now_s, "scheduled": now_s},
            ranks=[RankTrace(request_id="r", host_id=host_id(), times_s=dict.fromkeys(moments, now_s))],
        )  # fmt: skip
        with open(path, "ab", buffering=0) as file:
            file.write(to_line(trace))

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f'vllm:nixl_xfer_time_seconds_count{{engine="0"}} {self.moved}\n')

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests += 1
        if self.role == "consumer" and self.requests == int(os.environ.get("FAKE_DIE_AFTER", "0")):
            print("the engine core has died", flush=True)
            os._exit(3)
        parameters = body["kv_transfer_params"]
        tokens = len(body["prompt"])
        transfer = parameters.get("transfer_id")
        self.moved += 1
        if transfer:
            self.trace(transfer, tokens)
        if not body.get("stream"):
            if transfer:
                print(
                    f"INFO kvpush: transfer {transfer} committed: {tokens} tokens, {tokens * 10} bytes, 2 writes",
                    flush=True,
                )
            return web.json_response(
                {"choices": [{"text": "x"}], "kv_transfer_params": {"remote_port": 1, "prompt": 2}}
            )
        if transfer and "FAKE_LOSE" not in os.environ:
            print(f"INFO kvpush: transfer {transfer} received: {tokens} tokens, integrity ok", flush=True)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices":[{"text":"x"}]}\n\n')
            await asyncio.sleep(0.001)
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        return response


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-transfer-config", type=json.loads, required=True)
    args, _ = parser.parse_known_args()
    role = args.kv_transfer_config["kv_role"].removeprefix("kv_")
    if os.environ.get("FAKE_DIE_AT_START") == role:
        print("ValueError: this engine has no memory", flush=True)
        sys.exit(1)
    server = Server(role, args.kv_transfer_config)
    app = web.Application(client_max_size=2**24)
    app.router.add_get("/health", server.health)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/v1/completions", server.completions)
    if "FAKE_STUBBORN" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        web.run_app(app, host="127.0.0.1", port=args.port, handle_signals=False)
    else:
        web.run_app(app, host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    main()
