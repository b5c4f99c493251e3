/* The leaves of a tree on their way into shared memory and out of it, as an object of Python. */

#ifndef ARRAYCOMM_LEAVES_H
#define ARRAYCOMM_LEAVES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

/* "dtype" as a string of Python, and whether an array has this one. */
extern PyObject *dtype_name;
bool has_dtype(PyObject *array, PyObject *dtype);

/* Add the function that makes one to the module; -1 if that fails. */
int add_leaves(PyObject *module);

#endif
