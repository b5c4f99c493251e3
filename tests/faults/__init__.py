"""Programs in which one rank does something else than the others, and what must come of it.

`python -m tests.faults --help` says how to run many of them; `docs/evidence/faults.md` what came of that.
"""
