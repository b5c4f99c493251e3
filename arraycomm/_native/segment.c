/* See segment.h. */

#include "segment.h"

#include "nodes.h"

/* The most rows of a rank whose messages are exchanged. */
enum { MOST_ROWS = 16 };

/* Read what exchanges the rows. */
static int read_messages(RowMessages *messages, PyObject *nodes, PyObject *requests, int rows, void **addresses)
{
    if (!PyObject_TypeCheck(nodes, nodes_type)) {
        PyErr_SetString(PyExc_TypeError, "nodes must be Nodes");
        return -1;
    }
    if (rows > MOST_ROWS || PySequence_Size(requests) != 2 * rows) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "each row must have a receive and a send");
        return -1;
    }
    for (int place = 0; place < 2 * rows; ++place) {
        PyObject *const item = PySequence_GetItem(requests, place);
        addresses[place] = item ? PyLong_AsVoidPtr(item) : NULL;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    messages->requests = addresses;
    get_functions((const Nodes *)nodes, &messages->start, &messages->test);
    return 0;
}

PyObject *reduce_in_segment(Chunks *chunks, PyObject *place)
{
    enum { SLOTS, SEGMENT, OUT, STREAMS, SECONDS, BUFFERS };
    PyObject *objects[BUFFERS], *result = NULL;
    Py_buffer buffers[BUFFERS];
    int taken = 0, large;
    Py_ssize_t slot, chunk, length, turn;
    long long step, nanoseconds;
    PyObject *nodes = NULL, *requests = NULL;
    void *addresses[2 * MOST_ROWS];
    RowMessages messages = {0};
    if (!PyArg_ParseTuple(place, "OOOOOniinnpiiinLL|OO", &objects[SLOTS], &objects[SEGMENT], &objects[OUT], &objects[STREAMS],
                          &objects[SECONDS], &slot, &chunks->slots.rank, &chunks->slots.size, &chunk, &length,
                          &large, &chunks->row_count, &chunks->folded_count, &chunks->first_row, &turn, &step, &nanoseconds,
                          &nodes, &requests))
        return NULL;
    if (requests) {
        if (read_messages(&messages, nodes, requests, chunks->row_count, addresses)) return NULL;
        messages.begun = (size_t)step;
        chunks->messages = &messages;
    }
    for (; taken < BUFFERS; ++taken)
        if (PyObject_GetBuffer(objects[taken], &buffers[taken], taken == STREAMS ? PyBUF_SIMPLE : PyBUF_WRITABLE)) goto end;
    const size_t own_chunk = chunks->chunk;
    chunks->slots.memory = buffers[SLOTS].buf;
    chunks->slots.slot = (size_t)slot;
    chunks->rows = buffers[SEGMENT].buf;
    chunks->chunk = (size_t)chunk;
    chunks->length = (size_t)length;
    chunks->large = large;
    chunks->out = buffers[OUT].buf;
    chunks->streams = buffers[STREAMS].buf;
    chunks->seconds = buffers[SECONDS].buf;
    const int rank = chunks->slots.rank, size = chunks->slots.size;
    const Py_ssize_t count = buffers[STREAMS].len;
    bool fit = size > 0 && size <= MOST_RANKS && rank >= 0 && rank < size && slot >= PAYLOAD && slot % 8 == 0 &&
               (uintptr_t)chunks->slots.memory % 8 == 0 && buffers[SLOTS].len / 2 / size >= slot && turn >= 0 &&
               length > 0 && length <= chunk && length % 64 == 0 && chunk % 64 == 0 && chunks->row_count > 0 && chunks->folded_count > 0 && chunks->first_row >= 0;
    fit = fit && buffers[SEGMENT].len / chunk >= (Py_ssize_t)chunks->row_count * size + chunks->folded_count &&
          buffers[SECONDS].len / 2 / (Py_ssize_t)sizeof(double) >= count;
    if (fit && chunks->tree)
        fit = (size_t)count == chunks->count && (size_t)buffers[OUT].len == chunks->nbytes && (size_t)chunk == own_chunk;
    if (fit && !chunks->tree) {
        chunks->count = (size_t)count;
        fit = (size_t)buffers[OUT].len == chunks->nbytes && (chunks->nbytes + (size_t)length - 1) / (size_t)length == (size_t)count;
    }
    fit = fit && step >= 0 && (!requests || size == 2);
    if (!fit) {
        PyErr_SetString(PyExc_ValueError, "the chunks are not as the segment has them");
        goto end;
    }
    int64_t last = step;
    size_t reached;
    Py_BEGIN_ALLOW_THREADS
    const int64_t end = clock_now() + nanoseconds;
    reached = requests ? exchange_chunks(chunks, (size_t)turn, end) : make_turns(chunks, (size_t)turn, &last, end);
    Py_END_ALLOW_THREADS
    if (requests) last = messages.error ? -(int64_t)messages.error : (int64_t)messages.begun;
    result = Py_BuildValue("nL", (Py_ssize_t)reached, (long long)last);
end:
    while (taken) PyBuffer_Release(&buffers[--taken]);
    return result;
}
