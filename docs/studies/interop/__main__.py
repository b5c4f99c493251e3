"""Write docs/interop.md; needs NumPy, PyTorch, JAX and array-api-strict."""

from __future__ import annotations

from docs.studies.interop.page import PAGE, written

PAGE.write_text(written(), encoding="utf-8")
