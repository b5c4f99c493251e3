"""The order of the programs that make calls: each takes the last one's token, and leaves its own.

JAX passes the tokens of ordered effects on in Python, at every dispatch, which takes many times
longer than a small program. Here the token lies in one array that is among the constants of all
these programs. So JAX can dispatch them as it does programs without effects; what puts their
results together puts the new token in place.

JAX makes a `ValueError` of what such a program raises while it is being dispatched. So a callback
keeps its error here, the rest of the program makes no calls, and the error is raised when the token
is put in place.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax._src import pjit
from jax._src.core import Token
from jax._src.dispatch import RuntimeTokenSet, runtime_tokens
from jax._src.interpreters import mlir, pxla
from jax._src.tree_util import dispatch_registry

from arraycomm.adapters.jax._tracing import refuse_repetition

# What JAX keeps to dispatch a program without Python. One that keeps something else dispatches as
# it likes.
_FIELDS: Final = (
    "xla_executable",
    "out_pytree_def",
    "in_shardings",
    "out_shardings",
    "out_avals",
    "out_committed",
    "kept_var_bitvec",
    "in_device_local_layouts",
    "const_args",
)
# A loop of an optimized program. XLA notes how many turns it has if that depends on nothing.
_LOOP: Final = re.compile("^.* = .* while\\((?!.*known_trip_count).*$", re.MULTILINE)


class DelaysErrors:
    """A callback of programs; the token takes its errors if it may: see `ProgramToken.take`."""

    delays_errors = False


class ProgramToken:
    """The token of an effect: where JAX looks for it, and in the array that programs take.

    The array stays on the device of the first program, since some versions of XLA cannot copy a
    token. Programs on other devices wait for the one before them, and the next one waits for them.
    """

    def __init__(self, effect: Any) -> None:
        self._effect = effect
        self._ready: Any = None
        # The threads that have dispatched programs, by the system's numbers, which XLA's threads do
        # not get again.
        self._threads: dict[int, threading.Thread] = {}
        # What the programs have raised that these threads are dispatching.
        self._errors: dict[int, BaseException] = {}
        # Of shape (0,), in the memory of the last program's token.
        self.array: Any = None

    def is_on(self, devices: Sequence[Any]) -> bool:
        """Return whether the array is on these devices, which are one."""
        return self.array is not None and list(self.array.sharding.device_set) == list(devices)

    def receive(self, array: Any) -> None:
        """Keep the token of a program on any device that was dispatched from Python."""
        (device,) = array.sharding.device_set
        if self.array is None:
            with jax.ensure_compile_time_eval():
                none = np.zeros(0, bool)
                self._ready, self.array = jax.device_put(none, device), jax.device_put(none, device)
        if self.is_on([device]):
            self.put(array)
        else:
            array.block_until_ready()
            self.put(self._ready)

    def put(self, array: Any) -> None:
        """Have the next program take this one's token; raise this one's error if there is one."""
        thread = threading.get_native_id()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread()
        self._replace(array)
        runtime_tokens.current_tokens[self._effect] = Token(self.array)
        if thread in self._errors:
            # A program that has been dispatched may still run: it makes no calls while the error is
            # here.
            self.array.block_until_ready()
            raise self._errors.pop(thread)

    def take(self, error: BaseException) -> bool:
        """Take the error of the callback's program if `put` is still to be called for it."""
        thread = self._dispatcher()
        # Programs run one after the other. One of which XLA's threads run a callback may have been
        # put here.
        here = thread == threading.get_native_id()
        if thread is None or not (here or self.array.is_ready()):
            return False
        self._errors[thread] = error
        return True

    def has_failed(self) -> bool:
        """Return whether the callback's program has raised; it then ends without further calls."""
        return bool(self._errors) and self._dispatcher() in self._errors

    def _dispatcher(self) -> int | None:
        """Return the thread that dispatched the callback's program; None if that is uncertain."""
        thread = threading.get_native_id()
        if thread in self._threads:
            return thread
        alive = [number for number, known in self._threads.items() if known.is_alive()]
        return alive[0] if len(alive) == 1 else None

    def clear(self) -> None:
        """Have the next program wait for nothing: what the last one has left is an error."""
        runtime_tokens.current_tokens.pop(self._effect, None)
        if self.array is not None:
            self._replace(self._ready)

    def _replace(self, array: Any) -> None:
        self.array._replace_with(array)

    def orders(self, executable: Any) -> bool:
        """Return whether a program has this effect alone, and is on the device of the array."""
        call = getattr(executable, "unsafe_call", None)
        return (
            isinstance(call, pxla.ExecuteReplicated)
            and call.ordered_effects == [self._effect]
            and not call.has_unordered_effects
            and self.is_on(executable.xla_executable.local_devices())
        )


def keep(effect: Any) -> ProgramToken:
    """Have JAX keep the token of an effect here, and dispatch programs with it as those without."""
    token = ProgramToken(effect)
    _keep_between_dispatches(token, effect)
    _refuse_without_token(effect)
    if getattr(pxla.MeshExecutableFastpathData, "_fields", None) == _FIELDS:
        _dispatch_without_python(token)
    return token


def _keep_between_dispatches(kept: ProgramToken, effect: Any) -> None:
    take, put = RuntimeTokenSet.get_token_input, RuntimeTokenSet.set_token_result

    def get_token_input(self: Any, eff: Any, devices: list[Any]) -> Any:
        if eff is effect:
            refuse_repetition("another compiled program that makes calls")
        if eff is effect and eff in self.current_tokens:
            if kept.is_on(devices):
                # JAX would copy it also to the device where it is.
                return self.current_tokens[eff]
            kept.array.block_until_ready()
            del self.current_tokens[eff]
        return take(self, eff, devices)

    def set_token_result(self: Any, eff: Any, token: Any) -> None:
        if eff is effect:
            kept.receive(vars(token)["_buf"])
        else:
            put(self, eff, token)

    RuntimeTokenSet.get_token_input = get_token_input  # type: ignore[method-assign]
    RuntimeTokenSet.set_token_result = set_token_result  # type: ignore[method-assign]


def _refuse_without_token(effect: Any) -> None:
    """Explain the error of a program whose calls have no token, since their effect is forgotten."""
    tokens: Any = mlir.TokenSet
    get, subset = tokens.get, tokens.subset

    def check(found: Any, wanted: Sequence[Any]) -> None:
        if effect in wanted and effect not in found.effects():
            raise TypeError(
                "a collective of arraycomm cannot be called inside a function whose effects are "
                "forgotten, as by the primitives of equinox and lineax: its order among the "
                "program's other calls would be open. Call it outside, or use what JAX has itself, "
                "such as jax.scipy.sparse.linalg.cg"
            )

    def get_checked(self: Any, eff: Any) -> Any:
        check(self, [eff])
        return get(self, eff)

    def subset_checked(self: Any, effects: Sequence[Any]) -> Any:
        check(self, effects)
        return subset(self, effects)

    tokens.get, tokens.subset = get_checked, subset_checked


class _WithToken:
    """The results of a program behind its token, as JAX takes them apart and puts them together."""

    def __init__(self, token: Any, results: Any) -> None:
        self.token, self.results = token, results


def _dispatch_without_python(token: ProgramToken) -> None:
    prepare = pjit._get_fastpath_data

    def put_together(_: None, parts: Any) -> Any:
        made, results = parts
        token.put(made)
        return results

    jax.tree_util.register_pytree_node(
        _WithToken, lambda made: ((made.token, made.results), None), put_together
    )

    def get_fastpath_data(executable: Any, tree: Any, args: Any, results: Any, *rest: Any) -> Any:
        if not token.orders(executable) or not _ends(executable):
            return prepare(executable, tree, args, results, *rest)
        data = prepare(_without_effects(executable), tree, args, results, *rest)
        if data is None:
            return None
        for callback in executable.unsafe_call.keepalive:
            if isinstance(callback, DelaysErrors):
                callback.delays_errors = True
        return _with_token(data, token.array, jax.tree.unflatten(tree, results))

    pjit._get_fastpath_data = get_fastpath_data  # type: ignore[assignment]


def _ends(executable: Any) -> bool:
    """Return whether a program ends whatever its calls return, also if they have failed."""
    return not any(
        _LOOP.search(part.to_string()) for part in executable.xla_executable.hlo_modules()
    )


def _without_effects(executable: Any) -> Any:
    twin, call = copy.copy(executable), copy.copy(executable.unsafe_call)
    call.ordered_effects, twin._unsafe_call = [], call
    return twin


def _with_token(data: Any, token: Any, results: Any) -> Any:
    """Put a token before the constants of a program that has just run, and before its results."""
    _, tree = dispatch_registry.flatten(_WithToken(token, results), None)
    return data._replace(
        out_pytree_def=tree,
        in_shardings=[token.sharding, *data.in_shardings],
        out_shardings=[token.sharding, *data.out_shardings],
        out_avals=[token.aval, *data.out_avals],
        out_committed=[token.committed, *data.out_committed],
        kept_var_bitvec=[True, *data.kept_var_bitvec],
        in_device_local_layouts=[None, *data.in_device_local_layouts],
        const_args=[token, *data.const_args],
    )
