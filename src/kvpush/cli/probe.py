"""Looks at what may crash or hang when it is imported. Run in a process of its own; prints one JSON object.

python -m kvpush.cli.probe nixl|torch|push
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvpush.launch import installed

PUSH_BYTES = 4 << 20
PUSH_TIMEOUT_S = 20.0
POLL_S = 0.0005


def nixl() -> dict[str, Any]:
    """NIXL's plugins, whether its UCX backend starts, and the version of the UCX that it brings."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(f"kvpush-doctor-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
    return {"plugins": sorted(agent.get_plugin_list()), "ucx_starts": "UCX" in agent.backends, "ucx": ucx_version()}


def ucx_version() -> str | None:
    """Of the library that NIXL has loaded into this process; None if it cannot be found."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if "/libucp" in line}
    for path in sorted(paths):
        try:
            get = ctypes.CDLL(path).ucp_get_version_string
        except (OSError, AttributeError):
            continue
        get.restype = ctypes.c_char_p
        text = get()
        return text.decode() if text else None
    return None


def torch() -> dict[str, Any]:
    """torch's version, its CUDA, the GPUs, and which can reach each other directly."""
    import torch as t

    count = t.cuda.device_count() if t.cuda.is_available() else 0
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return {
        "version": t.__version__,
        "cuda": t.version.cuda,
        "gpus": [t.cuda.get_device_name(index) for index in range(count)],
        "peers": [pair for pair in pairs if t.cuda.can_device_access_peer(*pair)],
        "pairs": len(pairs),
    }


def push() -> dict[str, Any]:
    """Writes some MiB into another process through kvpush's own transport, and has them compared there."""
    import numpy as np

    from kvpush.plan.runs import Runs
    from kvpush.transport.base import Region
    from kvpush.transport.nixl import NixlTransport

    target = subprocess.Popen(
        [sys.executable, "-m", "kvpush.cli.probe", "push-target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert target.stdin is not None
    assert target.stdout is not None
    try:
        source = np.random.default_rng().integers(0, 256, PUSH_BYTES, dtype=np.uint8)
        transport = NixlTransport(f"kvpush-doctor-writer-{os.getpid()}")
        transport.register([Region(source.ctypes.data, PUSH_BYTES)])
        hello = json.loads(_line(target.stdout))
        peer = transport.connect(bytes.fromhex(hello["metadata"]))
        began_s = time.monotonic()
        runs = Runs.of((source.ctypes.data, hello["address"], PUSH_BYTES))
        handle = transport.write(peer, runs, None, None, b"kvpush-doctor")
        while not transport.done(handle):
            if time.monotonic() - began_s > PUSH_TIMEOUT_S:
                raise TimeoutError(f"a write of {PUSH_BYTES} bytes was not done after {PUSH_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
        seconds = time.monotonic() - began_s
        transport.release(handle)
        target.stdin.write(source.tobytes())
        target.stdin.flush()
        verdict = json.loads(_line(target.stdout))
        transport.close()
        return {"bytes": PUSH_BYTES, "seconds": seconds, **verdict}
    finally:
        target.kill()
        target.wait()


def push_target() -> None:
    """The other side of `push`: tells where its memory is, waits to be notified, compares with what stdin brings."""
    import numpy as np

    from kvpush.transport.base import Region
    from kvpush.transport.nixl import NixlTransport

    memory = np.zeros(PUSH_BYTES, dtype=np.uint8)
    transport = NixlTransport(f"kvpush-doctor-target-{os.getpid()}")
    transport.register([Region(memory.ctypes.data, PUSH_BYTES)])
    _answer({"metadata": transport.metadata().hex(), "address": memory.ctypes.data})
    deadline_s = time.monotonic() + 2 * PUSH_TIMEOUT_S
    notified = False
    while not notified and time.monotonic() < deadline_s:
        notified = any(payload == b"kvpush-doctor" for _, payload in transport.notifications())
        time.sleep(POLL_S)
    expected = np.frombuffer(sys.stdin.buffer.read(PUSH_BYTES), dtype=np.uint8)
    _answer({"notified": notified, "equal": bool(np.array_equal(memory, expected))})


def _line(stream: Any) -> str:
    """The other process's next answer. NIXL logs to stdout, so answers are marked."""
    while True:
        line = stream.readline().decode(errors="replace")
        if not line:
            raise RuntimeError("the other process ended")
        if line.startswith(ANSWER):
            return str(line.removeprefix(ANSWER))


ANSWER = "kvpush-probe: "


def _answer(result: dict[str, Any]) -> None:
    print(f"{ANSWER}{json.dumps(result)}", flush=True)


def main() -> int:
    probes = {"nixl": nixl, "torch": torch, "push": push}
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "push-target":
        push_target()
        return 0
    if name not in probes:
        print(f"usage: python -m kvpush.cli.probe {'|'.join(probes)}", file=sys.stderr)
        return 2
    try:
        result = probes[name]()
    except Exception as error:
        # Whatever it is, it is what the probe was sent to find out.
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    _answer(result)
    return 0


def run_probe(name: str, timeout_s: float) -> dict[str, Any]:
    """Starts a probe and returns its answer; `{"error": ...}` if it failed, crashed or hung."""
    command = [sys.executable, "-m", "kvpush.cli.probe", name]
    if installed.module_path("kvpush") is None:
        return {"error": "kvpush is not importable"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_s:.0f} s"}
    answers = [line.removeprefix(ANSWER) for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if not answers:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"error": f"it crashed: {last}"[:300]}
    result: dict[str, Any] = json.loads(answers[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
