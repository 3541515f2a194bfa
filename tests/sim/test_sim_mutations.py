"""Each guard that `make mutants` removes must still be there, once: a mutation that changes nothing shows nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from mutants import apply, hunt  # noqa: E402
from mutations import MUTATIONS, Mutation  # noqa: E402

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_mutation_fits_the_source(mutation: Mutation) -> None:
    text = (ROOT / "src" / "kvpush" / mutation.path).read_text()
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old


def test_mutations_have_names_of_their_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 16


def test_a_text_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kvpush").mkdir()
    (tmp_path / "kvpush" / "part.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"part.py: the text of 'no guard' is there 0 times"):
        apply(Mutation("no guard", "part.py", "y = 1", "y = 2"), tmp_path)


def test_a_mutant_is_found_in_a_copy_and_the_source_stays_as_it_is() -> None:
    mutation = next(mutation for mutation in MUTATIONS if mutation.name == "do not wait for the forward")
    path = ROOT / "src" / "kvpush" / mutation.path
    before = path.read_bytes()
    verdict = hunt(mutation, worlds=100, jobs=1, first=0)
    assert verdict.worlds is not None
    assert "wrong KV" in verdict.rule
    assert path.read_bytes() == before
