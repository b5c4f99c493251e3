/* See exchange.h.
 *
 * An Exchange makes one small collective call, or the header of a larger one, again and again: it writes an array into
 * this rank's slot, looks for the other ranks' for a moment, and folds or copies what this rank gets of them into the
 * result. Between nodes the slots of other nodes come in messages. If that takes longer, it calls `await_others` of
 * Python, where the watchdog, interrupts and timeouts are, and if ranks show something else than before, `settle`.
 *
 * Whoever makes a step has the turn. */

#include "exchange.h"

#include <sched.h>
#include <string.h>

#include "folds.h"
#include "leaves.h"
#include "nodes.h"
#include "slots.h"
#include "turns.h"

/* Looks at the other ranks with the GIL, about five microseconds, if ranks are processes; and how long
 * they are looked for without it, on one node and on several. */
enum { LOOKS = 200, WAIT_NANOSECONDS = 100000, NODES_NANOSECONDS = 1000000 };
enum { MAX_DIMS = 9 };
/* Where in a slot the header has two lengths, in which ranks may differ: that of the payload, and what the rank announces. */
enum { LENGTHS = 13 * 8 };

/* An array as a call takes or gives it; its shape fits none if it has more dimensions. */
typedef struct {
    Py_ssize_t nbytes, shape[MAX_DIMS];
    int ndim;
} Form;

typedef struct {
    PyObject ob_base;
    Py_buffer memory;
    Slots slots;
    Form in, out;
    /* The result is made of the payloads of ranks `first` to `last` - 1: of `part` bytes of each, from byte `place` on.
     * They are folded, or come one after the other if the fold is -1. */
    int first, last, fold;
    Py_ssize_t place, part;
    /* The first `compared` bytes of all ranks' headers, one after the other, and whether all are those of this rank. */
    const char *expected;
    size_t compared;
    bool expects_own;
    PyObject *header, *headers, *dtype, *queue;
    PyObject *path; /* what goes on in Python; see _prepared/fast_path.py */
    Counts *control;
    Turn *turn;
    Nodes *nodes; /* NULL on one node */
    char *prefix;      /* the bytes of the header */
    const void **rows; /* where the parts of the ranks' payloads are, in even steps and in odd ones */
    int looks;
    Py_ssize_t sent; /* the bytes of the payload of the last step */
    int64_t started;
    long long calls;
    double seconds;
} Exchange;

static PyObject *exchange_type;

/* ---- making one -------------------------------------------------------------------------------- */

static int set_form(Form *form, PyObject *shape, Py_ssize_t nbytes)
{
    const Py_ssize_t ndim = PyTuple_Size(shape);
    if (ndim < 0) return -1;
    form->nbytes = nbytes;
    form->ndim = ndim > MAX_DIMS ? -1 : (int)ndim;
    for (int axis = 0; axis < form->ndim; ++axis) {
        form->shape[axis] = PyLong_AsSsize_t(PyTuple_GetItem(shape, axis));
        if (form->shape[axis] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* The parts of the payloads have to lie in the slots, and to make up the result. */
static bool has_parts(Exchange *self, Py_ssize_t slot)
{
    const int count = self->last - self->first;
    if (self->first < 0 || self->last > self->slots.size || count < 0 || self->place < 0) return false;
    if (self->fold < -1 || self->fold >= DTYPES * OPS) return false;
    self->part = count == 0 ? 0 : self->fold < 0 ? self->out.nbytes / count : self->out.nbytes;
    if (self->fold < 0 && self->part * count != self->out.nbytes) return false;
    if (self->fold >= 0 && (size_t)self->part % fold_itemsize(self->fold)) return false;
    return self->place <= slot - PAYLOAD - self->part;
}

/* The slots and the parts of them that are used have to lie in the memory. */
static int set_slots(Exchange *self, PyObject *memory, int rank, int size, Py_ssize_t slot)
{
    Py_ssize_t header_bytes, compared;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE)) return -1;
    if (PyBytes_AsStringAndSize(self->header, &self->prefix, &header_bytes)) return -1;
    if (PyBytes_AsStringAndSize(self->headers, (char **)&self->expected, &compared)) return -1;
    self->slots = (Slots){self->memory.buf, (size_t)slot, rank, size};
    if (size < 1 || rank < 0 || rank >= size || slot % 8 || (uintptr_t)self->memory.buf % 8 ||
        self->memory.len / 2 / size < slot || header_bytes != PAYLOAD - HEADER || self->in.nbytes < 0 ||
        slot < PAYLOAD + self->in.nbytes || self->out.nbytes < 0 || !has_parts(self, slot) ||
        compared % size || compared / size < 8 || compared / size > header_bytes) {
        PyErr_SetString(PyExc_ValueError, "the slots are not as the control channel has them");
        return -1;
    }
    self->compared = (size_t)(compared / size);
    self->expects_own = true;
    for (int from = 0; from < size; ++from)
        if (memcmp(self->expected + (size_t)from * self->compared, self->prefix, self->compared)) self->expects_own = false;
    self->rows = PyMem_Calloc(2 * (size_t)size, sizeof(void *));
    if (self->rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int step = 0; step < 2; ++step)
        for (int from = 0; from < size; ++from)
            self->rows[step * size + from] = slot_of(&self->slots, step, from) + PAYLOAD + self->place;
    return 0;
}

static PyObject *exchange_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"memory", "rank", "size", "slot",  "header", "headers", "takes", "gives",   "ranks", "place",
                            "fold",   "dtype", "control", "queue", "turn", "path",  "patient", "nodes", NULL};
    PyObject *memory, *turn, *header, *headers, *takes, *gives, *dtype, *control, *queue, *path, *nodes = Py_None;
    int rank, size, first, last, fold, patient;
    Py_ssize_t slot, place, taken, given;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OiinO!O!(O!n)(O!n)(ii)niOO!OO!Op|O", names, &memory, &rank, &size, &slot,
                                     &PyBytes_Type, &header, &PyBytes_Type, &headers, &PyTuple_Type, &takes, &taken,
                                     &PyTuple_Type, &gives, &given, &first, &last, &place, &fold, &dtype, counts_type,
                                     &control, &queue, turn_type, &turn, &path, &patient, &nodes))
        return NULL;
    if (nodes != Py_None && (PyObject *)Py_TYPE(nodes) != nodes_type) return PyErr_Format(PyExc_TypeError, "nodes must be Nodes");
    Exchange *self = (Exchange *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    self->header = Py_NewRef(header);
    self->headers = Py_NewRef(headers);
    self->dtype = Py_NewRef(dtype);
    self->control = (Counts *)Py_NewRef(control);
    self->turn = (Turn *)Py_NewRef(turn);
    self->queue = Py_NewRef(queue);
    self->path = Py_NewRef(path);
    if (nodes != Py_None) self->nodes = (Nodes *)Py_NewRef(nodes);
    self->first = first;
    self->last = last;
    self->place = place;
    self->fold = fold;
    self->looks = patient ? LOOKS : 1;
    if (set_form(&self->in, takes, taken) || set_form(&self->out, gives, given) || set_slots(self, memory, rank, size, slot))
        Py_CLEAR(self);
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
    Py_CLEAR(self->headers);
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

/* Write this rank's array and a header into its slot, and publish them as the next step. */
static void post_with(Exchange *self, const char *header, const void *payload, Py_ssize_t nbytes)
{
    const int64_t step = ++self->control->step;
    if (self->nodes) announce(self->nodes, step, nbytes);
    post_step(&self->slots, step, header, payload, (size_t)nbytes);
    self->sent = nbytes;
}

static void post(Exchange *self, const void *payload, Py_ssize_t nbytes)
{
    post_with(self, self->prefix, payload, nbytes);
}

/* Whether every rank shows the header of this one, to the last bit. Those of ranks on other nodes are then not in their slots. */
static bool shows_one(const Exchange *self)
{
    return self->nodes && self->expects_own && nodes_alike(self->nodes, self->control->step);
}

/* Whether all ranks show what they have shown before. */
static bool as_before(const Exchange *self)
{
    const int64_t step = self->control->step;
    if (shows_one(self)) return true;
    return headers_begin(&self->slots, step, self->expected, self->compared);
}

/* Whether all ranks have posted the step by now, and show what they have shown before. Between nodes nobody looks here: MPI must not be
 * called with the GIL, since another thread may hold MPI's lock and wait for the GIL. */
static bool all_here(const Exchange *self)
{
    const int64_t step = self->control->step;
    return !self->nodes && all_posted(&self->slots, step, self->looks) && as_before(self);
}

/* Count the call whose step is over. */
static void count_call(Exchange *self)
{
    self->control->completed = self->control->step;
    ++self->calls;
    self->seconds += 1e-9 * (double)(clock_now() - self->started);
}

/* Make the result of what the ranks have posted. */
static void finish(Exchange *self, char *out)
{
    const int64_t step = self->control->step;
    const void **const rows = self->rows + (step & 1) * self->slots.size + self->first;
    const int count = self->last - self->first;
    void *into = out;
    if (self->fold >= 0)
        run_fold(self->fold, (Earlier){0}, rows, count, &into, false, (size_t)self->part / fold_itemsize(self->fold));
    else
        for (int from = 0; from < count; ++from) memcpy(out + from * self->part, rows[from], (size_t)self->part);
    count_call(self);
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
    done = self->nodes ? exchange_nodes(self->nodes, step, self->sent, NODES_NANOSECONDS)
                       : wait_for_all(&self->slots, step, clock_now() + WAIT_NANOSECONDS);
    Py_END_ALLOW_THREADS
    if (done || dropped(PyObject_CallMethod(self->path, "await_others", NULL)) == 0) return 0;
    give_up(self);
    return -1;
}

static bool has_form(const Form *form, const Py_buffer *buffer)
{
    if (buffer->len != form->nbytes || buffer->ndim != form->ndim) return false;
    for (int axis = 0; axis < form->ndim; ++axis)
        if (buffer->shape[axis] != form->shape[axis]) return false;
    return true;
}

/* Take the memory of an array, or of None, which has none; 0 if it has another form, or is not contiguous. A number is the address
 * of an array of which the caller has seen that it is as the call has it. */
static int take(const Form *form, PyObject *array, Py_buffer *buffer, int flags)
{
    if (PyLong_Check(array)) {
        *buffer = (Py_buffer){.buf = PyLong_AsVoidPtr(array), .len = form->nbytes};
        PyErr_Clear();
        return buffer->buf != NULL;
    }
    if (array == Py_None) {
        *buffer = (Py_buffer){0};
        return form->nbytes == 0;
    }
    if (PyObject_GetBuffer(array, buffer, flags)) {
        PyErr_Clear();
        return 0;
    }
    if (has_form(form, buffer)) return 1;
    PyBuffer_Release(buffer);
    return 0;
}

/* The array of a call as memory, where its result goes, and the two as the caller has passed them. */
typedef struct {
    const Py_buffer *from;
    PyObject *into, *x, *out;
} Call;

/* Make the step of a call; return `into`, or what Python makes of a step in which ranks show something else. */
static PyObject *make_step(Exchange *self, const Call *call, char *into)
{
    post(self, call->from->buf, self->in.nbytes);
    if (!all_here(self)) {
        if (await_others(self)) return NULL;
        if (!as_before(self)) return PyObject_CallMethod(self->path, "settle", "OO", call->x, call->out);
    }
    finish(self, into);
    return Py_NewRef(call->into);
}

/* Make a call; NotImplemented, before anything was done, if it is not one for the exchange. */
static PyObject *make(Exchange *self, const Call *call)
{
    Py_buffer to;
    PyObject *result = Py_NotImplemented;
    const int64_t started = clock_now();
    if (!take_turn(self->turn)) return Py_NewRef(result);
    self->started = started;
    const Py_ssize_t outstanding = PyObject_Size(self->queue);
    if (outstanding < 0) result = NULL;
    else if (!outstanding && take(&self->out, call->into, &to, PyBUF_ND | PyBUF_WRITABLE)) {
        result = make_step(self, call, to.buf);
        PyBuffer_Release(&to);
    } else Py_INCREF(result);
    leave_turn(self->turn);
    return result;
}

static PyObject *exchange_make(Exchange *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer from;
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "make takes an array, memory for the result, x and out");
    if (!take(&self->in, args[0], &from, PyBUF_ND)) return Py_NewRef(Py_NotImplemented);
    PyObject *const result = make(self, &(Call){&from, args[1], args[2], args[3]});
    PyBuffer_Release(&from);
    return result;
}

/* The first part of a call whose end `finish` makes: whoever calls waits in between, and no other step is made. */
static PyObject *exchange_post(Exchange *self, PyObject *array)
{
    Py_buffer from;
    if (!take(&self->in, array, &from, PyBUF_ND)) return PyErr_Format(PyExc_ValueError, "x has changed since the call was made");
    post(self, from.buf, self->in.nbytes);
    if (self->nodes) {
        Py_BEGIN_ALLOW_THREADS
        exchange_nodes(self->nodes, self->control->step, self->in.nbytes, 0);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&from);
    Py_RETURN_NONE;
}

static PyObject *exchange_finish(Exchange *self, PyObject *into)
{
    Py_buffer to;
    if (!as_before(self)) Py_RETURN_FALSE;
    if (!take(&self->out, into, &to, PyBUF_ND | PyBUF_WRITABLE))
        return PyErr_Format(PyExc_ValueError, "out has changed since the call was made");
    self->started = clock_now();
    finish(self, to.buf);
    PyBuffer_Release(&to);
    Py_RETURN_TRUE;
}

/* Make a step with the header alone; whoever calls has the turn. */
static PyObject *exchange_meet(Exchange *self, PyObject *none)
{
    (void)none;
    post(self, NULL, 0);
    if (!all_here(self) && await_others(self)) return NULL;
    return PyBool_FromLong(as_before(self));
}

/* How many bytes came with a rank's header; -1 if its payload is still to come, or is not as long as the header says. */
static int64_t length_from(const Exchange *self, int rank)
{
    int64_t lengths[2];
    if (shows_one(self)) return self->sent;
    memcpy(lengths, slot_of(&self->slots, self->control->step, rank) + LENGTHS, sizeof lengths);
    return lengths[0] == lengths[1] && lengths[0] <= (int64_t)self->slots.slot - PAYLOAD ? lengths[0] : -1;
}

/* The payloads that this rank gets, as bytes; None if there are some that have not come with their headers. */
static PyObject *received(Exchange *self)
{
    PyObject *const payloads = PyList_New(0);
    bool taken = payloads != NULL;
    for (int rank = 0; taken && rank < self->slots.size; ++rank) {
        const int64_t nbytes = length_from(self, rank);
        if (nbytes < 0) {
            Py_DECREF(payloads);
            Py_RETURN_NONE;
        }
        if (rank < self->first || rank >= self->last) continue;
        const char *const slot = slot_of(&self->slots, self->control->step, rank);
        PyObject *const payload = PyBytes_FromStringAndSize(slot + PAYLOAD, (Py_ssize_t)nbytes);
        taken = payload && PyList_Append(payloads, payload) == 0;
        Py_XDECREF(payload);
    }
    count_call(self);
    if (taken) return payloads;
    Py_XDECREF(payloads);
    return NULL;
}

/* Make a step with payloads whose lengths are each rank's own; whoever calls has the turn. */
static PyObject *exchange_show(Exchange *self, PyObject *data)
{
    Py_buffer from;
    char header[PAYLOAD - HEADER];
    if (PyObject_GetBuffer(data, &from, PyBUF_SIMPLE)) return NULL;
    const int64_t lengths[2] = {from.len, from.len};
    const bool fits = from.len <= (Py_ssize_t)self->slots.slot - PAYLOAD;
    if (fits) {
        self->started = clock_now();
        memcpy(header, self->prefix, sizeof header);
        memcpy(header + LENGTHS - HEADER, lengths, sizeof lengths);
        post_with(self, header, from.buf, from.len);
    }
    PyBuffer_Release(&from);
    if (!fits) return PyErr_Format(PyExc_ValueError, "the data do not fit into a slot");
    if (!all_here(self) && await_others(self)) return NULL;
    return as_before(self) ? received(self) : Py_NewRef(Py_None);
}

/* What came with the headers, for who reads it out of the slots. */
static PyObject *exchange_lengths(Exchange *self, PyObject *none)
{
    (void)none;
    PyObject *const lengths = PyList_New(self->slots.size);
    for (int rank = 0; lengths && rank < self->slots.size; ++rank) {
        PyObject *const length = PyLong_FromLongLong(length_from(self, rank));
        if (length == NULL || PyList_SetItem(lengths, rank, length)) {
            Py_DECREF(lengths);
            return NULL;
        }
    }
    return lengths;
}

static PyObject *exchange_counts(Exchange *self, PyObject *none)
{
    (void)none;
    return Py_BuildValue("Ld", self->calls, self->seconds);
}

/* ---- methods ----------------------------------------------------------------------------------- */

static PyMethodDef exchange_methods[] = {
    {"make", (PyCFunction)(void (*)(void))exchange_make, METH_FASTCALL,
     PyDoc_STR("make(array, into, x, out): make a call and return `into`, or what `settle(x, out)` returns; "
               "NotImplemented, with nothing done, if it is another call. For arrays there may be the addresses of such.")},
    {"post", (PyCFunction)(void (*)(void))exchange_post, METH_O,
     PyDoc_STR("post(array): begin a call, as the next step of its control channel.")},
    {"finish", (PyCFunction)(void (*)(void))exchange_finish, METH_O,
     PyDoc_STR("finish(into): end that call once all ranks have come to it; False, with nothing done, if they show something else.")},
    {"meet", (PyCFunction)(void (*)(void))exchange_meet, METH_NOARGS,
     PyDoc_STR("meet(): make a step with the header alone; True if all ranks show the headers that were given. The turn is taken.")},
    {"show", (PyCFunction)(void (*)(void))exchange_show, METH_O,
     PyDoc_STR("show(data): make a step with these bytes; a list of those that this rank gets, or None if ranks show other headers than "
               "those that were given, or have sent no bytes with theirs. The turn is taken.")},
    {"lengths", (PyCFunction)(void (*)(void))exchange_lengths, METH_NOARGS,
     PyDoc_STR("lengths(): how many bytes have come with each rank's header in the last step. The turn is taken.")},
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
    PyObject *op, *exchange, *ops, *before;
    if (!PyArg_ParseTuple(args, "UO!", &op, exchange_type, &exchange)) return NULL;
    Py_BEGIN_CRITICAL_SECTION(self);
    ops = self->ops[self->next];
    before = (PyObject *)self->exchanges[self->next];
    self->ops[self->next] = Py_NewRef(op);
    self->exchanges[self->next] = (Exchange *)Py_NewRef(exchange);
    self->next = (self->next + 1) % ENTRIES;
    Py_END_CRITICAL_SECTION();
    Py_XDECREF(ops);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *repeats_forget(Repeats *self, PyObject *none)
{
    (void)none;
    Py_BEGIN_CRITICAL_SECTION(self);
    repeats_clear(self);
    Py_END_CRITICAL_SECTION();
    Py_RETURN_NONE;
}

/* A reference to the exchange of this op, dtype and shape, or NULL; the one of the last call is looked at first. */
static Exchange *find(Repeats *self, PyObject *op, PyObject *dtype, const Py_buffer *x)
{
    Exchange *found = NULL;
    Py_BEGIN_CRITICAL_SECTION(self);
    for (int looked = 0; !found && looked < ENTRIES; ++looked) {
        const int entry = (self->last + looked) % ENTRIES;
        Exchange *const exchange = self->exchanges[entry];
        if (exchange && self->ops[entry] == op && exchange->dtype == dtype && has_form(&exchange->in, x)) {
            self->last = entry;
            found = (Exchange *)Py_NewRef((PyObject *)exchange);
        }
    }
    Py_END_CRITICAL_SECTION();
    return found;
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
    PyObject *result = NULL;
    bool made = false;
    if (exchange && has_dtype(out, dtype)) {
        result = make(exchange, &(Call){&from, out, x, out});
        made = result != Py_NotImplemented;
    }
    Py_XDECREF((PyObject *)exchange);
    PyBuffer_Release(&from);
    Py_DECREF(dtype);
    if (made) return result;
    Py_XDECREF(result);
    Py_RETURN_NONE;
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
