/* Small reductions by the control channel's slots, as objects of Python. */

#ifndef ARRAYCOMM_EXCHANGE_H
#define ARRAYCOMM_EXCHANGE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Add the types to the module; -1 if that fails. */
int add_exchange(PyObject *module);

#endif
