"""Hashes of blocks: equal to a naive twin, and different for every fault that has to be seen."""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.transfer import hashing
from kvpush.transfer.hashing import BackgroundHasher, Words, factors, hash_memory

pytestmark = pytest.mark.unit

Layers = list[npt.NDArray[np.uint8]]
NOBODY = lambda: False  # noqa: E731
MASK = 2**64 - 1


def naive(layers: Layers, blocks: list[int]) -> Words:
    """One word after the other, in Python's integers."""
    found = []
    for layer in layers:
        row = []
        for block in blocks:
            page = layer[block].tobytes()
            page += bytes(-len(page) % 8)
            total = 0
            for i in range(len(page) // 8):
                word = int.from_bytes(page[8 * i : 8 * i + 8], "little")
                total += (word ^ (word >> 32)) * (int(factors(len(page) // 8)[i]) & MASK)
            row.append(total & MASK)
        found.append(row)
    return np.array(found, np.uint64).view(np.int64)


def cache(shape: tuple[int, ...] = (12, 2, 4, 16), layers: int = 3, seed: int = 0) -> Layers:
    random = np.random.default_rng(seed)
    return [random.integers(1, 256, shape, np.uint8) for _ in range(layers)]


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 5), st.integers(1, 24)),
    layout=st.sampled_from(["HND", "NHD", "interleaved", "shifted"]),
    data=st.data(),
    chunk_bytes=st.sampled_from([8, 100, 4096, hashing.CHUNK_BYTES]),
)
@settings(deadline=None, max_examples=150)
def test_it_finds_what_the_naive_twin_finds(
    shape: tuple[int, ...], layout: str, data: st.DataObject, chunk_bytes: int
) -> None:
    layers = cache(shape, seed=sum(shape))
    if layout == "NHD":
        layers = [layer.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for layer in layers]
    elif layout == "interleaved":
        layers = list(np.stack(layers, axis=1).transpose(1, 0, 2, 3, 4))
    elif layout == "shifted":  # no address is that of a word
        layers = [np.frombuffer(b"." + layer.tobytes(), np.uint8)[1:].reshape(shape) for layer in layers]
    blocks = data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "CHUNK_BYTES", chunk_bytes)
        found = hash_memory(layers, blocks, NOBODY)
    assert found.shape == (3, len(blocks))
    assert (found == naive(layers, blocks).reshape(found.shape)).all()


@given(st.integers(0, 2 * 4 * 16 * 8 - 1))
@settings(deadline=None, max_examples=200)
def test_every_bit_counts(bit: int) -> None:
    layers = cache()
    before = hash_memory(layers, [5], NOBODY)
    layers[1][5].reshape(-1)[bit // 8] ^= 1 << (bit % 8)
    changed = hash_memory(layers, [5], NOBODY) != before
    assert changed.tolist() == [[False], [True], [False]]


@pytest.mark.parametrize("bit", range(64))
def test_words_that_change_places_are_seen_even_if_they_differ_in_one_bit(bit: int) -> None:
    """Of the highest bit a product by an odd factor alone tells no place, and little of those below it."""
    random = np.random.default_rng(bit)
    word = random.integers(0, 2**63, dtype=np.uint64)
    page = np.full((1, 1, 1, 64), word, np.uint64)
    found = set()
    for place in range(64):
        page[:] = word
        page[..., place] ^= np.uint64(1 << bit)
        found.add(int(hash_memory([page.view(np.uint8)], [0], NOBODY)[0, 0]))
    assert len(found) == 64


def test_the_factors_are_odd_and_no_two_are_alike() -> None:
    found = factors(100_000)
    assert (found & 1).all()
    assert len(np.unique(found)) == len(found)
    assert (factors(10) == found[:10]).all()


def test_their_values_are_fixed() -> None:
    """Two engines must agree, whatever their versions of numpy are."""
    assert [int(factor) & MASK for factor in factors(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F5]


def test_a_block_that_is_none_is_an_error() -> None:
    for block in (-1, 12):
        with pytest.raises(IndexError, match="the cache has 12"):
            hash_memory(cache(), [0, block], NOBODY)


def test_a_cancelled_hash_ends_early() -> None:
    looks = iter([False, True])
    found = hash_memory(cache(layers=8), [1, 2], lambda: next(looks))
    assert (found[2:] == 0).all()


def test_the_background_hashes_one_after_the_other_and_can_be_cancelled() -> None:
    layers, go, started = cache(), threading.Event(), threading.Event()

    def slow(blocks: object, cancelled: object) -> Words:
        started.set()
        assert go.wait(20)
        return hash_memory(layers, blocks, cancelled)  # type: ignore[arg-type]

    selected: list[str] = []
    hasher = BackgroundHasher(slow, lambda: selected.append(threading.current_thread().name))
    try:
        first, second, third = (hasher.start([block]) for block in (1, 2, 3))
        assert started.wait(20)
        assert not first.done()
        second.cancel()
        go.set()
        deadline_s = time.monotonic() + 20
        while not third.done():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        assert (first.result() == hash_memory(layers, [1], NOBODY)).all()
        assert (third.result() == hash_memory(layers, [3], NOBODY)).all()
        assert second.done()
    finally:
        go.set()
        hasher.close()
    assert len(selected) == 1
    assert selected[0].startswith("kvpush-digest")


def test_an_error_in_the_background_comes_with_the_result() -> None:
    def broken(blocks: object, cancelled: object) -> Words:
        raise MemoryError("no room")

    hasher = BackgroundHasher(broken)
    hashing_ = hasher.start([1])
    deadline_s = time.monotonic() + 20
    while not hashing_.done():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    with pytest.raises(MemoryError, match="no room"):
        hashing_.result()
    hasher.close()
