"""docs/reliability.md cannot rot: its tests exist, its defaults are the code's, and no kind of fault is left out."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kvpush.protocol.timing import Timing
from kvpush.router.config import RouterConfig
from kvpush.vllm.config import Options

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reliability.md").read_text()

# fmt: off
# The kinds of fault that must have a row. A new kind is added here and to the page.
SCENARIOS = [
    "stale-reference", "transport-dies", "post-fails-on-one-rank", "sibling-in-flight", "never-answers",
    "no-request", "no-registration", "other-prompt", "phantom", "report-twice", "both-pools-full",
    "stopped-consumer", "leases-renew", "push-frees-promptly", "bad-params", "idle-producer", "mixed-modes",
    "partial-prefix-hit", "full-prefix-hit", "malformed-notification", "short-prompt", "n-samples", "fast-consumer",
    "preempted-at-producer", "duplicate-transfer-id", "producer-restarts", "consumer-restarts", "wrong-engine",
    "abort-while-waiting", "abort-at-producer", "abort-reuse", "consumer-full", "logging-level",
    "reset-prefix-cache", "two-on-one-host", "long-uptime", "writers-counted", "mla-every-rank", "block-sizes",
    "logprobs", "echo", "stop", "seed", "stream", "stream_options", "max_tokens=1", "min_tokens",
    "structured_output",
]
# fmt: on


def rows(heading: str) -> list[list[str]]:
    """The cells of every row of the tables below a heading, without heads."""
    section = re.split(r"^#+ ", PAGE.split(f"# {heading}\n")[1], flags=re.MULTILINE)[0]
    tables = re.findall(r"^\|.*\n\|[-| ]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for table in tables for line in table.splitlines()]


def scenarios() -> dict[str, str]:
    """Name -> the cell of its tests."""
    found: dict[str, str] = {}
    for name, _, tests in rows("Scenarios"):
        for each in re.findall(r"`([^`]+)`", name):
            assert each not in found, f"{each} has two rows"
            found[each.replace(" ", "_")] = tests
    return found


@cache
def functions(file_name: str) -> frozenset[str]:
    """The test functions of a file, wherever it lies."""
    paths = list((ROOT / "tests").rglob(file_name))
    assert len(paths) == 1, f"{file_name} is {len(paths)} files"
    tree = ast.parse(paths[0].read_text())
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(node.name for node in defined if node.name.startswith("test_"))


def test_every_kind_of_fault_has_a_row() -> None:
    assert sorted(scenarios()) == sorted(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_tests_of_a_row_exist(name: str) -> None:
    named = re.findall(r"`(\w+\.py)::(\w+)`", scenarios()[name])
    assert named
    assert scenarios()[name].count("`") == 2 * len(named)  # nothing that only looks like a test


def test_every_test_that_is_named_anywhere_exists() -> None:
    for file_name, function in re.findall(r"`([^`]+)::([^`]+)`", PAGE):
        assert function in functions(file_name), f"{file_name} has no {function}"


def shown(value: float | None) -> str:
    return "off" if value is None else f"{value:g}"


def test_the_bounds_are_those_of_the_code() -> None:
    told = {name: default for name, default, *_ in rows("Bounds")}
    timing, options = Timing(), Options()
    expected = {f"`{name}`": shown(getattr(timing, name)) for name in Timing.__struct_fields__}
    expected |= {f"`{name}`": f"{getattr(options, name):g}" for name in ("preempt_wait_s", "handshake_timeout_s")}
    both_s = timing.rendezvous_timeout_s + timing.peer_timeout_s
    expected["`rendezvous_timeout_s` + `peer_timeout_s`"] = f"{both_s:g}"
    assert told == expected
    [router] = re.findall(r"`--request-timeout-s` \((\d+)\)", PAGE)
    assert float(router) == RouterConfig(("http://a",), ("http://b",)).request_timeout_s


def test_the_bounds_of_the_protocol_are_told_once_more_without_contradiction() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    told = dict(re.findall(r"^\| `(\w+_s)` \| ([\d.]+(?= s)|off)", page, re.MULTILINE))
    timing = Timing()
    assert told == {name: shown(getattr(timing, name)) for name in Timing.__struct_fields__}


def test_the_counters_that_are_named_exist() -> None:
    named = set(re.findall(r"`kvpush_(\w+)`", PAGE))
    tree = ast.parse((ROOT / "src/kvpush/vllm/stats.py").read_text())  # importing it would import vLLM
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert named
    assert named <= {f"{name}_total" for name in tables["COUNTERS"]} | set(tables["GAUGES"])


def test_the_reasons_that_are_named_are_those_of_the_code() -> None:
    folders = [ROOT / "src/kvpush" / name for name in ("protocol", "transfer", "vllm")]
    source = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    table = PAGE.split("has the reason:")[1].split("Others at both engines:")[0]
    named = set(re.findall(r"`([a-z_ ]+)`", "".join(re.findall(r"^\|([^|]+)\|", table, re.MULTILINE))))
    assert len(named) > 15
    for reason in named:
        code = reason.removeprefix("handshake ")  # those of the side channel have their codes behind the word
        assert f'"{code}"' in source or f'"{reason}: ' in source, f"nothing gives the reason {reason}"
