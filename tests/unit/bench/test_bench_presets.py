"""Presets: those of the package are whole and small, and what is wrong in one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpush.bench import options, presets
from kvpush.bench.options import parse, plan
from kvpush.bench.raw import Slo
from kvpush.bench.workload import parse_cells

pytestmark = pytest.mark.unit


def test_the_presets_that_are_promised_are_there() -> None:
    assert presets.names() == ["cpu", "h200x2-0.6b", "h200x2-8b", "published"]


@pytest.mark.parametrize("name", ["h200x2-0.6b", "h200x2-8b"])
def test_a_preset_is_a_whole_plan(name: str, tmp_path: Path) -> None:
    asked = plan(parse(["--preset", name, "--out", str(tmp_path)]), tmp_path, 0.0)
    assert [connector.name for connector in asked.connectors] == ["vllm-pull", "vllm-push", "kvpush-push"]
    assert (asked.pools, asked.repeats, asked.osl, asked.preset) == (["fresh", "aged"], 3, 128, name)
    assert asked.slo is not None
    assert asked.interleave == "runs"


def test_the_cpu_preset_takes_turns_and_fits_into_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 49152}')
    monkeypatch.setattr(options, "demo_model", lambda _say: tmp_path)
    asked = plan(parse(["--preset", "cpu", "--out", str(tmp_path)]), tmp_path, 0.0)
    assert asked.interleave == "cells"
    assert not asked.options.dummy_weights
    assert asked.deadline_s < 600
    assert asked.options.memory_share == 0.5
    # What the load alone takes, beside the start of four engines.
    assert sum(cell.duration_s() for cell in asked.cells) * asked.repeats * len(asked.connectors) < 450


def test_the_published_sweep_goes_to_engines_that_run_already(tmp_path: Path) -> None:
    rest = ["--attach", "http://p:8100,http://d:8200/", "--side-channels", "p:8101,d:8201", "--out", str(tmp_path)]
    asked = plan(parse(["--preset", "published", "--connectors", "kvpush-push", *rest]), tmp_path, 0.0)
    assert asked.attached is not None
    assert (asked.attached.model, asked.attached.decode_url) == ("Qwen/Qwen3-32B", "http://d:8200")
    legs = asked.attached.legs().decode("t", None)
    assert (legs["remote_host"], legs["remote_port"]) == ("p", 8101)
    assert len(asked.cells) == 16
    assert asked.vocabulary == 151_936
    assert parse_cells("1024:1:60")[0] in asked.cells


def test_options_on_the_command_line_win(tmp_path: Path) -> None:
    given = ["--preset", "h200x2-0.6b", "--out", str(tmp_path), "--repeats", "1", "--cells", "1024:8:5"]
    asked = plan(parse(given), tmp_path, 0.0)
    assert (asked.repeats, len(asked.cells)) == (1, 1)
    assert asked.slo == Slo(ttft_ms=500, tpot_ms=10)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shapes = 1", "unknown key 'shapes'.*shape"),
        ('osl = "many"', "osl must be int"),
        ("osl = true", "osl must be int"),
        ("cells = [1, 2]", "cells must be str"),
        ('out = "/x"', "unknown key 'out'"),
        ("shape = ", "Invalid value"),
    ],
)
def test_what_is_wrong_in_a_file_of_ones_own_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        parse(["--preset", str(path)])


def test_a_preset_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no preset 'cpux'; there are cpu,"):
        parse(["--preset", "cpux"])
    with pytest.raises(ValueError, match="No such file"):
        parse(["--preset", str(tmp_path / "none.toml")])
