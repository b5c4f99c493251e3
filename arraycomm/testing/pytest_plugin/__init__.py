"""The pytest plugin: tests on several ranks, and one report of them.

pytest itself imports `arraycomm_pytest`, which imports the modules of this package when they are
needed.
"""
