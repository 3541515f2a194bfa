"""`kvpush serve`: vLLM's server with the right `--kv-transfer-config`."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvpush.cli.devices import choose_devices
from kvpush.launch import EngineSpec, LaunchError, Role, command, environment, installed, require_free
from kvpush.launch.engine import KV_ROLES

DEFAULT_PORTS = {"prefill": 8100, "decode": 8200, "both": 8300}
POLICIES = ("fail", "recompute")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """See `kvpush serve --help`."""

    model: str
    role: str
    host: str
    port: int | None
    side_channel_host: str | None
    side_channel_port: int | None
    device: str
    load_failure_policy: str | None
    connector_options: tuple[str, ...]
    vllm_args: tuple[str, ...]
    dry_run: bool


def run_serve(options: ServeOptions) -> None:
    """Prints the command and becomes it; returns only for a dry run. Raises LaunchError."""
    if options.role not in KV_ROLES:
        raise LaunchError(f"--role is {options.role!r}", f"it must be one of {', '.join(KV_ROLES)}")
    if options.load_failure_policy not in (None, *POLICIES):
        raise LaunchError(
            f"--load-failure-policy is {options.load_failure_policy!r}", f"it must be {' or '.join(POLICIES)}"
        )
    clash = [each for each in options.vllm_args if each.split("=")[0] in ("--kv-transfer-config", "--port", "--host")]
    if clash:
        raise LaunchError(f"{clash[0]} after -- would undo what kvpush sets", "use kvpush serve's own options")
    installed.require_engine_parts()
    port = options.port if options.port is not None else DEFAULT_PORTS[options.role]
    side_port = options.side_channel_port if options.side_channel_port is not None else port + 1
    if port == side_port:
        raise LaunchError(f"--port and --side-channel-port are both {port}", "they must differ")
    if options.device == "auto" or ":" not in options.device:
        device = choose_devices(options.device, 1)[0]
    else:
        device = options.device
    side_host = options.side_channel_host or options.host
    if side_host in ("0.0.0.0", "::"):
        raise LaunchError(
            f"the side channel cannot be {side_host}, because the decode engine is told where to find it",
            "give this machine's address with --side-channel-host",
        )
    path = Path(options.model).expanduser()
    spec = EngineSpec(
        model=str(path.resolve()) if path.is_dir() else options.model,
        role=cast(Role, options.role),
        port=port,
        side_channel_port=side_port,
        connector_options={"side_channel_host": side_host, **dict(map(_parsed, options.connector_options))},
        load_failure_policy=options.load_failure_policy,
        device=device,
        host=options.host,
        extra_args=options.vllm_args,
    )
    argv, env = command(spec), environment(spec)
    changed = [f"{name}={shlex.quote(value)}" for name, value in sorted(env.items()) if os.environ.get(name) != value]
    print(" ".join([*changed, shlex.join(argv)]), flush=True)
    if options.dry_run:
        return
    # vLLM binds its ports in a way that lets two engines share one without a word.
    require_free(port, "--port", options.host)
    require_free(side_port, "--side-channel-port", side_host)
    os.execve(argv[0], argv, env)


def _parsed(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise LaunchError(f"--option {text!r} is not of the form KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
