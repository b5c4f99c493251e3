/* See segment.h. */

#include "segment.h"

PyObject *reduce_in_segment(Chunks *chunks, PyObject *place)
{
    enum { SLOTS, SEGMENT, OUT, STREAMS, SECONDS, BUFFERS };
    PyObject *objects[BUFFERS], *result = NULL;
    Py_buffer buffers[BUFFERS];
    int taken = 0, large;
    Py_ssize_t slot, chunk, turn;
    long long step, nanoseconds;
    if (!PyArg_ParseTuple(place, "OOOOOniinpiinLL", &objects[SLOTS], &objects[SEGMENT], &objects[OUT], &objects[STREAMS],
                          &objects[SECONDS], &slot, &chunks->slots.rank, &chunks->slots.size, &chunk,
                          &large, &chunks->row_count, &chunks->folded_count, &turn, &step, &nanoseconds))
        return NULL;
    for (; taken < BUFFERS; ++taken)
        if (PyObject_GetBuffer(objects[taken], &buffers[taken], taken == STREAMS ? PyBUF_SIMPLE : PyBUF_WRITABLE)) goto end;
    const size_t own_chunk = chunks->chunk;
    chunks->slots.memory = buffers[SLOTS].buf;
    chunks->slots.slot = (size_t)slot;
    chunks->rows = buffers[SEGMENT].buf;
    chunks->chunk = (size_t)chunk;
    chunks->large = large;
    chunks->out = buffers[OUT].buf;
    chunks->streams = buffers[STREAMS].buf;
    chunks->seconds = buffers[SECONDS].buf;
    const int rank = chunks->slots.rank, size = chunks->slots.size;
    const Py_ssize_t count = buffers[STREAMS].len;
    bool fit = size > 0 && rank >= 0 && rank < size && slot >= PAYLOAD && slot % 8 == 0 &&
               (uintptr_t)chunks->slots.memory % 8 == 0 && buffers[SLOTS].len / 2 / size >= slot && turn >= 0 &&
               chunk > 0 && chunk % 64 == 0 && chunks->row_count > 0 && chunks->folded_count > 0;
    fit = fit && buffers[SEGMENT].len / chunk >= (Py_ssize_t)chunks->row_count * size + chunks->folded_count &&
          buffers[SECONDS].len / 2 / (Py_ssize_t)sizeof(double) >= count;
    if (fit && chunks->tree)
        fit = (size_t)count == chunks->count && (size_t)buffers[OUT].len == chunks->nbytes && (size_t)chunk == own_chunk;
    if (fit && !chunks->tree) {
        chunks->count = (size_t)count;
        fit = (size_t)buffers[OUT].len == chunks->nbytes && (chunks->nbytes + (size_t)chunk - 1) / (size_t)chunk == (size_t)count;
    }
    if (!fit || step < 0) {
        PyErr_SetString(PyExc_ValueError, "the chunks are not as the segment has them");
        goto end;
    }
    chunks->addresses = PyMem_Calloc((size_t)size, sizeof(void *));
    if (chunks->addresses == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    int64_t last = step;
    size_t reached;
    Py_BEGIN_ALLOW_THREADS
    const int64_t end = clock_now() + nanoseconds;
    reached = make_turns(chunks, (size_t)turn, &last, end);
    Py_END_ALLOW_THREADS
    PyMem_Free(chunks->addresses);
    result = Py_BuildValue("nL", (Py_ssize_t)reached, (long long)last);
end:
    while (taken) PyBuffer_Release(&buffers[--taken]);
    return result;
}
