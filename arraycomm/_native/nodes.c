/* See nodes.h.
 *
 * The first rank of a node leads: it sends and receives, by prepared messages that Python has made. It sends a common
 * record, the header once and the payloads of all ranks that are known so far, from a box in which it grows; large
 * payloads go from slot to slot.
 *
 * MPI is called by the addresses of two functions that are the same in every MPI: they take pointers to handles. */

#include "nodes.h"

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "slots.h"
#include "turns.h"

/* Rounds double the nodes that are known. */
enum { ROUNDS = 24, STATUS_WORDS = 16 };
/* Nanoseconds after the beginning of a step within which no other rank gives up the next one. Later Python looks whether one has. */
enum { SOON = 1000000 };
/* Looks for a message between two times that the core is given up. */
enum { LOOKS = 4 };

/* The pieces of messages that go both ways: receives and sends in turn, where NULL stands for none; how many there are
 * each way, how many receives and sends have been begun, and how many receives are over. */
typedef struct {
    void **messages;
    int count, begun, sent, come;
} Lane;

/* The messages of all rounds for a payload of this many bytes. What is sent from where slots are depends on the parity of
 * the step. If it is -1, the payloads go by way of the box. */
typedef struct {
    Py_ssize_t nbytes;
    int parity;
    Lane lanes[ROUNDS];
} Messages;

/* How far the first rank of a node is in a step: the ranks of the node are awaited, or messages, or what is still to be
 * sent; the step is over, or left to Python. */
typedef enum { AWAITED, MOVED, SENT, OVER, LEFT } Stage;

struct Nodes {
    PyObject ob_base;
    Py_buffer memory, box;
    Slots slots;
    _Atomic int64_t *lengths, *complete, *alike; /* behind the slots; see mpi_control.py */
    int *members, *others, member_count, other_count;
    int ahead; /* the pieces of a message that are under way; see _transports/mpi/pieces.py */
    int rounds, known[ROUNDS + 1]; /* how many ranks are known before each round, and at last */
    int (*start)(void *request), (*test)(void *request, int *flag, void *status);
    Messages *messages;
    Py_ssize_t message_count;
    /* Of the step under way: its number, the bytes of this rank's payload, those of a rank in the box, and its messages;
     * how far it is; the round, or -1, the lane of that, and whether its first piece fits; and MPI's error. */
    int64_t step;
    Py_ssize_t nbytes;
    size_t each;
    const Messages *current;
    Stage stage;
    int round, error;
    int64_t begun; /* when the last step began */
    Lane lane;
    bool fits;
};

PyObject *nodes_type;

/* ---- making one -------------------------------------------------------------------------------- */

/* Read a sequence of ranks. */
static int *read_ranks(PyObject *sequence, int size, int *count)
{
    const Py_ssize_t length = PySequence_Size(sequence);
    if (length < 0) return NULL;
    int *const ranks = PyMem_Calloc((size_t)length + 1, sizeof(int));
    if (ranks == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t place = 0; place < length; ++place) {
        PyObject *const item = PySequence_GetItem(sequence, place);
        const long rank = item ? PyLong_AsLong(item) : -1;
        Py_XDECREF(item);
        if (rank < 0 || rank > size) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "no rank %ld", rank);
            PyMem_Free(ranks);
            return NULL;
        }
        ranks[place] = (int)rank;
    }
    *count = (int)length;
    return ranks;
}

/* Read how many ranks become known in each round. */
static int set_rounds(Nodes *self, PyObject *received)
{
    int *const counts = read_ranks(received, self->slots.size, &self->rounds);
    if (counts == NULL) return -1;
    self->known[0] = self->member_count;
    for (int round = 0; round < self->rounds && round < ROUNDS; ++round)
        self->known[round + 1] = self->known[round] + counts[round];
    PyMem_Free(counts);
    if (self->rounds < ROUNDS && self->known[self->rounds] == self->slots.size) return 0;
    PyErr_SetString(PyExc_ValueError, "the rounds do not bring all ranks");
    return -1;
}

static int set_memory(Nodes *self, PyObject *memory, int rank, int size, Py_ssize_t slot)
{
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE)) return -1;
    if (size < 1 || rank < 0 || rank >= size || slot < PAYLOAD || slot % 8 || (uintptr_t)self->memory.buf % 8 ||
        self->memory.len / 2 / size < slot + 8 || self->memory.len < 2 * size * (slot + 8) + 24) {
        PyErr_SetString(PyExc_ValueError, "the slots are not as the control channel has them");
        return -1;
    }
    self->slots = (Slots){self->memory.buf, (size_t)slot, rank, size};
    self->lengths = (_Atomic int64_t *)((char *)self->memory.buf + 2 * size * slot);
    self->complete = self->lengths + 2 * size;
    self->alike = self->complete + 1;
    return 0;
}

static PyObject *nodes_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"memory", "rank", "size", "slot", "members", "others", "received", "ahead", "box", "start", "test", NULL};
    PyObject *memory, *members, *others, *received, *box;
    unsigned long long start, test;
    Py_ssize_t slot;
    int rank, size, ahead;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OiinOOOiOKK", names, &memory, &rank, &size, &slot, &members,
                                     &others, &received, &ahead, &box, &start, &test))
        return NULL;
    if (ahead < 1) return PyErr_Format(PyExc_ValueError, "a piece at least must be under way");
    Nodes *self = (Nodes *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    self->start = (int (*)(void *))(uintptr_t)start;
    self->test = (int (*)(void *, int *, void *))(uintptr_t)test;
    self->round = -1;
    self->ahead = ahead;
    if (set_memory(self, memory, rank, size, slot)) goto failed;
    self->members = read_ranks(members, size - 1, &self->member_count);
    self->others = self->members ? read_ranks(others, size - 1, &self->other_count) : NULL;
    if (self->others == NULL || set_rounds(self, received)) goto failed;
    if (self->member_count == 0 || self->member_count + self->other_count != size) {
        PyErr_SetString(PyExc_ValueError, "each rank must be a member of this node or one of the others");
        goto failed;
    }
    if (box != Py_None && PyObject_GetBuffer(box, &self->box, PyBUF_WRITABLE)) goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF((PyObject *)self);
    return NULL;
}

static void free_lanes(Lane *lanes, Py_ssize_t count)
{
    for (Py_ssize_t place = 0; place < count; ++place) PyMem_Free(lanes[place].messages);
}

static void forget_messages(Nodes *self)
{
    for (Py_ssize_t place = 0; place < self->message_count; ++place) free_lanes(self->messages[place].lanes, ROUNDS);
    self->message_count = 0;
}

static void nodes_dealloc(Nodes *self)
{
    PyTypeObject *const type = Py_TYPE((PyObject *)self);
    if (self->memory.obj) PyBuffer_Release(&self->memory);
    if (self->box.obj) PyBuffer_Release(&self->box);
    PyMem_Free(self->members);
    PyMem_Free(self->others);
    forget_messages(self);
    PyMem_Free(self->messages);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

/* ---- prepared messages ------------------------------------------------------------------------- */

/* Look for a message until a time. */
static bool is_over(Nodes *self, void *request, int64_t end)
{
    int64_t status[STATUS_WORDS];
    int over = 0;
    for (int looks = 1;; ++looks) {
        self->error = self->test(request, &over, status);
        if (over && !self->error) return true;
        if (self->error || clock_now() >= end) return false;
        if (looks % LOOKS == 0) sched_yield();
    }
}

static size_t whole(Py_ssize_t nbytes)
{
    return ((size_t)nbytes + 7) / 8 * 8;
}

/* Begin receives up to a number of them, and sends. */
static int begin_pieces(const Nodes *self, Lane *lane, int until)
{
    const int more = lane->count - lane->come < self->ahead ? lane->count : lane->come + self->ahead;
    int error = 0;
    for (; !error && lane->begun < until && lane->begun < more; ++lane->begun) {
        void *const receive = lane->messages[2 * lane->begun];
        if (receive) error = self->start(receive);
    }
    for (; !error && lane->sent < more; ++lane->sent) {
        void *const send = lane->messages[2 * lane->sent + 1];
        if (send) error = self->start(send);
    }
    return error;
}

/* Look once for what has come, and begin as much. */
static int look(const Nodes *self, Lane *lane, int until)
{
    int64_t status[STATUS_WORDS];
    int error = begin_pieces(self, lane, until);
    while (!error && lane->come < lane->begun) {
        void *const receive = lane->messages[2 * lane->come];
        int over = 1;
        if (receive) error = self->test(receive, &over, status);
        if (error || !over) break;
        ++lane->come;
        error = begin_pieces(self, lane, until);
    }
    return error;
}

/* Take the lane of the round up to a number of receives, until a time. */
static bool have_come(Nodes *self, int until, int64_t end)
{
    Lane *const lane = &self->lane;
    for (int looks = 1;; ++looks) {
        if ((self->error = look(self, lane, until))) return false;
        if (lane->come >= until || lane->come == lane->count) return true;
        if (clock_now() >= end) return false;
        if (looks % LOOKS == 0) sched_yield();
    }
}

/* Whether nothing of a lane is to be sent any more, at the end of that time. */
static bool are_sent(Nodes *self, const Lane *lane, int64_t end)
{
    for (int piece = 0; piece < lane->count; ++piece) {
        void *const send = lane->messages[2 * piece + 1];
        if (send && !is_over(self, send, end)) return false;
    }
    return true;
}

/* Read the addresses of a lane's messages. */
static int read_lane(PyObject *sequence, Lane *lane)
{
    const Py_ssize_t count = PySequence_Size(sequence);
    if (count < 0) return -1;
    if (count % 2 || count > INT_MAX) {
        PyErr_SetString(PyExc_ValueError, "there must be a receive and a send of each piece");
        return -1;
    }
    lane->messages = PyMem_Calloc((size_t)count + 1, sizeof(void *));
    if (lane->messages == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    lane->count = (int)count / 2;
    for (Py_ssize_t place = 0; place < count; ++place) {
        PyObject *const item = PySequence_GetItem(sequence, place);
        lane->messages[place] = item ? PyLong_AsVoidPtr(item) : NULL;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

/* Read this many lanes, which are all 0 before. */
static int read_lanes(PyObject *sequence, Py_ssize_t count, Lane *lanes)
{
    for (Py_ssize_t place = 0; place < count; ++place) {
        PyObject *const item = PySequence_GetItem(sequence, place);
        const int failed = item == NULL || read_lane(item, lanes + place);
        Py_XDECREF(item);
        if (failed) {
            free_lanes(lanes, count);
            return -1;
        }
    }
    return 0;
}

static PyObject *nodes_add(Nodes *self, PyObject *args)
{
    PyObject *lanes;
    Messages messages = {0};
    if (!PyArg_ParseTuple(args, "niO", &messages.nbytes, &messages.parity, &lanes)) return NULL;
    const Py_ssize_t rounds = PySequence_Size(lanes);
    if (rounds < 0) return NULL;
    if (rounds != self->rounds) return PyErr_Format(PyExc_ValueError, "there must be a lane for each round");
    const size_t each = whole(messages.nbytes), size = (size_t)self->slots.size;
    if (messages.nbytes < 0 || PAYLOAD + each > self->slots.slot ||
        2 * PAYLOAD + (messages.parity < 0 ? size * each : 0) > (size_t)self->box.len)
        return PyErr_Format(PyExc_ValueError, "there is no room for %zd bytes", messages.nbytes);
    Messages *const more = PyMem_Realloc(self->messages, ((size_t)self->message_count + 1) * sizeof(Messages));
    if (more == NULL) return PyErr_NoMemory();
    self->messages = more;
    if (read_lanes(lanes, rounds, messages.lanes)) return NULL;
    self->messages[self->message_count++] = messages;
    Py_RETURN_NONE;
}

static PyObject *nodes_clear_messages(Nodes *self, PyObject *none)
{
    (void)none;
    forget_messages(self);
    Py_RETURN_NONE;
}

static PyObject *nodes_state(Nodes *self, PyObject *none)
{
    (void)none;
    return Py_BuildValue("ii", self->round, self->error);
}

static const Messages *find_messages(const Nodes *self, int parity, Py_ssize_t nbytes)
{
    for (const Messages *messages = self->messages; messages < self->messages + self->message_count; ++messages)
        if (messages->nbytes == nbytes && (messages->parity < 0 || messages->parity == parity)) return messages;
    return NULL;
}

/* ---- one step ---------------------------------------------------------------------------------- */

static _Atomic int64_t *length_of(const Nodes *self, int64_t step, int rank)
{
    return self->lengths + (step & 1) * self->slots.size + rank;
}

void announce(Nodes *self, int64_t step, Py_ssize_t nbytes)
{
    atomic_store_explicit(length_of(self, step, self->slots.rank), nbytes, memory_order_relaxed);
}

bool nodes_alike(const Nodes *self, int64_t step)
{
    return atomic_load_explicit(self->alike + (step & 1), memory_order_relaxed);
}

/* Whether the ranks of this node show the same header, and as many bytes. */
static bool have_common(const Nodes *self)
{
    const char *const own = slot_of(&self->slots, self->step, self->slots.rank) + HEADER;
    for (int place = 0; place < self->member_count; ++place) {
        const int rank = self->members[place];
        if (atomic_load_explicit(length_of(self, self->step, rank), memory_order_relaxed) != self->nbytes) return false;
        if (memcmp(slot_of(&self->slots, self->step, rank) + HEADER, own, PAYLOAD - HEADER)) return false;
    }
    return true;
}

/* Begin the record of all ranks with those of this node. */
static void pack(Nodes *self)
{
    char *const box = self->box.buf;
    const int64_t mark = ~(int64_t)self->nbytes;
    const size_t each = self->each;
    memcpy(box, &mark, HEADER);
    memcpy(box + HEADER, slot_of(&self->slots, self->step, self->slots.rank) + HEADER, PAYLOAD - HEADER);
    for (int place = 0; place < self->member_count; ++place) {
        const char *const slot = slot_of(&self->slots, self->step, self->members[place]);
        memcpy(box + PAYLOAD + (size_t)place * each, slot + PAYLOAD, each);
    }
}

/* Put the payloads of other nodes into their slots; those of the last round lie behind a header of their own. */
static void unpack(Nodes *self)
{
    const char *const box = self->box.buf;
    const int last = self->known[self->rounds - 1];
    for (int place = 0; place < self->other_count; ++place) {
        const int number = self->member_count + place;
        const size_t at = PAYLOAD + (size_t)number * self->each + (number < last ? 0 : PAYLOAD);
        memcpy(slot_of(&self->slots, self->step, self->others[place]) + PAYLOAD, box + at, self->each);
    }
}

/* Put the payloads of the record that has come in a round behind those before. */
static void add_record(Nodes *self)
{
    char *const come = (char *)self->box.buf + PAYLOAD + (size_t)self->known[self->round] * self->each;
    const int ranks = self->known[self->round + 1] - self->known[self->round];
    if (self->round + 1 < self->rounds) memmove(come, come + PAYLOAD, (size_t)ranks * self->each);
}

/* Whether the first piece that has come in a round is as this node's is. */
static bool first_fits(const Nodes *self)
{
    const char *const box = self->box.buf;
    return !memcmp(box + PAYLOAD + (size_t)self->known[self->round] * self->each, box, PAYLOAD);
}

static void begin_round(Nodes *self, int round)
{
    self->round = round;
    self->fits = false;
    if (round < self->rounds) self->lane = self->current->lanes[round];
}

/* Begin to move what this node shows, once all of its ranks are here. */
static Stage await_node(Nodes *self, int64_t end)
{
    for (int place = 0; place < self->member_count; ++place)
        if (!wait_for_stamp(&self->slots, self->step, self->members[place], end)) return AWAITED;
    self->current = find_messages(self, (int)(self->step & 1), self->nbytes);
    if (self->current == NULL || !have_common(self)) return LEFT;
    self->each = self->current->parity < 0 ? whole(self->nbytes) : 0;
    pack(self);
    begin_round(self, 0);
    return MOVED;
}

/* Take the messages of all rounds. One is as long as it should be if its first piece fits. */
static Stage move(Nodes *self, int64_t end)
{
    while (self->round < self->rounds) {
        if (!self->fits && !have_come(self, 1, end)) return self->error ? LEFT : MOVED;
        if (!self->fits && !(self->fits = first_fits(self))) return LEFT;
        if (!have_come(self, INT_MAX, end)) return self->error ? LEFT : MOVED;
        add_record(self);
        begin_round(self, self->round + 1);
    }
    unpack(self);
    atomic_store_explicit(self->alike + (self->step & 1), 1, memory_order_relaxed);
    atomic_store_explicit(self->complete, self->step, memory_order_release);
    return SENT;
}

static Stage await_sends(Nodes *self, int64_t end)
{
    for (int round = 0; round < self->rounds; ++round)
        if (!are_sent(self, &self->current->lanes[round], end)) return self->error ? LEFT : SENT;
    return OVER;
}

/* Take the step as far as possible until a time, and return whether it is over. */
static bool advance(Nodes *self, int64_t end)
{
    if (self->stage == AWAITED) self->stage = await_node(self, end);
    if (self->stage == MOVED) self->stage = move(self, end);
    if (self->stage == SENT) self->stage = await_sends(self, end);
    return self->stage == OVER;
}

bool exchange_nodes(Nodes *self, int64_t step, Py_ssize_t nbytes, int64_t nanoseconds)
{
    const int64_t before = self->begun, now = self->begun = clock_now(), end = now + nanoseconds;
    if (self->members[0] != self->slots.rank)
        return wait_for_word(self->complete, step, end) && nodes_alike(self, step) && clock_now() < before + SOON;
    self->step = step;
    self->nbytes = nbytes;
    self->stage = AWAITED;
    self->round = -1;
    self->error = 0;
    return advance(self, end) && clock_now() < before + SOON;
}

static PyObject *nodes_advance(Nodes *self, PyObject *none)
{
    bool over;
    (void)none;
    Py_BEGIN_ALLOW_THREADS
    over = advance(self, 0);
    Py_END_ALLOW_THREADS
    return self->stage == LEFT ? Py_NewRef(Py_None) : PyBool_FromLong(over);
}

/* ---- the type ---------------------------------------------------------------------------------- */

static PyMethodDef nodes_methods[] = {
    {"add", (PyCFunction)(void (*)(void))nodes_add, METH_VARARGS,
     PyDoc_STR("add(nbytes, parity, lanes): take the addresses of prepared messages, a lane for each round with those of "
               "receives and sends in turn; 0 stands for none.")},
    {"clear", (PyCFunction)(void (*)(void))nodes_clear_messages, METH_NOARGS,
     PyDoc_STR("clear(): forget all messages.")},
    {"advance", (PyCFunction)(void (*)(void))nodes_advance, METH_NOARGS,
     PyDoc_STR("advance(): take the step under way further, and return whether it is over; None if Python has to go on.")},
    {"state", (PyCFunction)(void (*)(void))nodes_state, METH_NOARGS,
     PyDoc_STR("state(): return the round in which Python has to go on, -1 if none was begun, and MPI's error, or 0. The "
               "first piece of that round has come, and differs.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot nodes_slots[] = {
    {Py_tp_new, nodes_new},
    {Py_tp_dealloc, nodes_dealloc},
    {Py_tp_methods, nodes_methods},
    {0, NULL},
};

static PyType_Spec nodes_spec = {
    .name = "arraycomm._native.compiled.Nodes",
    .basicsize = sizeof(Nodes),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = nodes_slots,
};

int add_nodes(PyObject *module)
{
    return add_type(module, &nodes_spec, "Nodes", &nodes_type);
}
