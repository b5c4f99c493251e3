"""Whether the ranks take the same step: what it depends on, compared before it changes anything.

Gradients are reduced, and so the same. The hyperparameters, the parameters and the optimizer's
state are each rank's own. Digests of them travel in free words of the header of a reduction, so
that they cost no message: of the hyperparameters with every step, of the parameters and the state
with the first and with every N-th. Only if digests differ do the ranks tell one another what they
have.
"""

from __future__ import annotations

from cmath import isnan
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Self, TypeAlias

from arraycomm._callsite import call_site
from arraycomm._errors import MismatchError
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import digest
from arraycomm._training.comparison.differences import Difference, Item, array_item, find_difference
from arraycomm._transports.base import Steps

DEFAULT_STEPS: Final = 100
# What the names of a module's buffers begin with.
BUFFER: Final = "buffer "
_NAME: Final = "DistributedOptimizer"
_PRIVATE: Final = (
    " What else is meant to differ, such as a path or scratch memory, belongs under a key of a "
    "torch optimizer, an attribute or a variable that begins with an underscore: these are not "
    "compared; verify_every=0 compares nothing"
)
# The words of a header, behind its length: of the settings, of the arrays (0: not shown), and the
# steps since these were.
_SETTINGS, _ARRAYS, _AGE = range(1, 4)
# The low bits of the word of the arrays: whether they were compared before, and which frameworks
# have them.
_BEFORE, _FRAMEWORKS, _LOW = 1, 0xFFFE, 0xFFFF
# In place of NaN.
_NAN: Final = 0.12345
# Trees whose ages are kept.
_MOST_TREES: Final = 64

Arrays: TypeAlias = Iterable[tuple[str, Any]]
# Returns what a rank shows in a call, given what is reduced; see `Verification.look`.
Shows: TypeAlias = Callable[..., "Look | None"]


def nothing_shown(*_: object, **__: object) -> None:
    """Show nothing: the call depends on what is reduced alone."""


class Inputs(NamedTuple):
    """What a step depends on, on this rank."""

    # Hyperparameters: numbers, text, None, and tuples of these.
    settings: Sequence[tuple[str, Any]]
    parameters: Callable[[], Arrays]
    state: Callable[[], Arrays] = tuple
    # Settings that never change: the same tuple in each step.
    constants: tuple[tuple[str, Any], ...] = ()
    # What changes with every step.
    counts: Sequence[tuple[str, Any]] = ()

    def taken(self) -> list[tuple[str, Any]]:
        """Return what a rank without data takes over from the others."""
        return [*self.settings, *self.counts]


class Look:
    """What this rank shows in one call; `words` are those of its header."""

    def __init__(
        self, owner: Verification, inputs: Inputs, reduced: object, *, stepping: bool, due: bool
    ) -> None:
        self._owner, self._reduced, self._stepping = owner, reduced, stepping
        self._site = call_site()
        shows = stepping and owner.alike
        # In this order, since others follow from the first.
        self._settings = (inputs.constants, inputs.settings, inputs.counts) if shows else ()
        self._arrays = _arrays_of(inputs, alike=owner.alike) if due else {}
        self._items = [_item(name, array) for name, array in self._arrays.items()]
        if due and owner.alike:
            # First, since others may follow from these; also if there are no arrays here, but on
            # other ranks.
            self._items[:0] = _setting_items(inputs.constants)
        shown = 0
        if self._items:
            # However many arrays of each: a rank may have one more.
            frameworks = {type(x).__module__.partition(".")[0] for x in self._arrays.values()}
            shown = digest([item[:3] for item in self._items]) & ~_LOW
            shown |= digest(owner.framework, *sorted(frameworks)) & _FRAMEWORKS
            shown = (shown or ~_LOW) | owner.was_compared(reduced)
        self.words = (owner.digest(inputs) if shows else 0, shown, owner.age_of(reduced))

    def compared(self, *, settings: bool) -> tuple[str, list[Item], dict[str, Any]]:
        """Return where it was taken, and the settings or else the arrays in it."""
        items = [item for part in self._settings for item in _setting_items(part)]
        return self._site, items if settings else self._items, self._arrays

    def note(self, rows: Sequence[Sequence[int]]) -> None:
        """Note what all ranks have shown, which is the same."""
        if any(row[_ARRAYS] for row in rows):
            self._owner.note_compared(self._reduced)
        elif self._stepping:
            self._owner.note_step(self._reduced, max(row[_AGE] for row in rows))


def _item(name: str, array: Any) -> Item:
    try:
        return array_item(name, array)
    except (TypeError, BufferError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} cannot be compared between ranks: {error}.{_ways_out(name)}"
        ) from error


def _setting_items(settings: Iterable[tuple[str, Any]]) -> list[Item]:
    return [Item(name, "", digest(value), repr(value)) for name, value in settings]


def _arrays_of(inputs: Inputs, *, alike: bool) -> dict[str, Any]:
    """Return a step's arrays to compare: of several frameworks only the parameters, by order."""
    if alike:
        return {**dict(inputs.parameters()), **dict(inputs.state())}
    return {f"parameter {n}": array for n, (_, array) in enumerate(inputs.parameters())}


def compare(group: Group, agreement: Agreement, look: Look | None) -> Steps:
    """Raise the same error on all ranks if they show different things; a rank may show nothing."""
    rows = agreement.all_words()
    settings = len({row[_SETTINGS] for row in rows if row[1:]} - {0}) > 1
    if settings or _arrays_differ(rows):
        mine = (call_site(), [], {}) if look is None else look.compared(settings=settings)
        found = yield from find_difference(group.control, *mine)
        group.control.ended = True
        raise MismatchError(_message(found, settings=settings))
    if look is not None:
        look.note(rows)


def _arrays_differ(rows: Sequence[Sequence[int]]) -> bool:
    """Return whether arrays differ; frameworks round differently, so several are compared once."""
    shown = {row[_ARRAYS] for row in rows if row[1:]} - {0}
    if len({word & ~_LOW for word in shown}) < 2:
        return False
    of_one = len({word & _FRAMEWORKS for word in shown}) == 1
    return of_one or not all(word & _BEFORE for word in shown)


def _message(found: Difference, *, settings: bool) -> str:
    begin = (
        f"{_NAME}: the ranks would not take the same step: {found.name} is not the same on all "
        f"ranks: {found.said}. "
    )
    if settings or not found.is_array:
        return begin + (
            "Hyperparameters and schedules must be the same on every rank: compute what decides "
            "them from values that are, such as mean_metrics, and load a state on every rank."
            f"{_PRIVATE}"
        )
    if not found.same_kind:
        return begin + (
            "Every rank must have the same parameters and the same state, in the same order; if "
            f"module= is passed, names prove that of torch's.{_ways_out(found.name)}"
        )
    if found.reordered:
        return begin + (
            "The ranks have the same parameters in another order; list them in one order on every "
            "rank, for example sorted by name, or pass module=, which gives torch's their names: "
            "Python orders a set of names differently in each process"
        )
    return f"{begin}{found.differing} of {found.total} arrays differ.{_ways_out(found.name)}"


def _ways_out(name: str) -> str:
    """Return how an array becomes the same on all ranks, or is left out."""
    if name.startswith(BUFFER):
        buffer = name.removeprefix(BUFFER).partition(",")[0]
        return (
            " Buffers are not reduced. Call arraycomm.synchronize(module) before the first step "
            "and after a change on one rank; for running statistics also "
            "convert_sync_batchnorm(module), since those of other batch norms are of each rank's "
            "own batches. Or leave a buffer out by name: "
            f"module._ddp_params_and_buffers_to_ignore = [{buffer!r}]"
        )
    return (
        " Before the first step, also if Horovod's broadcast came after it, call "
        "arraycomm.synchronize on the parameters and the optimizer on every rank; later, change "
        "parameters and state on all ranks alike, with random numbers of the same seeds, or call "
        "it after a change on one. Leave parameters that are meant to differ, such as an adapter "
        f"of each rank's own, to another optimizer, which is not distributed.{_PRIVATE}"
    )


class Verification:
    """What one optimizer's ranks compare, and when; `every` 0 compares nothing.

    Only if all ranks' optimizers are `alike`, of one framework, have they names in common.
    """

    def __init__(self, every: int, framework: str, *, alike: bool) -> None:
        self.every, self.framework, self.alike = every, framework, alike
        # By what is reduced, since an optimizer may update several trees in turns: the steps since
        # its arrays were compared, and how often they were.
        self._trees: dict[object, tuple[int, int]] = {}
        self._constants: tuple[Any, int] = None, 0
        self._last: tuple[Any, int] = None, 0

    def copy(self) -> Self:
        """Return what the ranks of a copy of the optimizer compare."""
        made = type(self)(self.every, self.framework, alike=self.alike)
        made._trees = dict(self._trees)
        return made

    def restart(self) -> None:
        """Compare the arrays in the next step: they are others."""
        self._trees.clear()

    def hasten(self) -> None:
        """Have all ranks compare their arrays after the next step: this rank's may be others."""
        for reduced, (age, times) in self._trees.items():
            self._trees[reduced] = max(age, self.every - 1), times

    def age_of(self, reduced: object) -> int:
        """Return the steps since the arrays were compared; if they never were, `every`."""
        return self._trees.get(reduced, (self.every, 0))[0]

    def was_compared(self, reduced: object) -> bool:
        """Return whether the arrays were compared before."""
        return reduced in self._trees and self._trees[reduced][1] > 0

    def note_compared(self, reduced: object) -> None:
        """Note that the arrays are the same.

        Trees of one structure that are updated in turns look alike. So the next step compares as
        well after the first time, and every other time one step fewer lies between: each of two
        trees has its turn.
        """
        _, times = self._trees.get(reduced, (0, 0))
        if len(self._trees) >= _MOST_TREES:
            self.restart()
        self._trees[reduced] = (1 + times % 2 if times else self.every), times + 1

    def note_step(self, reduced: object, age: int) -> None:
        """Note a step in which no rank has shown its arrays."""
        _, times = self._trees.get(reduced, (0, 0))
        self._trees[reduced] = age + 1, times

    def look(
        self,
        inputs: Callable[[], Inputs] | None,
        reduced: object = None,
        *,
        stepping: bool = True,
        arrays: bool = True,
    ) -> Look | None:
        """Return what this rank shows in a call, or None for nothing.

        `reduced` says what is reduced, if that is not always the same. In a call that is not yet
        the step, the settings may still change.
        """
        if not self.every or inputs is None:
            return None
        due = arrays and self.age_of(reduced) >= self.every
        if not (stepping or due):
            return None
        return Look(self, inputs(), reduced, stepping=stepping, due=due)

    def digest(self, inputs: Inputs) -> int:
        """Return a digest of settings, constants and counts; that of the last settings is kept."""
        if self._constants[0] is not inputs.constants:
            self._constants, self._last = (inputs.constants, digest(inputs.constants)), (None, 0)
        if self._last[0] is not inputs.settings and self._last[0] != inputs.settings:
            self._last = inputs.settings, digest(self._constants[1], *inputs.settings)
        # A hash of numbers is the same in every process, unless one is NaN.
        numbers = [_NAN if isnan(number) else number for _, number in inputs.counts]
        return hash((self._last[1], *numbers)) or 1


def is_private(key: Any) -> bool:
    """Return whether a name is of no concern to other ranks.

    What a value of such a name does to an update is seen in the parameters.
    """
    return str(key).startswith("_")


def plain(value: Any) -> bool:
    """Return whether a value is a number, text or None, or a tuple or list of these."""
    if isinstance(value, tuple | list):
        return all(map(plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str)


def scalar(value: Any) -> Any:
    """Return an array without dimensions in host memory as a number; all else as it is."""
    is_number = not str(getattr(value, "dtype", "")).startswith("key<")
    if getattr(value, "shape", None) == () and hasattr(value, "item") and is_number:
        on_host = not (
            getattr(value, "is_cuda", False) or type(value).__module__.startswith("cupy")
        )
        return value.item() if on_host else value
    return value
