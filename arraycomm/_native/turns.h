/* What calls of one communicator share, so that they can be made with and without the GIL: as objects of Python. */

#ifndef ARRAYCOMM_TURNS_H
#define ARRAYCOMM_TURNS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdbool.h>

/* What lies between is done by one thread at a time; with the GIL it is anyway. */
#ifndef Py_GIL_DISABLED
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }
#endif

/* The base of control channels. Only who has the turn changes it. */
typedef struct {
    PyObject ob_base;
    long long step, completed; /* that this rank has posted, and whose call it has completed */
} Counts;

/* A lock that nobody waits for. No interrupt comes between its parts in a `with` block: they are not Python's. */
typedef struct {
    PyObject ob_base;
    atomic_bool taken;
    PyObject *refuse; /* what a `with` block calls if somebody has it, to raise */
} Turn;

extern PyObject *counts_type, *turn_type;

/* Take the turn; false if somebody has it. */
bool take_turn(Turn *turn);
void leave_turn(Turn *turn);

/* Make a type, of which the caller keeps a reference, and add it to the module; -1 if that fails. */
int add_type(PyObject *module, PyType_Spec *spec, const char *name, PyObject **type);

/* Add the types to the module; -1 if that fails. */
int add_turns(PyObject *module);

#endif
