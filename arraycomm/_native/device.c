/* See device.h.
 *
 * A DeviceCall puts one collective call on a stream again and again: the word that says that the device has come to it,
 * the operation of NCCL, the kernel that makes the result of it, or that spoils the result of a call that was given up,
 * the word of its end, and an event. Between the first two the header is shown. Whatever differs from call to call it is
 * given: where the elements are, where the result goes, and the number of the word.
 *
 * It is given the addresses of the functions, and so needs no header of theirs. _cuda/kernels.py has the arguments of the
 * kernels, and _cuda/prepared.py decides which calls are made so. Whoever calls has the communicator's turn; who calls
 * `begin` has NCCL's communicator for itself. */

#include "device.h"

#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

#include "slots.h"
#include "turns.h"

/* ncclResult_t: NCCL completes by itself what is in progress. How long it is waited for, in nanoseconds. */
enum { IN_PROGRESS = 7, PATIENCE = 1000000 };
/* What `begin` and `end` return beside 0, if their part is on the stream: an error of NCCL or of CUDA is added to its base. */
enum { UNFINISHED = 1, NCCL_ERROR = 1 << 12, CUDA_ERROR = 1 << 16 };
/* ncclDataType_t of plain bytes. */
enum { BYTES = 1 };
/* The first handles name default streams, which cannot be captured. */
enum { DEFAULT_STREAMS = 2 };

typedef int (*Plain)(void);
typedef int (*GetContext)(void **);
typedef int (*IsCapturing)(void *, int *);
typedef int (*WriteWord)(void *, uint64_t, uint32_t, unsigned);
typedef int (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
typedef int (*Record)(void *, void *);
typedef int (*AllGather)(const void *, void *, size_t, int, void *, void *);
typedef int (*AllReduce)(const void *, void *, size_t, int, int, void *, void *);
typedef int (*GetError)(void *, int *);

/* The argument of the kernel, at the end of which `number` is written to `word`; as far as calls differ in it. */
typedef struct {
    uint64_t out;
    uint32_t number;
} Differing;

typedef struct {
    PyObject ob_base;
    GetContext context;
    IsCapturing capturing;
    WriteWord write;
    Launch launch;
    Record record;
    Plain group_start, group_end;
    AllGather all_gather;
    AllReduce all_reduce;
    GetError error;
    void *here, *stream, *event, *comm;
    /* The operation: of `count` elements of a type of NCCL's; an all-reduce by `op`, or an all-gather if that is -1. */
    Py_ssize_t count;
    int type, op;
    /* Where the digest of this rank's header is, and where those of all ranks are gathered along with the operation. */
    uint64_t digest, digests;
    /* Where the operation's result goes that a kernel makes the call's of; 0 if it is the call's. */
    uint64_t scratch;
    /* The kernel, its argument, and where in that the address of the result is, and the number of its end, or -1. */
    void *kernel;
    unsigned blocks, threads;
    Py_buffer argument;
    Py_ssize_t out_at, number_at;
    uint64_t word;
    Differing now;
} DeviceCall;

static PyObject *device_type;

/* ---- making one -------------------------------------------------------------------------------- */

/* The addresses of the functions, in the order of the fields. */
static int set_functions(DeviceCall *self, PyObject *table)
{
    void *found[10];
    if (PyTuple_Size(table) != 10) {
        PyErr_SetString(PyExc_ValueError, "there are ten functions");
        return -1;
    }
    for (int place = 0; place < 10; ++place) {
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
    self->group_start = (Plain)(uintptr_t)found[5];
    self->group_end = (Plain)(uintptr_t)found[6];
    self->all_gather = (AllGather)(uintptr_t)found[7];
    self->all_reduce = (AllReduce)(uintptr_t)found[8];
    self->error = (GetError)(uintptr_t)found[9];
    return 0;
}

static bool lies_in(const Py_buffer *buffer, Py_ssize_t at, size_t nbytes)
{
    return at >= 0 && at % (Py_ssize_t)nbytes == 0 && at <= buffer->len - (Py_ssize_t)nbytes;
}

static int set_argument(DeviceCall *self, PyObject *argument)
{
    if (PyObject_GetBuffer(argument, &self->argument, PyBUF_WRITABLE)) return -1;
    const Py_buffer *const buffer = &self->argument;
    if (lies_in(buffer, self->out_at, sizeof(uint64_t)) &&
        (self->number_at < 0 || lies_in(buffer, self->number_at, sizeof(uint32_t))) && (uintptr_t)buffer->buf % 8 == 0)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the argument has no room for what differs");
    return -1;
}

static PyObject *device_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"functions", "stream", "event", "comm", "operation", "digests", "scratch", "kernel",
                            "grid",      "argument", "at",    "word", NULL};
    PyObject *functions, *argument;
    unsigned long long stream, event, comm, digest, digests, scratch, kernel, word;
    DeviceCall *self = (DeviceCall *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!KKK(nii)(KK)KK(II)O(nn)K", names, &PyTuple_Type, &functions, &stream,
                                     &event, &comm, &self->count, &self->type, &self->op, &digest, &digests, &scratch, &kernel,
                                     &self->blocks, &self->threads, &argument, &self->out_at, &self->number_at, &word) ||
        set_functions(self, functions) || set_argument(self, argument)) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    self->stream = (void *)(uintptr_t)stream;
    self->event = (void *)(uintptr_t)event;
    self->comm = (void *)(uintptr_t)comm;
    self->kernel = (void *)(uintptr_t)kernel;
    self->digest = digest;
    self->digests = digests;
    self->scratch = scratch;
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
    if (self->argument.obj) PyBuffer_Release(&self->argument);
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

static int put_operation(const DeviceCall *self, uint64_t source)
{
    const void *const from = (const void *)(uintptr_t)source;
    void *const into = (void *)(uintptr_t)(self->scratch ? self->scratch : self->now.out);
    const void *const digest = (const void *)(uintptr_t)self->digest;
    void *const digests = (void *)(uintptr_t)self->digests;
    int result = of_nccl(self->group_start()), end;
    /* First, as in full calls. */
    if (!result) result = of_nccl(self->all_gather(digest, digests, sizeof(uint64_t), BYTES, self->comm, self->stream));
    if (!result)
        result = of_nccl(self->op < 0
                             ? self->all_gather(from, into, (size_t)self->count, self->type, self->comm, self->stream)
                             : self->all_reduce(from, into, (size_t)self->count, self->type, self->op, self->comm, self->stream));
    /* A group that stays open would hold back all later calls of this thread. */
    end = of_nccl(self->group_end());
    return result ? result : end ? end : await_nccl(self);
}

/* Put what comes after the operation on the stream. */
static int put_end(DeviceCall *self)
{
    char *const argument = self->argument.buf;
    void *arguments[] = {argument};
    *(uint64_t *)(void *)(argument + self->out_at) = self->now.out;
    if (self->number_at >= 0) *(uint32_t *)(void *)(argument + self->number_at) = self->now.number + 1;
    int status = self->launch(self->kernel, self->blocks, 1, 1, self->threads, 1, 1, 0, self->stream, arguments, NULL);
    if (!status && self->number_at < 0) status = self->write(self->stream, self->word, self->now.number + 1, 0);
    return of_cuda(status ? status : self->record(self->event, self->stream));
}

static PyObject *device_begin(DeviceCall *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "begin takes two addresses, a number and a function");
    const uint64_t source = PyLong_AsUnsignedLongLong(args[0]);
    const uint64_t out = PyLong_AsUnsignedLongLong(args[1]);
    const unsigned long number = PyLong_AsUnsignedLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    PyObject *const shown = PyObject_CallFunctionObjArgs(args[3], Py_None, NULL);
    if (shown == NULL) return NULL;
    Py_DECREF(shown);
    int found;
    self->now = (Differing){out, (uint32_t)number};
    Py_BEGIN_ALLOW_THREADS
    found = of_cuda(self->write(self->stream, self->word, self->now.number, 0));
    if (!found) found = put_operation(self, source);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(found);
}

static PyObject *device_end(DeviceCall *self, PyObject *none)
{
    (void)none;
    int found;
    Py_BEGIN_ALLOW_THREADS
    found = put_end(self);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(found);
}

static PyMethodDef device_methods[] = {
    {"ready", (PyCFunction)(void (*)(void))device_ready, METH_NOARGS,
     PyDoc_STR("ready(): True if the device is this thread's current one, and the stream is not captured.")},
    {"begin", (PyCFunction)(void (*)(void))device_begin, METH_FASTCALL,
     PyDoc_STR("begin(source, out, number, show): show the header by show(None), and put the operation of NCCL on the stream. 0; or 1 if "
               "NCCL has not done so yet; or an error.")},
    {"end", (PyCFunction)(void (*)(void))device_end, METH_NOARGS,
     PyDoc_STR("end(): put what comes after the operation on the stream; 0, or an error.")},
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
