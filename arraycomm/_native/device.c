/* See device.h.
 *
 * A DeviceCall puts the steps of one call on a stream again and again: the word that says that the device has come to it,
 * operations of NCCL, copies and kernels, the word of its end, and an event. Before the first of them the header is shown.
 * The steps were recorded by _cuda/prepared.py, with what the full call puts there. Memory that differs from call to call is
 * named in them by a number, which the highest bits of an address have, and given with each call.
 *
 * It is given the addresses of the functions, and so needs no header of theirs. Whoever calls has the communicator's turn,
 * and NCCL's communicator for itself. */

#include "device.h"

#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "slots.h"
#include "turns.h"

/* ncclResult_t: NCCL completes by itself what is in progress. How long it is waited for, in nanoseconds. */
enum { IN_PROGRESS = 7, PATIENCE = 1000000 };
/* What `begin` and `go_on` return beside 0, if all is on the stream: an error of NCCL or of CUDA is added to its base. */
enum { UNFINISHED = 1, NCCL_ERROR = 1 << 12, CUDA_ERROR = 1 << 16 };
/* The first handles name default streams, which cannot be captured. */
enum { DEFAULT_STREAMS = 2 };
/* From which bit on an address has the number of the memory; 0 is that of addresses which do not differ. */
enum { NUMBER_FROM = 52, MOST_MEMORIES = 1 << 11 };
/* What a step is. A group has `count` operations of NCCL, which follow it. */
enum { GROUP, GATHER, REDUCE, BROADCAST, SEND, RECEIVE, COPY, KERNEL, KINDS };
enum { FUNCTIONS = 15 };

typedef int (*Plain)(void);
typedef int (*GetContext)(void **);
typedef int (*IsCapturing)(void *, int *);
typedef int (*WriteWord)(void *, uint64_t, uint32_t, unsigned);
typedef int (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
typedef int (*Record)(void *, void *);
typedef int (*WaitFor)(void *, void *, unsigned);
typedef int (*Copy)(uint64_t, uint64_t, size_t, void *);
typedef int (*AllGather)(const void *, void *, size_t, int, void *, void *);
typedef int (*AllReduce)(const void *, void *, size_t, int, int, void *, void *);
typedef int (*OneWay)(void *, size_t, int, int, void *, void *);
typedef int (*GetError)(void *, int *);

/* From where, into where, and how many elements of which type of NCCL's; by which reduction, from which root, or with which
 * rank. A copy has bytes. A kernel is `from`, its argument begins at the byte `into` of the arguments, it has `count` blocks
 * of `type` threads. */
typedef struct {
    int kind, type, other;
    uint64_t from, into;
    Py_ssize_t count;
} Step;

/* Where in the arguments of kernels an address is. */
typedef struct {
    Py_ssize_t at;
    uint64_t address;
} Place;

typedef struct {
    PyObject ob_base;
    GetContext context;
    IsCapturing capturing;
    WriteWord write;
    Launch launch;
    Record record;
    WaitFor wait;
    Copy copy;
    Plain group_start, group_end;
    GetError error;
    AllGather all_gather;
    AllReduce all_reduce, broadcast;
    OneWay send, receive;
    /* The context and the stream of the caller, and an event there, for which other streams wait. */
    void *here, *stream, *before, *comm;
    Step *steps;
    Place *places;
    Py_ssize_t count, placed, memories;
    /* The arguments of all kernels, and where the last of these finds the number of the end that it writes, or -1. */
    Py_buffer arguments;
    Py_ssize_t number_at;
    uint64_t word;
    /* Of the call now: the next step, its stream and event, the number of its beginning, where each memory is. */
    Py_ssize_t next;
    void *in, *event;
    uint32_t number;
    uint64_t *memory;
} DeviceCall;

static PyObject *device_type;

/* ---- making one -------------------------------------------------------------------------------- */

/* The addresses of the functions, in the order of the fields. */
static int set_functions(DeviceCall *self, PyObject *table)
{
    void *found[FUNCTIONS];
    if (PyTuple_Size(table) != FUNCTIONS) {
        PyErr_Format(PyExc_ValueError, "there are %d functions", FUNCTIONS);
        return -1;
    }
    for (int place = 0; place < FUNCTIONS; ++place) {
        found[place] = PyLong_AsVoidPtr(PyTuple_GetItem(table, place));
        if (found[place] == NULL) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a function is nowhere");
            return -1;
        }
    }
    self->context = (GetContext)(uintptr_t)found[0];
    self->capturing = (IsCapturing)(uintptr_t)found[1];
    self->write = (WriteWord)(uintptr_t)found[2];
    self->launch = (Launch)(uintptr_t)found[3];
    self->record = (Record)(uintptr_t)found[4];
    self->wait = (WaitFor)(uintptr_t)found[5];
    self->copy = (Copy)(uintptr_t)found[6];
    self->group_start = (Plain)(uintptr_t)found[7];
    self->group_end = (Plain)(uintptr_t)found[8];
    self->error = (GetError)(uintptr_t)found[9];
    self->all_gather = (AllGather)(uintptr_t)found[10];
    self->all_reduce = (AllReduce)(uintptr_t)found[11];
    self->broadcast = (AllReduce)(uintptr_t)found[12];
    self->send = (OneWay)(uintptr_t)found[13];
    self->receive = (OneWay)(uintptr_t)found[14];
    return 0;
}

static bool lies_in(const Py_buffer *buffer, Py_ssize_t at, size_t nbytes)
{
    return at >= 0 && at % (Py_ssize_t)nbytes == 0 && at <= buffer->len - (Py_ssize_t)nbytes;
}

static bool is_known(const DeviceCall *self, uint64_t address)
{
    return (Py_ssize_t)(address >> NUMBER_FROM) < self->memories;
}

/* The first `after` steps are those of groups that were begun. */
static bool is_right(const DeviceCall *self, Py_ssize_t number, Py_ssize_t after)
{
    const Step *const step = &self->steps[number];
    if (step->kind < 0 || step->kind >= KINDS || step->count < 0) return false;
    if (number < after) return step->kind > GROUP && step->kind < COPY && is_known(self, step->from) && is_known(self, step->into);
    if (step->kind == GROUP) return step->count <= self->count - number - 1;
    if (step->kind == KERNEL) return lies_in(&self->arguments, (Py_ssize_t)step->into, sizeof(uint64_t));
    return step->kind == COPY && is_known(self, step->from) && is_known(self, step->into);
}

static int set_steps(DeviceCall *self, PyObject *steps, PyObject *places)
{
    Py_ssize_t after = 0;
    bool right = self->memories > 0 && self->memories <= MOST_MEMORIES && (uintptr_t)self->arguments.buf % 8 == 0 &&
                 (self->number_at < 0 || lies_in(&self->arguments, self->number_at, sizeof(uint32_t)));
    self->count = PyList_Size(steps);
    self->placed = PyList_Size(places);
    if (self->count < 0 || self->placed < 0) return -1;
    self->steps = PyMem_Calloc((size_t)self->count + 1, sizeof(Step));
    self->places = PyMem_Calloc((size_t)self->placed + 1, sizeof(Place));
    self->memory = PyMem_Calloc((size_t)(right ? self->memories : 0) + 1, sizeof(uint64_t));
    if (!self->steps || !self->places || !self->memory) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t number = 0; number < self->count; ++number) {
        Step *const step = &self->steps[number];
        unsigned long long from, into;
        if (!PyArg_ParseTuple(PyList_GetItem(steps, number), "iKKnii", &step->kind, &from, &into, &step->count, &step->type,
                              &step->other))
            return -1;
        step->from = from;
        step->into = into;
    }
    for (Py_ssize_t number = 0; right && number < self->count; ++number) {
        right = is_right(self, number, after);
        if (right && number >= after && self->steps[number].kind == GROUP) after = number + 1 + self->steps[number].count;
    }
    for (Py_ssize_t number = 0; number < self->placed; ++number) {
        unsigned long long address;
        if (!PyArg_ParseTuple(PyList_GetItem(places, number), "nK", &self->places[number].at, &address)) return -1;
        self->places[number].address = address;
        right = right && lies_in(&self->arguments, self->places[number].at, sizeof address) && is_known(self, address);
    }
    if (right) return 0;
    PyErr_SetString(PyExc_ValueError, "the steps are not as they are recorded");
    return -1;
}

static PyObject *device_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"functions", "stream", "before", "comm", "steps", "places", "arguments", "memories", "number_at",
                            "word",      NULL};
    PyObject *functions, *steps, *places, *arguments;
    unsigned long long stream, before, comm, word;
    DeviceCall *self = (DeviceCall *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!KKKO!O!OnnK", names, &PyTuple_Type, &functions, &stream, &before, &comm,
                                     &PyList_Type, &steps, &PyList_Type, &places, &arguments, &self->memories,
                                     &self->number_at, &word) ||
        set_functions(self, functions) || PyObject_GetBuffer(arguments, &self->arguments, PyBUF_WRITABLE) ||
        set_steps(self, steps, places)) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    self->stream = (void *)(uintptr_t)stream;
    self->before = (void *)(uintptr_t)before;
    self->comm = (void *)(uintptr_t)comm;
    self->word = word;
    /* The device that is current now is that of the call. */
    Py_BEGIN_ALLOW_THREADS
    self->context(&self->here);
    Py_END_ALLOW_THREADS
    return (PyObject *)self;
}

static void device_dealloc(DeviceCall *self)
{
    PyTypeObject *const type = Py_TYPE((PyObject *)self);
    if (self->arguments.obj) PyBuffer_Release(&self->arguments);
    PyMem_Free(self->steps);
    PyMem_Free(self->places);
    PyMem_Free(self->memory);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

/* ---- one call ---------------------------------------------------------------------------------- */

static bool is_ready(const DeviceCall *self)
{
    void *here = NULL;
    int captured = 0;
    if (self->context(&here) || here != self->here) return false;
    if ((uintptr_t)self->stream <= DEFAULT_STREAMS) return true;
    return self->capturing(self->stream, &captured) == 0 && !captured;
}

static PyObject *device_ready(DeviceCall *self, PyObject *none)
{
    (void)none;
    bool ready;
    Py_BEGIN_ALLOW_THREADS
    ready = is_ready(self);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(ready);
}

static int of_cuda(int status)
{
    return status ? CUDA_ERROR + status : 0;
}

static int of_nccl(int result)
{
    return result && result != IN_PROGRESS ? NCCL_ERROR + result : 0;
}

/* Wait for a moment until NCCL has put the operation on the stream. */
static int await_nccl(const DeviceCall *self)
{
    const int64_t end = clock_now() + PATIENCE;
    for (;;) {
        int state = 0;
        const int result = self->error(self->comm, &state);
        if (result || state != IN_PROGRESS) return of_nccl(result ? result : state);
        if (clock_now() >= end) return UNFINISHED;
        sched_yield();
    }
}

static uint64_t address_of(const DeviceCall *self, uint64_t recorded)
{
    return self->memory[recorded >> NUMBER_FROM] + (recorded & (((uint64_t)1 << NUMBER_FROM) - 1));
}

static int put_operation(const DeviceCall *self, const Step *step)
{
    void *const from = (void *)(uintptr_t)address_of(self, step->from);
    void *const into = (void *)(uintptr_t)address_of(self, step->into);
    const size_t count = (size_t)step->count;
    switch (step->kind) {
    case GATHER: return self->all_gather(from, into, count, step->type, self->comm, self->in);
    case REDUCE: return self->all_reduce(from, into, count, step->type, step->other, self->comm, self->in);
    case BROADCAST: return self->broadcast(from, into, count, step->type, step->other, self->comm, self->in);
    case SEND: return self->send(from, count, step->type, step->other, self->comm, self->in);
    default: return self->receive(into, count, step->type, step->other, self->comm, self->in);
    }
}

static int put_group(const DeviceCall *self, const Step *group)
{
    int result = of_nccl(self->group_start()), end;
    for (const Step *step = group + 1; !result && step <= group + group->count; ++step)
        result = of_nccl(put_operation(self, step));
    /* A group that stays open would hold back all later calls of this thread. */
    end = of_nccl(self->group_end());
    return result ? result : end ? end : await_nccl(self);
}

static int put_kernel(const DeviceCall *self, const Step *step)
{
    void *arguments[] = {(char *)self->arguments.buf + step->into};
    return self->launch((void *)(uintptr_t)step->from, (unsigned)step->count, 1, 1, (unsigned)step->type, 1, 1, 0, self->in,
                        arguments, NULL);
}

/* Put the steps that are left on the stream, as far as NCCL is done with the one before, and the end. */
static int put_rest(DeviceCall *self)
{
    while (self->next < self->count) {
        const Step *const step = &self->steps[self->next];
        int found;
        self->next += 1 + (step->kind == GROUP ? step->count : 0);
        if (step->kind == GROUP)
            found = put_group(self, step);
        else if (step->kind == KERNEL)
            found = of_cuda(put_kernel(self, step));
        else
            found = of_cuda(self->copy(address_of(self, step->into), address_of(self, step->from), (size_t)step->count, self->in));
        if (found) return found;
    }
    const int status = self->number_at < 0 ? self->write(self->in, self->word, self->number + 1, 0) : 0;
    return of_cuda(status ? status : self->record(self->event, self->in));
}

static int put_all(DeviceCall *self)
{
    char *const arguments = self->arguments.buf;
    int status = 0;
    for (const Place *place = self->places; place < self->places + self->placed; ++place) {
        const uint64_t address = address_of(self, place->address);
        memcpy(arguments + place->at, &address, sizeof address);
    }
    if (self->number_at >= 0) {
        const uint32_t end = self->number + 1;
        memcpy(arguments + self->number_at, &end, sizeof end);
    }
    if (self->in != self->stream) {
        status = self->record(self->before, self->stream);
        if (!status) status = self->wait(self->in, self->before, 0);
    }
    if (!status) status = self->write(self->in, self->word, self->number, 0);
    return status ? of_cuda(status) : put_rest(self);
}

static PyObject *device_begin(DeviceCall *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 + self->memories) return PyErr_Format(PyExc_TypeError, "begin takes %zd addresses", self->memories - 1);
    const unsigned long number = PyLong_AsUnsignedLong(args[0]);
    self->in = PyLong_AsVoidPtr(args[1]);
    self->event = PyLong_AsVoidPtr(args[2]);
    for (Py_ssize_t memory = 1; memory < self->memories; ++memory)
        self->memory[memory] = PyLong_AsUnsignedLongLong(args[2 + memory]);
    if (PyErr_Occurred()) return NULL;
    PyObject *const shown = PyObject_CallFunctionObjArgs(args[nargs - 1], Py_None, NULL);
    if (shown == NULL) return NULL;
    Py_DECREF(shown);
    int found;
    self->number = (uint32_t)number;
    self->next = 0;
    Py_BEGIN_ALLOW_THREADS
    found = put_all(self);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(found);
}

static PyObject *device_go_on(DeviceCall *self, PyObject *none)
{
    (void)none;
    int found;
    Py_BEGIN_ALLOW_THREADS
    found = put_rest(self);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(found);
}

static PyMethodDef device_methods[] = {
    {"ready", (PyCFunction)(void (*)(void))device_ready, METH_NOARGS,
     PyDoc_STR("ready(): True if the device is this thread's current one, and the caller's stream is not captured.")},
    {"begin", (PyCFunction)(void (*)(void))device_begin, METH_FASTCALL,
     PyDoc_STR("begin(number, stream, event, *addresses, show): show the header by show(None), and put the steps on a stream, the caller's "
               "or one that waits for it. 0; or 1 if NCCL is still at one of them; or an error.")},
    {"go_on", (PyCFunction)(void (*)(void))device_go_on, METH_NOARGS,
     PyDoc_STR("go_on(): put the rest there, once NCCL is done; return what `begin` does.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_new, device_new},
    {Py_tp_dealloc, device_dealloc},
    {Py_tp_methods, device_methods},
    {0, NULL},
};

static PyType_Spec device_spec = {
    .name = "arraycomm._native.compiled.DeviceCall",
    .basicsize = sizeof(DeviceCall),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = device_slots,
};

int add_device(PyObject *module)
{
    return add_type(module, &device_spec, "DeviceCall", &device_type);
}
