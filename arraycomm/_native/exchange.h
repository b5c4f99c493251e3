/* Small reductions by the control channel's slots, as objects of Python. */

#ifndef ARRAYCOMM_EXCHANGE_H
#define ARRAYCOMM_EXCHANGE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct Exchange Exchange;

extern PyObject *exchange_type;

/* What became of a reduction without the GIL: it was made; nothing has happened, and Python is to make it; or it has
 * begun, its caller has the turn, and Python is to go on by `Exchange.go_on`. */
typedef enum { REDUCED, REFUSED, BEGUN } Attempt;

/* Reduce memory of the exchange's size without the GIL, between `enter_exchange` and `leave_exchange`. */
Attempt try_exchange(Exchange *self, const void *x, void *out);
void enter_exchange(Exchange *self);
void leave_exchange(Exchange *self);

/* Give back the turn of a reduction that had begun. */
void end_exchange(Exchange *self);

/* With the GIL: wait for those who look at it without. */
void await_users(Exchange *self);

/* Add the types to the module; -1 if that fails. */
int add_exchange(PyObject *module);

#endif
