"""The shallow-water solver of the documents: the same on any number of ranks, and a picture of it."""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.launched import Report
from tests.support.launcher import needs_mpiexec, run_python

pytest.importorskip("jax")
pytest.importorskip("optax")
waters = pytest.importorskip("tests.docs.shallow_waters")

DOCS = Path(__file__).parents[2] / "docs"


@lru_cache
def _finished() -> tuple[Report, bytes]:
    with TemporaryDirectory() as directory:
        job = run_python("-m", "tests.docs.shallow_waters", directory, ranks=4)
        picture = Path(directory) / "eddies.png"
        return Report(job, 4), picture.read_bytes() if picture.exists() else b""


def pixels_of(png: bytes) -> tuple[int, int, bytes]:
    """Return the width, the height and the pixels of a picture with one chunk of data."""
    width, height = (int.from_bytes(png[at : at + 4]) for at in (16, 20))
    data = png.index(b"IDAT")
    return width, height, zlib.decompress(png[data + 4 : -16])


@needs_mpiexec
@pytest.mark.at_night
@pytest.mark.parametrize("check", [check.__name__ for check in waters.CHECKS])
def test_on_four_ranks(check: str) -> None:
    report, _ = _finished()
    report.assert_passed(check)
    report.assert_ended_well()


@needs_mpiexec
@pytest.mark.at_night
def test_the_program_says_what_it_conserves_and_draws_the_whole_basin() -> None:
    report, png = _finished()
    lines = re.findall(
        r"day (\S+): mass changed by (\S+), energy by (\S+); \d+ steps/s\n", report.job.stdout
    )
    assert [float(day) for day, *_ in lines] == [0.01, 0.02]
    for _, mass, energy in lines:
        assert abs(float(mass)) < 1e-13
        assert -1e-4 < float(energy) < 0
    width, height, pixels = pixels_of(png)
    assert (width, height, len(pixels)) == (17, 17, 17 * (1 + 3 * 17))
    assert len(set(pixels)) > 100


def test_the_picture_of_the_documents_is_one_of_the_program() -> None:
    width, height, pixels = pixels_of((DOCS / "shallow-water.png").read_bytes())
    assert len(pixels) == height * (1 + 3 * width)
