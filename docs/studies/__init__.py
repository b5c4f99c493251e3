"""Studies: each measures or computes something and writes a page of the documentation.

Run one from the root of the repository, as `python -m docs.studies.scaling`.
"""
