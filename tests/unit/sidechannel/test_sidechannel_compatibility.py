"""Which engines may exchange KV, and what is said if they may not."""

import pytest
from sidechannel_cases import engine, rank

from kvpush.transfer.sidechannel import check_compatible

pytestmark = pytest.mark.unit

MINE = engine()
FINGERPRINT = MINE.fingerprint


def other(**changes: object):
    return engine(**{"engine_id": "engine-2", "incarnation": "life-9", **changes})


def test_engines_that_differ_in_nothing_that_matters_are_compatible() -> None:
    assert check_compatible(MINE, other(host_id="elsewhere")) == []


@pytest.mark.parametrize(
    ("theirs", "texts"),
    [
        (other(mode="pull"), ["mode: push here, pull there"]),
        (other(protocol_version=2), ["protocol version: 1 here, 2 there"]),
        (other(fingerprint={**FINGERPRINT, "model": "another"}), ["model: 'some/model' here, 'another' there"]),
        (other(fingerprint={**FINGERPRINT, "kv_dtype": "fp8"}), ["kv_dtype: 'bfloat16' here, 'fp8' there"]),
        (other(fingerprint={"model": "some/model", "kv_dtype": "bfloat16"}), ["block_size: '32' here, missing there"]),
        (other(fingerprint={**FINGERPRINT, "layout": "HND"}), ["layout: missing here, 'HND' there"]),
        (other(tp_size=3), ["tp_size: 2 here, 3 there (one must be a multiple of the other)"]),
        (other(pp_size=5), ["pp_size: 2 here, 5 there (one must be a multiple of the other)"]),
        (other(engine_id="engine-1"), ["both engines have the engine id engine-1"]),
        (MINE, ["engine engine-1 was pointed at itself"]),
        (
            other(mode="pull", protocol_version=2, fingerprint={}),
            [
                "mode: push here, pull there",
                "protocol version: 1 here, 2 there",
                "block_size: '32' here, missing there",
                "kv_dtype: 'bfloat16' here, missing there",
                "model: 'some/model' here, missing there",
            ],
        ),
    ],
)
def test_every_difference_is_named_from_both_sides(theirs, texts) -> None:
    assert check_compatible(MINE, theirs) == texts
    assert len(check_compatible(theirs, MINE)) == len(texts)


@pytest.mark.parametrize("value", ["flash", "unknown"])
def test_what_one_side_cannot_know_fits_everything(value) -> None:
    mine, theirs = ({**FINGERPRINT, "weights": known} for known in ("unknown", value))
    assert check_compatible(engine(fingerprint=mine), other(fingerprint=theirs)) == []
    assert check_compatible(engine(fingerprint=theirs), other(fingerprint=mine)) == []


def test_what_a_rank_knows_counts_like_what_its_engine_knows() -> None:
    flash, triton = (rank(fingerprint={"attention backend": name}) for name in ("FLASH_ATTN", "TRITON_ATTN"))
    assert check_compatible(MINE.of(flash), other().of(flash)) == []
    assert check_compatible(MINE.of(flash), other().of(triton)) == [
        "attention backend: 'FLASH_ATTN' here, 'TRITON_ATTN' there"
    ]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sizes_may_differ_by_a_factor(size) -> None:
    assert check_compatible(MINE, other(tp_size=size, pp_size=size)) == []


def test_values_from_the_network_are_safe_to_log() -> None:
    (text,) = check_compatible(MINE, other(fingerprint={**FINGERPRINT, "\x1b[2J": "\n" * 400}))
    assert text.isprintable()
    assert len(text) < 200
