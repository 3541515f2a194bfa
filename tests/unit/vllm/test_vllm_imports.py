"""What is imported when: vLLM loads the plugin in every process, also in those that need no connector."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import kvpush.vllm

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
FREE = ["params", "config", "producer_scheduler", "consumer_scheduler", "halves", "identity", "compat", "plugin"]


@pytest.mark.parametrize("module", ["kvpush.vllm", *(f"kvpush.vllm.{name}" for name in FREE)])
def test_modules_that_need_no_vllm_import_none(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('vllm', 'torch', 'nixl') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KVPullConnekTor'"):
        kvpush.vllm.KVPullConnekTor  # noqa: B018


def test_the_entry_point_leads_to_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["vllm.general_plugins"].items()
    register = EntryPoint(name, value, "vllm.general_plugins").load()
    from kvpush.vllm import plugin

    assert register is plugin.register
