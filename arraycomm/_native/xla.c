/* See xla.h.
 *
 * XLA calls the handler with a token and x, and gets the result and a token. One attribute is the address of a
 * ProgramCall, which the program keeps alive. What follows of XLA's foreign function interface, version 0, is what a
 * handler with buffers and one number needs: https://github.com/openxla/xla/tree/main/xla/ffi/api. */

#include "xla.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#include "exchange.h"
#include "turns.h"

/* ---- the interface of XLA ----------------------------------------------------------------------- */

enum { METADATA = 1, SCALAR = 3, UINT64 = 9, INTERNAL = 13 };

typedef struct Extension {
    size_t struct_size;
    int type;
    struct Extension *next;
} Extension;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    int major, minor;
} Version;

typedef struct {
    Extension base;
    struct {
        size_t struct_size;
        Version version;
    } *metadata;
} MetadataExtension;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    const char *message;
    int code;
} ErrorArguments;

typedef struct XlaError XlaError;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    Version version;
    const void *internal;
    XlaError *(*create_error)(ErrorArguments *);
} Interface;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    int dtype;
    void *data;
} Buffer;

typedef struct {
    int dtype;
    uint64_t *value;
} Scalar;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    int64_t size;
    int *types;
    Buffer **buffers;
} Buffers;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    int64_t size;
    int *types;
    void *names;
    Scalar **scalars;
} Attributes;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    const Interface *interface;
    void *context;
    int stage;
    Buffers arguments, results;
    Attributes attributes;
} CallFrame;

static XlaError *error_of(const CallFrame *frame, const char *message)
{
    ErrorArguments about = {sizeof(ErrorArguments), NULL, message, INTERNAL};
    return frame->interface->create_error(&about);
}

/* ---- one call of a program ---------------------------------------------------------------------- */

typedef struct {
    PyObject ob_base;
    PyObject *in_python; /* gets the exchange of a call that has begun or None, and the memory of x and of the result */
    Py_ssize_t nbytes;
    Exchange *exchange; /* NULL: Python makes the call. Read and written with `held` */
    atomic_flag held;
} ProgramCall;

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *in_python;
    Py_ssize_t nbytes;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "On", &in_python, &nbytes)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    ProgramCall *self = (ProgramCall *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->in_python = Py_NewRef(in_python);
    self->nbytes = nbytes;
    atomic_flag_clear(&self->held);
    return (PyObject *)self;
}

/* Others hold it for a moment alone, and without the GIL or without giving it up. */
static void hold(ProgramCall *self)
{
    while (atomic_flag_test_and_set_explicit(&self->held, memory_order_acquire)) sched_yield();
}

static void let_go(ProgramCall *self)
{
    atomic_flag_clear_explicit(&self->held, memory_order_release);
}

static void set_exchange(ProgramCall *self, PyObject *exchange)
{
    hold(self);
    Exchange *const before = self->exchange;
    self->exchange = (Exchange *)exchange;
    let_go(self);
    if (before == NULL) return;
    await_users(before);
    Py_DECREF((PyObject *)before);
}

static int call_traverse(ProgramCall *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->in_python);
    Py_VISIT((PyObject *)self->exchange);
    return 0;
}

static int call_clear(ProgramCall *self)
{
    Py_CLEAR(self->in_python);
    set_exchange(self, NULL);
    return 0;
}

static void call_dealloc(ProgramCall *self)
{
    PyTypeObject *const type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    call_clear(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *call_use(ProgramCall *self, PyObject *exchange)
{
    if ((PyObject *)Py_TYPE(exchange) != exchange_type)
        return PyErr_Format(PyExc_TypeError, "a program's calls are made by an Exchange");
    if ((PyObject *)self->exchange != exchange) set_exchange(self, Py_NewRef(exchange));
    Py_RETURN_NONE;
}

static PyObject *call_address(ProgramCall *self, PyObject *none)
{
    (void)none;
    return PyLong_FromVoidPtr(self);
}

static PyMethodDef call_methods[] = {
    {"use", (PyCFunction)(void (*)(void))call_use, METH_O,
     PyDoc_STR("use(exchange): have further calls made by an exchange, of which no other may use it.")},
    {"address", (PyCFunction)(void (*)(void))call_address, METH_NOARGS,
     PyDoc_STR("address(): return what a program passes to the handler.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot call_slots[] = {
    {Py_tp_new, call_new},
    {Py_tp_dealloc, call_dealloc},
    {Py_tp_traverse, call_traverse},
    {Py_tp_clear, call_clear},
    {Py_tp_methods, call_methods},
    {0, NULL},
};

static PyType_Spec call_spec = {
    .name = "arraycomm._native.compiled.ProgramCall",
    .basicsize = sizeof(ProgramCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = call_slots,
};

/* ---- the handler -------------------------------------------------------------------------------- */

/* Return the error that Python has raised as one of XLA's, by its text. */
static XlaError *raised(const CallFrame *frame)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyObject *const text = PyObject_Str(error);
    const char *const message = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    XlaError *const made = error_of(frame, message ? message : "an error without a text");
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return made;
}

/* Have Python make a call, or take one to its end that has begun. */
static XlaError *call_python(ProgramCall *self, const CallFrame *frame, Exchange *begun, void *x, void *out)
{
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject *const exchange = Py_NewRef(begun ? (PyObject *)begun : Py_None);
    if (begun) leave_exchange(begun);
    Py_INCREF((PyObject *)self);
    PyObject *const from = PyMemoryView_FromMemory(x, self->nbytes, PyBUF_READ);
    PyObject *const to = from ? PyMemoryView_FromMemory(out, self->nbytes, PyBUF_WRITE) : NULL;
    PyObject *const done = to ? PyObject_CallFunctionObjArgs(self->in_python, exchange, from, to, NULL) : NULL;
    XlaError *const error = done ? NULL : raised(frame);
    if (begun) end_exchange(begun);
    Py_XDECREF(done);
    Py_XDECREF(to);
    Py_XDECREF(from);
    Py_DECREF((PyObject *)self);
    Py_DECREF(exchange);
    PyGILState_Release(state);
    return error;
}

/* Tell XLA for which version of its interface this is. */
static XlaError *tell_version(const MetadataExtension *asked)
{
    asked->metadata->version.major = 0;
    asked->metadata->version.minor = 1;
    return NULL;
}

static XlaError *handle(CallFrame *frame)
{
    if (frame->extensions && frame->extensions->type == METADATA)
        return tell_version((MetadataExtension *)frame->extensions);
    const Attributes *const given = &frame->attributes;
    if (frame->arguments.size != 2 || frame->results.size != 2 || given->size != 1 || given->types[0] != SCALAR ||
        given->scalars[0]->dtype != UINT64)
        return error_of(frame, "arraycomm: the program passes something else than a token and an array");
    ProgramCall *const self = (ProgramCall *)(uintptr_t)*given->scalars[0]->value;
    void *const x = frame->arguments.buffers[1]->data, *const out = frame->results.buffers[0]->data;
    hold(self);
    Exchange *const exchange = self->exchange;
    if (exchange) enter_exchange(exchange);
    let_go(self);
    const Attempt made = exchange ? try_exchange(exchange, x, out) : REFUSED;
    if (made == BEGUN) return call_python(self, frame, exchange, x, out);
    if (exchange) leave_exchange(exchange);
    return made == REDUCED ? NULL : call_python(self, frame, NULL, x, out);
}

int add_xla(PyObject *module)
{
    PyObject *type;
    if (add_type(module, &call_spec, "ProgramCall", &type)) return -1;
    Py_DECREF(type);
    union {
        XlaError *(*function)(CallFrame *);
        void *address;
    } handler = {handle};
    PyObject *const capsule = PyCapsule_New(handler.address, "xla._CUSTOM_CALL_TARGET", NULL);
    if (capsule == NULL || PyModule_AddObjectRef(module, "xla_handler", capsule)) return -1;
    Py_DECREF(capsule);
    return 0;
}
