"""A process tree like an engine's, and an HTTP server with the endpoints that the router and the demo use.

What it does wrong is told by environment variables, each for one role (`prefill`, `decode`) or for `all`:

FAKE_DIE=ROLE:TEXT      prints TEXT to stderr and exits with 1 before it serves
FAKE_HANG=ROLE          never becomes healthy
FAKE_STUBBORN=ROLE      ignores SIGTERM, itself and its children
FAKE_SLOW=ROLE          takes a minute between two tokens
FAKE_WRONG=ROLE         answers differently when KV was handed over
FAKE_SILENT=ROLE        does not log its transfers
FAKE_PIDS=DIR           every process of the tree leaves a file there, named by its id
"""

import argparse
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import typing

BYTES_PER_TOKEN = 1000

# What a worker does: note its id, perhaps leave its session, start a child of its own, sleep.
CHILD = """
import os, pathlib, signal, subprocess, sys, time
folder, stubborn, depth = sys.argv[1], sys.argv[2] == "1", int(sys.argv[3])
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if depth == 0:
    os.setsid()
if folder:
    (pathlib.Path(folder) / str(os.getpid())).touch()
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[4], folder, sys.argv[2], str(depth - 1), sys.argv[4]])
time.sleep(600)
"""


def applies(variable: str, role: str) -> str | None:
    """The variable's text after `ROLE:` (or empty) if it is meant for this role."""
    who, _, text = os.environ.get(variable, "").partition(":")
    return text if who in (role, "all") else None


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--enable-prefix-caching", action="store_true")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--num-gpu-blocks-override", type=int)
    parser.add_argument("--kv-transfer-config", type=json.loads, default={})
    return parser.parse_args()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    role = ""
    config: typing.ClassVar[dict] = {}

    def log_message(self, *_):
        pass

    def reply(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200, {})
        elif self.path == "/v1/models":
            self.reply(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        else:
            self.reply(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        params = body.get("kv_transfer_params") or {}
        prompt = body["prompt"] if "prompt" in body else " ".join(m["content"] for m in body["messages"])
        tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        usage = {"prompt_tokens": tokens, "completion_tokens": 3, "total_tokens": tokens + 3}
        transfer = params.get("transfer_id")
        loud = applies("FAKE_SILENT", self.role) is None
        answer = None
        if params.get("do_remote_decode"):
            extra = self.config.get("kv_connector_extra_config", {})
            answer = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": transfer,
                "remote_engine_id": f"fake-{os.getpid()}",
                "remote_host": extra.get("side_channel_host", "127.0.0.1"),
                "remote_port": extra.get("side_channel_port", 1),
                "tp_size": 1,
                "pp_size": 1,
                "transfer_mode": "push",
            }
            if loud and not str(transfer).startswith("probe"):
                size = tokens * BYTES_PER_TOKEN
                print(
                    f"INFO kvpush: transfer {transfer} committed: {tokens} tokens, {size} bytes, 2 writes", flush=True
                )
        elif params.get("do_remote_prefill") and loud:
            print(f"INFO kvpush: transfer {transfer} received: {tokens} tokens", flush=True)
        words = ["one ", "two ", "three"]
        if params.get("do_remote_prefill") and applies("FAKE_WRONG", self.role) is not None:
            words[1] = "zwei "
        chat = "chat" in self.path
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": "stop", "text": "".join(words)}
            if chat:
                choice = {"index": 0, "finish_reason": "stop"}
                choice["message"] = {"role": "assistant", "content": "".join(words)}
            self.reply(
                200, {"id": "x", "model": "fake", "choices": [choice], "usage": usage, "kv_transfer_params": answer}
            )
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        for word in words:
            if applies("FAKE_SLOW", self.role) is not None:
                time.sleep(60)
            choice = {"index": 0, "delta": {"content": word}} if chat else {"index": 0, "text": word}
            self.event({"id": "x", "model": "fake", "choices": [{**choice, "finish_reason": None}]})
        self.event({"id": "x", "model": "fake", "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, body: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()


def main() -> None:
    arguments = options()
    roles = {"kv_producer": "prefill", "kv_consumer": "decode"}
    role = roles.get(arguments.kv_transfer_config.get("kv_role"), "both")
    folder = os.environ.get("FAKE_PIDS", "")
    if folder:
        (pathlib.Path(folder) / str(os.getpid())).touch()
    stubborn = applies("FAKE_STUBBORN", role) is not None
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    flag = "1" if stubborn else "0"
    subprocess.Popen([sys.executable, "-c", CHILD, folder, flag, "1", CHILD])
    print("INFO vLLM API server version 0.32.0", flush=True)
    complaint = applies("FAKE_DIE", role)
    if complaint is not None:
        sys.exit(complaint)
    if applies("FAKE_HANG", role) is not None:
        threading.Event().wait(600)
    Handler.role, Handler.config = role, arguments.kv_transfer_config
    server = http.server.ThreadingHTTPServer((arguments.host, arguments.port), Handler)
    server.daemon_threads = True
    print("INFO Application startup complete.", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
