/* The end of a process after Python's own: what needs the status, which only exit() is told. */

#ifndef ARRAYCOMM_ENDING_H
#define ARRAYCOMM_ENDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Add `at_exit` to the module, where the C library tells handlers the status; -1 if that fails. */
int add_ending(PyObject *module);

#endif
