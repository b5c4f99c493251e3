/* See turns.h. */

#include "turns.h"

#include <stddef.h>
#include <structmember.h>

PyObject *counts_type, *turn_type;

bool take_turn(Turn *turn)
{
    return !atomic_exchange_explicit(&turn->taken, true, memory_order_acquire);
}

void leave_turn(Turn *turn)
{
    atomic_store_explicit(&turn->taken, false, memory_order_release);
}

static PyMemberDef counts_members[] = {
    {"step", T_LONGLONG, offsetof(Counts, step), 0, PyDoc_STR("The number of the last step that this rank has posted.")},
    {"completed", T_LONGLONG, offsetof(Counts, completed), 0, PyDoc_STR("The step of the last call that this rank has completed.")},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot counts_slots[] = {{Py_tp_members, counts_members}, {0, NULL}};

static PyType_Spec counts_spec = {
    .name = "arraycomm._native.compiled.Counts",
    .basicsize = sizeof(Counts),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = counts_slots,
};

static PyObject *turn_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *refuse = Py_None;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "|O", &refuse)) return NULL;
    Turn *self = (Turn *)PyType_GenericAlloc(type, 0);
    if (self) self->refuse = Py_NewRef(refuse);
    return (PyObject *)self;
}

static void turn_dealloc(Turn *self)
{
    PyTypeObject *const type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->refuse);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *turn_enter(Turn *self, PyObject *none)
{
    (void)none;
    return take_turn(self) ? Py_NewRef((PyObject *)self) : PyObject_CallNoArgs(self->refuse);
}

static PyObject *turn_exit(Turn *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)args, (void)nargs;
    leave_turn(self);
    Py_RETURN_NONE;
}

static PyObject *turn_acquire(Turn *self, PyObject *blocking)
{
    if (blocking != Py_False) return PyErr_Format(PyExc_ValueError, "nobody waits for a turn: acquire(False)");
    return PyBool_FromLong(take_turn(self));
}

static PyObject *turn_release(Turn *self, PyObject *none)
{
    (void)none;
    leave_turn(self);
    Py_RETURN_NONE;
}

static PyObject *turn_locked(Turn *self, PyObject *none)
{
    (void)none;
    return PyBool_FromLong(atomic_load(&self->taken));
}

static PyMethodDef turn_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))turn_acquire, METH_O,
     PyDoc_STR("acquire(False): take the turn, and return whether it was free.")},
    {"release", (PyCFunction)(void (*)(void))turn_release, METH_NOARGS, PyDoc_STR("release(): give it back.")},
    {"__enter__", (PyCFunction)(void (*)(void))turn_enter, METH_NOARGS, PyDoc_STR("Take the turn, or call `refuse`.")},
    {"__exit__", (PyCFunction)(void (*)(void))turn_exit, METH_FASTCALL, PyDoc_STR("Give it back.")},
    {"locked", (PyCFunction)(void (*)(void))turn_locked, METH_NOARGS, PyDoc_STR("locked(): return whether somebody has it.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot turn_slots[] = {{Py_tp_new, turn_new}, {Py_tp_dealloc, turn_dealloc}, {Py_tp_methods, turn_methods}, {0, NULL}};

static PyType_Spec turn_spec = {
    .name = "arraycomm._native.compiled.Turn",
    .basicsize = sizeof(Turn),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = turn_slots,
};

int add_type(PyObject *module, PyType_Spec *spec, const char *name, PyObject **type)
{
    *type = PyType_FromModuleAndSpec(module, spec, NULL);
    return *type == NULL ? -1 : PyModule_AddObjectRef(module, name, *type);
}

int add_turns(PyObject *module)
{
    return add_type(module, &counts_spec, "Counts", &counts_type) || add_type(module, &turn_spec, "Turn", &turn_type) ? -1 : 0;
}
