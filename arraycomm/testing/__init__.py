"""Tools for the tests of programs that communicate."""

from arraycomm.testing._run import run

__all__ = ["run"]
