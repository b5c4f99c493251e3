/* A call between devices, put on a stream by functions of CUDA's driver and of NCCL; as an object of Python. */

#ifndef ARRAYCOMM_DEVICE_H
#define ARRAYCOMM_DEVICE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Add the type to the module; -1 if that fails. */
int add_device(PyObject *module);

#endif
