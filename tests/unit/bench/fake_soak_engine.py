"""Stands in for vLLM's API server under a soak: answers depend on the prompt, and metrics say what a soak reads.

A test copies it to where `python -m vllm.entrypoints.openai.api_server` finds it. It has a child that plays the worker
and whose end ends it. FAKE_WRONG=N makes the decode engine's N-th answer through the router wrong; FAKE_HOLD=1 keeps
blocks for ever; FAKE_LEAK=1 keeps a handle of every request.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys

from aiohttp import web

WORKER = "import time\nheld = bytearray(60_000_000)\nwhile True: time.sleep(600)"


class Server:
    def __init__(self, role: str, side_channel_port: int) -> None:
        self.role = role
        self.identity = {
            "remote_engine_id": f"{role}-{os.getpid()}",
            "remote_host": "127.0.0.1",
            "remote_port": side_channel_port,
            "tp_size": 1,
            "pp_size": 1,
            "transfer_mode": "push",
        }
        self.transfers = 0
        self.leaked: list[int] = []

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        held = 0.25 if "FAKE_HOLD" in os.environ and self.transfers else 0.0
        counter = 'kvpush_sends_total{reason="committed"}'
        if self.role == "decode":
            counter = 'kvpush_receives_total{reason=""}'
        return web.Response(text=f"vllm:kv_cache_usage_perc {held}\n{counter} {self.transfers}\n")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        parameters = body.get("kv_transfer_params") or {}
        self.transfers += "transfer_id" in parameters
        if "FAKE_LEAK" in os.environ:
            self.leaked.append(os.open(os.devnull, os.O_RDONLY))
        text = " " + hashlib.sha256(json.dumps(body["prompt"]).encode()).hexdigest()
        if self.transfers == int(os.environ.get("FAKE_WRONG", "0")) and self.role == "decode" and parameters:
            text = " somebody else's answer"
        await asyncio.sleep(0.02)
        choice = {"text": text, "finish_reason": "length"}
        if body.get("logprobs"):
            choice["logprobs"] = {"top_logprobs": [{"a": -0.1, "b": -3.0}] * 2}
        if not body.get("stream"):
            choices = [{**choice, "index": index} for index in range(body.get("n", 1))]
            return web.json_response({"choices": choices, "kv_transfer_params": self.identity})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(body.get("n", 1)):
            await response.write(f"data: {json.dumps({'choices': [{**choice, 'index': index}]})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


async def serve(server: Server, port: int) -> None:
    app = web.Application(client_max_size=2**24)
    app.router.add_get("/health", server.health)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, stdin=subprocess.DEVNULL)
    await worker.wait()
    sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-transfer-config", type=json.loads, required=True)
    args, _ = parser.parse_known_args()
    config = args.kv_transfer_config
    role = {"kv_producer": "prefill", "kv_consumer": "decode"}[config["kv_role"]]
    asyncio.run(serve(Server(role, config["kv_connector_extra_config"]["side_channel_port"]), args.port))


if __name__ == "__main__":
    main()
