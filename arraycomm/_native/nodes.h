/* A step of the control channel between nodes, if all ranks show the same; as an object of Python.
 * _transports/mpi/nodes.py has the messages, and makes the steps in which something is unusual. */

#ifndef ARRAYCOMM_NODES_H
#define ARRAYCOMM_NODES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct Nodes Nodes;

extern PyObject *nodes_type;

/* Say how much of its payload this rank shows in a step that it is about to post. */
void announce(Nodes *self, int64_t step, Py_ssize_t nbytes);

/* Take a posted step further, for at most this many nanoseconds and without the GIL. False if it is not over: Python calls
 * `advance` then, until it is, or is left to Python since ranks show different things. */
bool exchange_nodes(Nodes *self, int64_t step, Py_ssize_t nbytes, int64_t nanoseconds);

/* Whether all ranks were found to show the same in a step that is complete. Others' slots may then lack the header. */
bool nodes_alike(const Nodes *self, int64_t step);

/* Add the type to the module; -1 if that fails. */
int add_nodes(PyObject *module);

#endif
