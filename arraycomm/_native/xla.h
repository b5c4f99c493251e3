/* Reductions of programs that XLA has compiled: made without the GIL and without Python, if all ranks are here. */

#ifndef ARRAYCOMM_XLA_H
#define ARRAYCOMM_XLA_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Add the type and the handler to the module; -1 if that fails. */
int add_xla(PyObject *module);

#endif
