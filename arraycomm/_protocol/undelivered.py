"""`UndeliveredError`: the ranks are done with one another, but one does not take its result."""

from __future__ import annotations

from arraycomm._errors import name_operation, text_of


class UndeliveredError(Exception):
    """The ranks are done with one another, but this one's framework does not take its result."""

    def __init__(self, error: Exception) -> None:
        super().__init__(text_of(error))
        self.error = error

    def name(self, operation: str) -> None:
        """Say in the error which operation raised it."""
        name_operation(self.error, operation)
        named = "operation" in vars(self.error) or str(self).startswith(f"{operation}: ")
        if not named:
            # Of a framework's, a function of the user's, or an object that cannot be unpickled here.
            self.error.add_note(f"raised in {operation}")
            vars(self.error)["operation"] = operation
