"""What this machine allows: limits, shared memory, RDMA devices, the links of its GPUs."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def limit(which: int) -> float:
    """The soft limit; infinity for none."""
    soft, _ = resource.getrlimit(which)
    return float("inf") if soft == resource.RLIM_INFINITY else float(soft)


def shared_memory_bytes() -> tuple[int, int] | None:
    """(size, free) of /dev/shm; None if there is none."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.total, usage.free


def rdma_devices() -> list[str]:
    """`mlx5_0 (ACTIVE)` and so on: each device with the states of its ports."""
    try:
        names = sorted(path.name for path in INFINIBAND.iterdir())
    except OSError:
        return []
    found = []
    for name in names:
        states = set()
        for path in sorted((INFINIBAND / name / "ports").glob("*/state")):
            try:
                states.add(path.read_text().split(":")[-1].strip())
            except OSError:
                continue
        found.append(f"{name} ({', '.join(sorted(states)) or 'no port'})")
    return found


def ptrace_scope() -> int | None:
    """0: any process of the user may be read, 1: only children; None if the kernel does not restrict it."""
    try:
        return int(PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return None


def may_copy_between_processes() -> bool:
    """Whether UCX may copy directly from one process to another (CMA). Otherwise it copies through shared memory."""
    return ptrace_scope() in (None, 0) or os.geteuid() == 0


def gpu_links() -> list[str]:
    """`GPU0-GPU1 NV18` and so on, from nvidia-smi's topology; empty without a driver or with one GPU."""
    try:
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_topology(shown.stdout)


def parse_topology(text: str) -> list[str]:
    """Each pair of GPUs once. The table's first line names the columns; a row begins with its own name."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if not rows:
        return []
    columns = [word for word in rows[0] if re.fullmatch(r"GPU\d+", word)]
    found = []
    for row in rows[1:]:
        if row[0] in columns:
            mine = columns.index(row[0])
            for place in range(mine + 1, len(columns)):
                if place + 1 < len(row):
                    found.append(f"{row[0]}-{columns[place]} {row[place + 1]}")
    return found
