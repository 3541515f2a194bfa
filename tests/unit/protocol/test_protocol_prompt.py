"""Prompt identity: equal for equal prompts, and no two different ones collide by the way they are put together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.protocol.prompt import DIGEST_BYTES, PromptIdentity, prompt_identity

pytestmark = pytest.mark.unit

parts = st.tuples(
    st.lists(st.integers(0, 300), min_size=1, max_size=6).map(tuple),
    st.none() | st.text(max_size=3),
    st.lists(st.text(max_size=3), max_size=3).map(tuple),
    st.none() | st.text(max_size=3),
)
Parts = tuple[tuple[int, ...], str | None, tuple[str, ...], str | None]


def identity(of: Parts) -> PromptIdentity:
    token_ids, lora, multimodal, salt = of
    return prompt_identity(token_ids, lora=lora, multimodal=multimodal, cache_salt=salt)


@given(parts, parts)
@settings(deadline=None)
def test_identities_are_equal_exactly_if_the_prompts_are(one: Parts, other: Parts) -> None:
    assert (identity(one) == identity(other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((1,), None, (), None), ((1,), "", (), None)),
        (((1,), "a", (), None), ((1,), None, (), "a")),
        (((1,), "a", (), None), ((1,), None, ("a",), None)),
        (((1,), None, (), "a"), ((1,), None, ("a",), None)),
        (((1,), None, ("ab", "c"), None), ((1,), None, ("a", "bc"), None)),
        (((1,), None, ("a",), None), ((1,), None, ("a", ""), None)),
        (((1, 2), None, (), None), ((2, 1), None, (), None)),
        (((1,), None, (), None), ((1, 0), None, (), None)),
        (((256,), None, (), None), ((1,), None, (), None)),
        (((0,), None, (), None), ((0, 0), None, (), None)),
        # A part that looks like the length prefix and text of another one.
        (((1,), "a", ("\x01",), None), ((1,), None, ("a", "\x01"), None)),
        (((1,), None, ("\x01a\x00\x00\x00\x00\x00\x00\x00",), None), ((1,), "a", (), None)),
    ],
)
def test_parts_do_not_run_into_each_other(one: Parts, other: Parts) -> None:
    assert identity(one) != identity(other)


@given(parts)
@settings(deadline=None)
def test_the_length_is_the_number_of_tokens(of: Parts) -> None:
    found = identity(of)
    assert found.num_tokens == len(of[0])
    assert len(found.digest) == DIGEST_BYTES


def test_the_kind_of_sequence_does_not_matter() -> None:
    assert prompt_identity([1, 2, 3]) == prompt_identity((1, 2, 3)) == prompt_identity(range(1, 4))


def test_surrogates_from_a_client_are_no_error() -> None:
    assert prompt_identity([1], cache_salt="\ud800") != prompt_identity([1], cache_salt="\ud801")


def test_an_empty_prompt_has_no_identity() -> None:
    with pytest.raises(ValueError, match="num_tokens must be 1"):
        prompt_identity([])


@pytest.mark.parametrize("token", [-1, 2**32, 2**70])
def test_a_token_id_out_of_range_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        prompt_identity([1, token])


def test_a_value_that_is_no_token_id_is_refused() -> None:
    with pytest.raises(TypeError):
        prompt_identity(["1"])  # type: ignore[list-item]


@pytest.mark.parametrize(("num_tokens", "digest"), [(0, b"x" * 16), (-5, b"x" * 16), (2**31, b"x" * 16), (1, b"")])
def test_an_impossible_identity_cannot_be_built(num_tokens: int, digest: bytes) -> None:
    with pytest.raises(ValueError, match="must"):
        PromptIdentity(num_tokens, digest)


def test_one_long_prompt_is_not_mistaken_for_its_beginning() -> None:
    long = list(range(5000))
    assert prompt_identity(long).digest != prompt_identity(long[:-1]).digest
