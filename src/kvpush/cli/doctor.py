"""`kvpush doctor`: what is installed, what this machine has, and whether a push will work."""

from __future__ import annotations

import json
import os
import platform
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

import kvpush
from kvpush.cli import machine
from kvpush.cli.devices import visible_gpus, vllm_runs_on_the_cpu
from kvpush.cli.probe import run_probe
from kvpush.launch import installed

PROBE_TIMEOUT_S = 120.0
GIB = 2**30
SMALL_SHARED_MEMORY_BYTES = GIB
FEW_FILES = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    state: `ok`; `warning` for what works but not well; `missing` for what a push cannot do without; `info` otherwise.
    remedy: what to do about a warning or about something missing.
    """

    name: str
    value: str
    state: str = "info"
    remedy: str = ""


Probe = Callable[[str, float], dict[str, Any]]


def run_doctor(*, as_json: bool, try_push: bool) -> int:
    """Prints the report. Exit status 0 if a push will work, 1 if not."""
    findings = examine(try_push=try_push)
    missing = [finding for finding in findings if finding.state == "missing"]
    if as_json:
        report = {
            "push_will_work": not missing,
            "missing": [{"name": each.name, "value": each.value, "remedy": each.remedy} for each in missing],
            "findings": [asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=2))
        return 1 if missing else 0
    console = Console(highlight=False)
    styles = {"ok": "green", "warning": "yellow", "missing": "red", "info": ""}
    signs = {"ok": "ok  ", "warning": "note", "missing": "MISS", "info": "    "}
    for finding in findings:
        line = Text(f"{signs[finding.state]}  ", style=styles[finding.state])
        line.append(f"{finding.name:<16} {finding.value}", style="")
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"{'':<23}{finding.remedy}"), soft_wrap=True)
    if not missing:
        console.print("\npush will work: yes")
        return 0
    console.print("\npush will work: no")
    for finding in missing:
        console.print(Text(f"  {finding.name}: {finding.value}; {finding.remedy}"), soft_wrap=True)
    return 1


def examine(*, try_push: bool, probe: Probe = run_probe) -> list[Finding]:
    """All findings. probe: runs a named probe in a process of its own."""
    findings = [
        Finding("kvpush", kvpush.__version__),
        Finding("Python", platform.python_version()),
        *_vllm(),
        *_nixl(probe),
        *_torch(probe),
        *_machine(),
    ]
    if try_push and not any(finding.state == "missing" for finding in findings):
        findings.append(_push(probe))
    return findings


def _vllm() -> list[Finding]:
    found = installed.vllm()
    if found is None:
        return [Finding("vLLM", "not installed", "missing", installed.INSTALL_REMEDY)]
    value = f"{found.name} {found.version}"
    if not installed.vllm_in_range(found):
        return [Finding("vLLM", value, "missing", f"kvpush supports {installed.VLLM_RANGE}; install one of those")]
    findings = [Finding("vLLM", value, "ok")]
    plugins = os.environ.get("VLLM_PLUGINS")
    if not installed.plugin_is_registered():
        remedy = "pip install kvpush in vLLM's environment (in a checkout: make install)"
        findings.append(Finding("vLLM plugin", "kvpush has no entry point", "missing", remedy))
    elif plugins is not None and "kvpush" not in [name.strip() for name in plugins.split(",")]:
        value = f"VLLM_PLUGINS={plugins} leaves kvpush out"
        findings.append(Finding("vLLM plugin", value, "missing", "add kvpush to VLLM_PLUGINS, or unset it"))
    else:
        findings.append(Finding("vLLM plugin", "kvpush is registered", "ok"))
    return findings


def _nixl(probe: Probe) -> list[Finding]:
    found = installed.nixl()
    if found is None:
        return [Finding("NIXL", "not installed", "missing", installed.INSTALL_REMEDY)]
    value = f"{found.name} {found.version}"
    seen = probe("nixl", PROBE_TIMEOUT_S)
    if "error" in seen:
        remedy = "reinstall nixl and the nixl-cu12 or nixl-cu13 that fits your CUDA"
        return [Finding("NIXL", f"{value} does not load: {seen['error']}", "missing", remedy)]
    findings = [Finding("NIXL", value, "ok"), Finding("NIXL plugins", ", ".join(seen["plugins"]) or "none")]
    if seen["ucx_starts"]:
        findings.append(Finding("UCX", seen["ucx"] or "version unknown", "ok"))
    else:
        remedy = "install a NIXL whose wheel brings the UCX plugin, or set NIXL_PLUGIN_DIR to where it is"
        findings.append(Finding("UCX", "the backend does not start", "missing", remedy))
    return findings


def _torch(probe: Probe) -> list[Finding]:
    gpus = visible_gpus()
    if installed.module_path("torch") is None:
        return [Finding("torch", "not installed", "missing", installed.INSTALL_REMEDY)]
    seen = probe("torch", PROBE_TIMEOUT_S)
    if "error" in seen:
        return [Finding("torch", f"does not load: {seen['error']}", "missing", "reinstall torch")]
    cuda = f"CUDA {seen['cuda']}" if seen["cuda"] else "no CUDA"
    findings = [Finding("torch", f"{seen['version']} ({cuda})", "ok")]
    needs_gpu = installed.vllm() is not None and not vllm_runs_on_the_cpu()
    if not seen["gpus"]:
        if needs_gpu:
            value = "nvidia-smi lists some, torch sees none" if gpus else "none"
            remedy = "fix the driver, or install the CPU build: KVPUSH_INSTALL=cpu make install"
            return [*findings, Finding("GPUs", value, "missing", remedy)]
        unused = " (the installed vLLM is a CPU build and leaves them alone)" if gpus else ""
        return [*findings, Finding("GPUs", f"{len(gpus) or 'none'}{unused}")]
    findings.append(Finding("GPUs", ", ".join(seen["gpus"]), "ok"))
    if seen["pairs"]:
        reach = len(seen["peers"])
        links = machine.gpu_links()
        value = f"{reach} of {seen['pairs']} ordered pairs reach each other directly" + (
            f"; {', '.join(links)}" if links else ""
        )
        remedy = "" if reach == seen["pairs"] else "KV between the others goes through host memory"
        findings.append(Finding("GPU peers", value, "warning" if remedy else "ok", remedy))
    return findings


def _machine() -> list[Finding]:
    findings = []
    rdma = machine.rdma_devices()
    findings.append(Finding("RDMA devices", ", ".join(rdma) or "none (between machines TCP is used)"))
    locked = machine.limit(resource.RLIMIT_MEMLOCK)
    value = "unlimited" if locked == float("inf") else f"{locked / GIB:.2f} GiB"
    if rdma and locked != float("inf"):
        findings.append(Finding("locked memory", value, "warning", "RDMA registers the KV cache: ulimit -l unlimited"))
    else:
        findings.append(Finding("locked memory", value))
    shared = machine.shared_memory_bytes()
    if shared is None:
        findings.append(Finding("/dev/shm", "none", "warning", "mount one; vLLM and UCX use shared memory"))
    else:
        value = f"{shared[0] / GIB:.1f} GiB, {shared[1] / GIB:.1f} free"
        small = shared[1] < SMALL_SHARED_MEMORY_BYTES
        remedy = "small for vLLM and UCX; in a container: --shm-size=8g or --ipc=host" if small else ""
        findings.append(Finding("/dev/shm", value, "warning" if small else "info", remedy))
    files = machine.limit(resource.RLIMIT_NOFILE)
    few = files < FEW_FILES
    value = "unlimited" if files == float("inf") else f"{files:.0f}"
    findings.append(Finding("open files", value, "warning" if few else "info", "ulimit -n 65536" if few else ""))
    scope = machine.ptrace_scope()
    value = "not restricted" if scope is None else f"ptrace_scope {scope}"
    if machine.may_copy_between_processes():
        findings.append(Finding("process copy", value))
    else:
        remedy = "UCX copies twice between processes of this host; sysctl kernel.yama.ptrace_scope=0 avoids it"
        findings.append(Finding("process copy", value, "warning", remedy))
    return findings


def _push(probe: Probe) -> Finding:
    seen = probe("push", PROBE_TIMEOUT_S)
    remedy = "see UCX's messages with UCX_LOG_LEVEL=info kvpush doctor"
    if "error" in seen:
        return Finding("test push", f"failed: {seen['error']}", "missing", remedy)
    if not (seen["notified"] and seen["equal"]):
        what = "the bytes are wrong" if not seen["equal"] else "its notification did not arrive"
        return Finding("test push", f"failed: {what}", "missing", remedy)
    value = f"{seen['bytes'] / 2**20:.0f} MiB between two processes in {seen['seconds'] * 1e3:.1f} ms, verified"
    return Finding("test push", value, "ok")
