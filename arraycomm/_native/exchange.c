/* See exchange.h.
 *
 * An Exchange makes one small reduction, or the header of a larger one, again and again: it writes an array into this rank's slot, looks for
 * the other ranks' for a moment, and folds all into the result. Between nodes the slots of other nodes come in
 * messages. If that takes longer, it calls `await_others`
 * of Python, where the watchdog, interrupts and timeouts are, and if ranks call different things, `settle`.
 *
 * Whoever makes a step has the turn. */

#include "exchange.h"

#include <sched.h>

#include "folds.h"
#include "leaves.h"
#include "nodes.h"
#include "slots.h"
#include "turns.h"

/* Looks at the other ranks with the GIL, about five microseconds, if ranks are processes; and how long
 * they are looked for without it, on one node and on several. */
enum { LOOKS = 200, WAIT_NANOSECONDS = 100000, NODES_NANOSECONDS = 1000000 };
enum { MAX_DIMS = 8 };

typedef struct {
    PyObject ob_base;
    Py_buffer memory;
    Slots slots;
    PyObject *header, *dtype, *queue;
    PyObject *path; /* what goes on in Python; see _collectives/fast_path.py */
    Counts *control;
    Turn *turn;
    Nodes *nodes; /* NULL on one node */
    char *prefix;      /* the bytes of the header */
    const void **rows; /* where the ranks' payloads are, in even steps and in odd ones */
    Py_ssize_t nbytes, shape[MAX_DIMS];
    int ndim, fold, looks;
    int64_t started;
    long long calls;
    double seconds;
} Exchange;

static PyObject *exchange_type;

/* ---- making one -------------------------------------------------------------------------------- */

static int set_shape(Exchange *self, PyObject *shape)
{
    const Py_ssize_t ndim = PyTuple_Size(shape);
    if (ndim < 0) return -1;
    self->ndim = ndim > MAX_DIMS ? -1 : (int)ndim;
    for (int axis = 0; axis < self->ndim; ++axis) {
        self->shape[axis] = PyLong_AsSsize_t(PyTuple_GetItem(shape, axis));
        if (self->shape[axis] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* The slots and the parts of them that are used have to lie in the memory. */
static int set_slots(Exchange *self, PyObject *memory, int rank, int size, Py_ssize_t slot)
{
    Py_ssize_t header_bytes;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE)) return -1;
    if (PyBytes_AsStringAndSize(self->header, &self->prefix, &header_bytes)) return -1;
    if (size < 1 || rank < 0 || rank >= size || slot % 8 || (uintptr_t)self->memory.buf % 8 ||
        self->memory.len / 2 / size < slot || header_bytes != PAYLOAD - HEADER || self->nbytes < 0 ||
        slot < PAYLOAD + self->nbytes || self->fold < 0 || self->fold >= DTYPES * OPS ||
        (size_t)self->nbytes % fold_itemsize(self->fold)) {
        PyErr_SetString(PyExc_ValueError, "the slots are not as the control channel has them");
        return -1;
    }
    self->slots = (Slots){self->memory.buf, (size_t)slot, rank, size};
    self->rows = PyMem_Calloc(2 * (size_t)size, sizeof(void *));
    if (self->rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int step = 0; step < 2; ++step)
        for (int from = 0; from < size; ++from)
            self->rows[step * size + from] = slot_of(&self->slots, step, from) + PAYLOAD;
    return 0;
}

static PyObject *exchange_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"memory", "rank",  "size",    "slot",  "header", "nbytes", "fold", "dtype",
                            "shape",  "control", "queue", "turn",  "path",   "patient", "nodes", NULL};
    PyObject *memory, *shape, *turn, *header, *dtype, *control, *queue, *path, *nodes = Py_None;
    int rank, size, fold, patient;
    Py_ssize_t slot, nbytes;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OiinO!niOO!O!OO!Op|O", names, &memory, &rank, &size, &slot,
                                     &PyBytes_Type, &header, &nbytes, &fold, &dtype, &PyTuple_Type, &shape,
                                     counts_type, &control, &queue, turn_type, &turn, &path, &patient, &nodes))
        return NULL;
    if (nodes != Py_None && (PyObject *)Py_TYPE(nodes) != nodes_type) return PyErr_Format(PyExc_TypeError, "nodes must be Nodes");
    Exchange *self = (Exchange *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    self->header = Py_NewRef(header);
    self->dtype = Py_NewRef(dtype);
    self->control = (Counts *)Py_NewRef(control);
    self->turn = (Turn *)Py_NewRef(turn);
    self->queue = Py_NewRef(queue);
    self->path = Py_NewRef(path);
    if (nodes != Py_None) self->nodes = (Nodes *)Py_NewRef(nodes);
    self->nbytes = nbytes;
    self->fold = fold;
    self->looks = patient ? LOOKS : 1;
    if (set_shape(self, shape) || set_slots(self, memory, rank, size, slot)) Py_CLEAR(self);
    return (PyObject *)self;
}

static int exchange_traverse(Exchange *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->dtype);
    Py_VISIT((PyObject *)self->control);
    Py_VISIT((PyObject *)self->turn);
    Py_VISIT(self->queue);
    Py_VISIT(self->path);
    Py_VISIT((PyObject *)self->nodes);
    return 0;
}

static int exchange_clear(Exchange *self)
{
    Py_CLEAR(self->header);
    Py_CLEAR(self->dtype);
    Py_CLEAR(self->control);
    Py_CLEAR(self->turn);
    Py_CLEAR(self->queue);
    Py_CLEAR(self->path);
    Py_CLEAR(self->nodes);
    return 0;
}

static void exchange_dealloc(Exchange *self)
{
    PyTypeObject *const type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    exchange_clear(self);
    if (self->memory.obj) PyBuffer_Release(&self->memory);
    PyMem_Free(self->rows);
    PyObject_GC_Del(self);
    Py_DECREF((PyObject *)type);
}

/* ---- one call ---------------------------------------------------------------------------------- */

/* Write this rank's array and header into its slot, and publish them as the next step. */
static void post(Exchange *self, const void *payload, Py_ssize_t nbytes)
{
    const int64_t step = ++self->control->step;
    if (self->nodes) announce(self->nodes, step, nbytes);
    post_step(&self->slots, step, self->prefix, payload, (size_t)nbytes);
}

/* Whether all ranks have posted the step by now, and show the same. Between nodes nobody looks here: MPI must not be
 * called with the GIL, since another thread may hold MPI's lock and wait for the GIL. */
static bool all_here(const Exchange *self)
{
    const int64_t step = self->control->step;
    return !self->nodes && all_posted(&self->slots, step, self->looks) && same_digests(&self->slots, step);
}

/* Fold what all ranks have posted. */
static void finish(Exchange *self, void *out)
{
    const int64_t step = self->control->step;
    const void **const rows = self->rows + (step & 1) * self->slots.size;
    run_fold(self->fold, (Earlier){0}, rows, self->slots.size, &out, false, (size_t)self->nbytes / fold_itemsize(self->fold));
    self->control->completed = step;
    ++self->calls;
    self->seconds += 1e-9 * (double)(clock_now() - self->started);
}

/* Throw the result of a call of Python away. */
static int dropped(PyObject *result)
{
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Let Python know of the error of a wait: the other ranks may have gone on from here. */
static void give_up(Exchange *self)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    if (dropped(PyObject_CallMethod(self->path, "give_up", "O", error)) == 0) {
        PyErr_Restore(type, error, traceback);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
}

/* Wait for the other ranks: first without the GIL, and then in Python. */
static int await_others(Exchange *self)
{
    const int64_t step = self->control->step;
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = self->nodes ? exchange_nodes(self->nodes, step, self->nbytes, NODES_NANOSECONDS)
                       : wait_for_all(&self->slots, step, clock_now() + WAIT_NANOSECONDS);
    Py_END_ALLOW_THREADS
    if (done || dropped(PyObject_CallMethod(self->path, "await_others", NULL)) == 0) return 0;
    give_up(self);
    return -1;
}

/* Whether all ranks show what this one shows. */
static bool agree(const Exchange *self)
{
    const int64_t step = self->control->step;
    return (self->nodes && nodes_alike(self->nodes, step)) || same_digests(&self->slots, step);
}

/* Take the step that was posted to its end. */
static int go_on(Exchange *self, PyObject *x, PyObject *out, void *into)
{
    if (await_others(self)) return -1;
    if (!agree(self)) return dropped(PyObject_CallMethod(self->path, "settle", "OO", x, out));
    finish(self, into);
    return 0;
}

static int make_step(Exchange *self, PyObject *x, PyObject *out, const Py_buffer *from, const Py_buffer *to)
{
    post(self, from->buf, self->nbytes);
    if (!all_here(self)) return go_on(self, x, out, to->buf);
    finish(self, to->buf);
    return 0;
}

static bool has_shape(const Exchange *self, const Py_buffer *buffer)
{
    if (buffer->len != self->nbytes || buffer->ndim != self->ndim) return false;
    for (int axis = 0; axis < self->ndim; ++axis)
        if (buffer->shape[axis] != self->shape[axis]) return false;
    return true;
}

/* Take an array of the reduction's shape; 0 if it is another one, or not contiguous. */
static int take(const Exchange *self, PyObject *array, Py_buffer *buffer, int flags)
{
    if (PyObject_GetBuffer(array, buffer, flags)) {
        PyErr_Clear();
        return 0;
    }
    if (has_shape(self, buffer)) return 1;
    PyBuffer_Release(buffer);
    return 0;
}

/* Reduce x, whose memory is `from`, into out: 1; 0 if this call is not one for the exchange, before anything
 * was done; -1: an error. */
static int reduce(Exchange *self, PyObject *x, const Py_buffer *from, PyObject *out)
{
    Py_buffer to;
    int done = 0;
    const int64_t started = clock_now();
    if (!take_turn(self->turn)) return 0;
    self->started = started;
    const Py_ssize_t outstanding = PyObject_Size(self->queue);
    if (outstanding < 0) done = -1;
    else if (!outstanding && take(self, out, &to, PyBUF_ND | PyBUF_WRITABLE)) {
        done = make_step(self, x, out, from, &to) ? -1 : 1;
        PyBuffer_Release(&to);
    }
    leave_turn(self->turn);
    return done;
}

static PyObject *exchange_reduce(Exchange *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer from;
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "reduce takes x and out");
    if (!take(self, args[0], &from, PyBUF_ND)) Py_RETURN_FALSE;
    const int done = reduce(self, args[0], &from, args[1]);
    PyBuffer_Release(&from);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* Make a step with the header alone; whoever calls has the turn. */
static PyObject *exchange_meet(Exchange *self, PyObject *none)
{
    (void)none;
    post(self, NULL, 0);
    if (!all_here(self) && await_others(self)) return NULL;
    return PyBool_FromLong(agree(self));
}

static PyObject *exchange_counts(Exchange *self, PyObject *none)
{
    (void)none;
    return Py_BuildValue("Ld", self->calls, self->seconds);
}

/* ---- methods ----------------------------------------------------------------------------------- */

static PyMethodDef exchange_methods[] = {
    {"reduce", (PyCFunction)(void (*)(void))exchange_reduce, METH_FASTCALL,
     PyDoc_STR("reduce(x, out): reduce, and tell whether that was done; nothing has happened if not.")},
    {"meet", (PyCFunction)(void (*)(void))exchange_meet, METH_NOARGS,
     PyDoc_STR("meet(): make a step with the header alone, and tell whether all ranks show the same; the turn is taken.")},
    {"counts", (PyCFunction)(void (*)(void))exchange_counts, METH_NOARGS,
     PyDoc_STR("counts(): return how many calls were made, and their seconds.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot exchange_slots[] = {
    {Py_tp_new, exchange_new},
    {Py_tp_dealloc, exchange_dealloc},
    {Py_tp_traverse, exchange_traverse},
    {Py_tp_clear, exchange_clear},
    {Py_tp_methods, exchange_methods},
    {0, NULL},
};

static PyType_Spec exchange_spec = {
    .name = "arraycomm._native.compiled.Exchange",
    .basicsize = sizeof(Exchange),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = exchange_slots,
};

/* ---- repeated calls ---------------------------------------------------------------------------- */

/* The exchanges of arrays of one type that a communicator used last, by op, dtype and shape. */
enum { ENTRIES = 16 };

typedef struct {
    PyObject ob_base;
    PyObject *array_type, *ops[ENTRIES];
    Exchange *exchanges[ENTRIES];
    int next, last;
} Repeats;

static PyObject *repeats_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *array_type;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "O", &array_type)) return NULL;
    Repeats *self = (Repeats *)PyType_GenericAlloc(type, 0);
    if (self) self->array_type = Py_NewRef(array_type);
    return (PyObject *)self;
}

static int repeats_traverse(Repeats *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->array_type);
    for (int entry = 0; entry < ENTRIES; ++entry) Py_VISIT((PyObject *)self->exchanges[entry]);
    return 0;
}

static int repeats_clear(Repeats *self)
{
    for (int entry = 0; entry < ENTRIES; ++entry) {
        Py_CLEAR(self->ops[entry]);
        Py_CLEAR(self->exchanges[entry]);
    }
    return 0;
}

static void repeats_dealloc(Repeats *self)
{
    PyTypeObject *const type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    repeats_clear(self);
    Py_CLEAR(self->array_type);
    PyObject_GC_Del(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *repeats_remember(Repeats *self, PyObject *args)
{
    PyObject *op, *exchange;
    if (!PyArg_ParseTuple(args, "UO!", &op, exchange_type, &exchange)) return NULL;
    PyObject *const ops = self->ops[self->next], *const before = (PyObject *)self->exchanges[self->next];
    self->ops[self->next] = Py_NewRef(op);
    self->exchanges[self->next] = (Exchange *)Py_NewRef(exchange);
    self->next = (self->next + 1) % ENTRIES;
    Py_XDECREF(ops);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *repeats_forget(Repeats *self, PyObject *none)
{
    (void)none;
    repeats_clear(self);
    Py_RETURN_NONE;
}

/* The exchange of this op, dtype and shape, or NULL; the one of the last call is looked at first. */
static Exchange *find(Repeats *self, PyObject *op, PyObject *dtype, const Py_buffer *x)
{
    for (int looked = 0; looked < ENTRIES; ++looked) {
        const int entry = (self->last + looked) % ENTRIES;
        Exchange *const exchange = self->exchanges[entry];
        if (exchange && self->ops[entry] == op && exchange->dtype == dtype && has_shape(exchange, x)) {
            self->last = entry;
            return exchange;
        }
    }
    return NULL;
}

/* Reduce an array that is like one before; None, before anything was done, if it is not, or if anything
 * else is unusual. */
static PyObject *repeats_again(Repeats *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "again takes x, op and out");
    PyObject *const x = args[0], *const op = args[1], *const out = args[2];
    if ((PyObject *)Py_TYPE(x) != self->array_type || (PyObject *)Py_TYPE(out) != self->array_type) Py_RETURN_NONE;
    PyObject *const dtype = PyObject_GetAttr(x, dtype_name);
    Py_buffer from;
    if (dtype == NULL || PyObject_GetBuffer(x, &from, PyBUF_ND)) {
        PyErr_Clear();
        Py_XDECREF(dtype);
        Py_RETURN_NONE;
    }
    Exchange *const exchange = find(self, op, dtype, &from);
    int done = 0;
    if (exchange && has_dtype(out, dtype)) {
        Py_INCREF((PyObject *)exchange);
        done = reduce(exchange, x, &from, out);
        Py_DECREF((PyObject *)exchange);
    }
    PyBuffer_Release(&from);
    Py_DECREF(dtype);
    return done < 0 ? NULL : Py_NewRef(done ? out : Py_None);
}

static PyMethodDef repeats_methods[] = {
    {"remember", (PyCFunction)(void (*)(void))repeats_remember, METH_VARARGS,
     PyDoc_STR("remember(op, exchange): use an exchange for calls like its own.")},
    {"forget", (PyCFunction)(void (*)(void))repeats_forget, METH_NOARGS,
     PyDoc_STR("forget(): give up all exchanges.")},
    {"again", (PyCFunction)(void (*)(void))repeats_again, METH_FASTCALL,
     PyDoc_STR("again(x, op, out): reduce x into out and return it; None, with nothing done, if that is new.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot repeats_slots[] = {
    {Py_tp_new, repeats_new},
    {Py_tp_dealloc, repeats_dealloc},
    {Py_tp_traverse, repeats_traverse},
    {Py_tp_clear, repeats_clear},
    {Py_tp_methods, repeats_methods},
    {0, NULL},
};

static PyType_Spec repeats_spec = {
    .name = "arraycomm._native.compiled.Repeats",
    .basicsize = sizeof(Repeats),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = repeats_slots,
};

int add_exchange(PyObject *module)
{
    PyObject *repeats_type;
    if (add_type(module, &exchange_spec, "Exchange", &exchange_type) ||
        add_type(module, &repeats_spec, "Repeats", &repeats_type))
        return -1;
    Py_DECREF(repeats_type);
    return 0;
}
