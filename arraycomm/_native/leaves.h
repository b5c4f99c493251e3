/* The leaves of a tree on their way into shared memory and out of it, as an object of Python. */

#ifndef ARRAYCOMM_LEAVES_H
#define ARRAYCOMM_LEAVES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Add the function that makes one to the module; -1 if that fails. */
int add_leaves(PyObject *module);

#endif
