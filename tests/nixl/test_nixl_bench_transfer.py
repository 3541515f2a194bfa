"""Raw transfers over real NIXL between two processes, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpush.bench.raw import TransferRaw, read_raw
from kvpush.bench.tables import tables
from kvpush.bench.transfer import CacheShape, Pair, TransferFailed, main

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]


@pytest.mark.parametrize(("geometry", "regions"), [("36x64", 36), ("72x32", 72)])
def test_every_table_arrives_whole_and_is_recorded(tmp_path: Path, geometry: str, regions: int) -> None:
    asked = ["--device", "cpu", "--tokens", "128", "--runs", "1", "--geometry", geometry, "--out", str(tmp_path)]
    assert main(asked) == 0
    (path,) = tmp_path.glob("*.json")
    raw = read_raw(path)
    assert isinstance(raw, TransferRaw)
    cells = [(table, path) for table in ("contiguous", "aged", "random") for path in ("direct", "staged", "auto")]
    assert [(row.table, row.path) for row in raw.rows] == cells
    for row in raw.rows:
        assert row.verified
        assert row.bytes == 128 * 36 * 4096
        assert row.descriptors == 8 * regions
        # Of a staged transfer, parts.
        assert (1 if row.path == "staged" else regions) <= row.runs <= row.descriptors
        assert row.ms > 0
        assert len(row.samples_ms) == 1
    assert raw.rows[0].runs == regions


def test_a_side_that_dies_is_reported() -> None:
    shape = CacheShape(regions=2, page_bytes=32_768, block_size=16, num_blocks=20, single_bytes=4096)
    with Pair(shape, None, 0, 1) as pair:
        blocks = tables("random", 8, 20, 1)
        pair.run(blocks, 128)
        pair.target.process.kill()
        with pytest.raises(TransferFailed, match="target"):
            pair.run(blocks, 128)
    assert not any(side.process.is_alive() for side in pair.sides)
