"""The laws on other libraries: the page is current, and the script still tries them."""

from __future__ import annotations

from docs.studies.peers import laws, page, runs
from tests.support.launcher import needs_mpiexec


def test_the_page_is_what_the_stored_results_give() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.written(page.stored())


def test_arraycomm_holds_every_law_behind_the_same_wrapper() -> None:
    found = page.stored()["arraycomm"]
    for law in (*laws.ANY_LIBRARY, *laws.OF_ARRAYCOMM):
        assert page._of_law(found["laws"][law]) == "holds", law
    for kind in laws.DISAGREEMENTS:
        words = page._of_disagreement(found["disagreements"][kind], kind)
        assert words == f"error on {'the others' if kind == 'leaves' else 'every rank'}", kind


@needs_mpiexec
def test_laws_are_tried_until_one_fails() -> None:
    tried = ("integers_commute", "every_dtype_has_its_ops")
    found = runs.try_laws("mpi4py", 3, tried)
    assert page._of_law(found["integers_commute"]) == "holds"
    assert "refused" in page._of_law(found["every_dtype_has_its_ops"])
    assert [law["ended"] for law in found.values()] == ["well", "well"]
