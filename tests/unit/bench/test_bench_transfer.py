"""The raw transfer benchmark: arguments, and that verification finds what it must."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvpush.bench.transfer import device_name, main
from kvpush.bench.transfer_side import CacheShape, Side

pytestmark = pytest.mark.unit

SHAPE = CacheShape(regions=2, page_bytes=32_768, block_size=16, num_blocks=12, single_bytes=4096)
SOURCE_BLOCKS = np.array([3, 7, 4])
TARGET_BLOCKS = np.array([9, 0, 5])
SEED = 41


class NoTransport:
    """Takes NIXL's place where bytes are copied by the test itself."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def register(self, regions: object) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> tuple[Side, Side]:
    monkeypatch.setattr("kvpush.bench.transfer_side.NixlTransport", NoTransport)
    source, target = Side("source", SHAPE, None, 0, 1 << 20), Side("target", SHAPE, None, 0, 1 << 20)
    target.wipe(SEED)
    source.fill(SOURCE_BLOCKS, SEED)
    for region in range(SHAPE.regions):
        target.cache[region][torch.from_numpy(TARGET_BLOCKS)] = source.cache[region][torch.from_numpy(SOURCE_BLOCKS)]
    return source, target


def test_a_true_copy_is_accepted(sides: tuple[Side, Side]) -> None:
    assert sides[1].verify(TARGET_BLOCKS, SEED) is None


def test_one_wrong_word_is_found(sides: tuple[Side, Side]) -> None:
    sides[1].cache[1][5, 4095] += 1
    assert sides[1].verify(TARGET_BLOCKS, SEED) == "region 1: 1 of 3 blocks differ"


def test_blocks_in_each_others_places_are_found(sides: tuple[Side, Side]) -> None:
    cache = sides[1].cache[0]
    cache[[9, 0]] = cache[[0, 9]].clone()
    assert sides[1].verify(TARGET_BLOCKS, SEED) == "region 0: 2 of 3 blocks differ"


def test_bytes_of_an_earlier_run_are_found(sides: tuple[Side, Side]) -> None:
    assert sides[1].verify(TARGET_BLOCKS, SEED + 1) == "region 0: 3 of 3 blocks differ"


def test_a_write_outside_the_table_is_found(sides: tuple[Side, Side]) -> None:
    sides[1].cache[0][11, 0] = 7
    assert sides[1].verify(TARGET_BLOCKS, SEED) == "region 0: 1 blocks outside the table were written"


def test_the_single_buffer_is_compared(sides: tuple[Side, Side]) -> None:
    source, target = sides
    source.fill(None, SEED)
    assert target.verify(None, SEED) == "the single buffer differs"
    target.single.copy_(source.single)
    assert target.verify(None, SEED) is None


def test_the_geometry_is_that_of_a_paged_cache(sides: tuple[Side, Side]) -> None:
    geometry = sides[0].geometry
    assert geometry.block_stride == 32_768
    assert geometry.token_bytes * geometry.block_size == SHAPE.block_bytes
    assert geometry.bases == tuple(each.data_ptr() for each in sides[0].cache)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--tokens", "many"], "whole numbers"),
        (["--tokens", "100"], "100 is not a multiple of 16"),
        (["--tokens", "0"], "0 is not a multiple of 16"),
        (["--tables", "tidy"], "tidy"),
        (["--runs", "0"], "--runs"),
        (["--gpus", "0,x"], "whole numbers"),
        (["--gpus", "0"], "--gpus"),
        (["--pool-blocks", "3"], "--pool-blocks"),
    ],
)
def test_wrong_arguments_are_named(changed: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--tokens", "128", *changed]) == 2
    assert words in capsys.readouterr().err


def test_devices_get_the_names_of_the_figures() -> None:
    assert device_name("cpu", ["NVIDIA H200"]) == "cpu"
    assert device_name("cuda", ["NVIDIA H200", "NVIDIA H200"]) == "h200"
    assert device_name("cuda", ["NVIDIA B200 X"]) == "nvidia-b200-x"


def test_nothing_is_written_for_wrong_arguments(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--tokens", "1", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
