"""Imported before what needs Hypothesis: says how to install it if it is missing."""

try:
    import hypothesis  # noqa: F401
    import tblib  # noqa: F401
except ImportError as error:
    raise ImportError(
        "arraycomm.testing.given, its strategies and its conformance suite need Hypothesis and "
        f"tblib ({error}); install them with: pip install 'arraycomm[testing]'"
    ) from error
