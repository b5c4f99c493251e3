/* What Python sees of the native part: folds here, the exchange of slots in exchange.c, that between nodes in
 * nodes.c, and leaves in leaves.c.
 *
 * Only the limited API of Python 3.11 is used, so that one build serves every later version with the GIL, and no
 * header of NumPy: arrays come in by the buffer protocol. What threads share without the GIL, they change with
 * the turn of a communicator, in a critical section, or as an atomic. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "device.h"
#include "ending.h"
#include "exchange.h"
#include "folds.h"
#include "leaves.h"
#include "nodes.h"
#include "pool.h"
#include "segment.h"
#include "slots.h"
#include "turns.h"

/* Up to this many rows need no memory of their own; with fewer bytes, letting other threads run takes
 * longer than the fold. */
enum { FEW_ROWS = 8, MANY_BYTES = 64 << 10 };

typedef struct {
    Py_buffer few[2 * FEW_ROWS], *all;
    Py_ssize_t count;
} Buffers;

static void release(Buffers *buffers)
{
    while (buffers->count) PyBuffer_Release(&buffers->all[--buffers->count]);
    if (buffers->all != buffers->few) PyMem_Free(buffers->all);
}

static int make_room(Buffers *buffers, Py_ssize_t count)
{
    buffers->count = 0;
    buffers->all = buffers->few;
    if (count <= 2 * FEW_ROWS) return 0;
    buffers->all = PyMem_Calloc((size_t)count, sizeof(Py_buffer));
    if (buffers->all) return 0;
    PyErr_NoMemory();
    buffers->all = buffers->few;
    return -1;
}

/* Take the memory of one more array, which has to be contiguous. */
static int take(Buffers *buffers, PyObject *array, int flags)
{
    if (PyObject_GetBuffer(array, &buffers->all[buffers->count], flags)) return -1;
    ++buffers->count;
    return 0;
}

static int take_all(Buffers *buffers, PyObject *arrays, Py_ssize_t count, int flags)
{
    for (Py_ssize_t place = 0; place < count; ++place) {
        PyObject *array = PySequence_GetItem(arrays, place);
        const int failed = array == NULL || take(buffers, array, flags);
        Py_XDECREF(array);
        if (failed) return -1;
    }
    return 0;
}

/* Take the rows of one array, each of which has to be contiguous; the caller keeps the array. */
static int take_rows(Buffers *buffers, PyObject *array)
{
    Py_buffer whole;
    if (PyObject_GetBuffer(array, &whole, PyBUF_STRIDES)) return -1;
    Py_ssize_t nbytes = whole.itemsize;
    bool contiguous = whole.ndim > 0;
    for (int axis = whole.ndim - 1; axis > 0; --axis) {
        contiguous = contiguous && (whole.strides[axis] == nbytes || whole.shape[axis] <= 1);
        nbytes *= whole.shape[axis];
    }
    for (Py_ssize_t row = 0; contiguous && row < whole.shape[0]; ++row) {
        Py_buffer *taken = &buffers->all[buffers->count++];
        *taken = (Py_buffer){.buf = (char *)whole.buf + row * whole.strides[0], .len = nbytes};
    }
    PyBuffer_Release(&whole);
    if (!contiguous) PyErr_SetString(PyExc_ValueError, "each row must be contiguous");
    return contiguous ? 0 : -1;
}

static bool overlap(const Py_buffer *one, const Py_buffer *other)
{
    const uintptr_t a = (uintptr_t)one->buf, b = (uintptr_t)other->buf;
    return a < b + (uintptr_t)other->len && b < a + (uintptr_t)one->len;
}

/* Rows come first, then `outs` arrays that are written, and then what else is read; an element of each has this many bytes. */
static int check_rows(const Buffers *buffers, Py_ssize_t rows, Py_ssize_t outs, size_t row_size, size_t out_size, size_t other_size)
{
    const Py_buffer *const all = buffers->all;
    const size_t count = (size_t)all[0].len / row_size;
    for (Py_ssize_t place = 0; place < buffers->count; ++place) {
        const size_t size = place < rows ? row_size : place < rows + outs ? out_size : other_size;
        if ((size_t)all[place].len != count * size) {
            PyErr_SetString(PyExc_ValueError, "rows, totals and results must have the same elements");
            return -1;
        }
    }
    for (Py_ssize_t out = rows; count && out < rows + outs; ++out) {
        for (Py_ssize_t read = 0; read < buffers->count; ++read) {
            if ((read < rows || read >= rows + outs) && overlap(&all[out], &all[read])) {
                PyErr_SetString(PyExc_ValueError, "a result must not overlap a row or a total");
                return -1;
            }
        }
    }
    return 0;
}

/* Fold the rows, which come first, into what comes behind them. */
static int run(const Buffers *buffers, int fold, Earlier earlier, Py_ssize_t rows, bool every)
{
    const void *few[2 * FEW_ROWS];
    const void **addresses = few;
    if (buffers->all != buffers->few) addresses = PyMem_Calloc((size_t)buffers->count, sizeof(void *));
    if (addresses == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t place = 0; place < buffers->count; ++place) addresses[place] = buffers->all[place].buf;
    const size_t nbytes = (size_t)buffers->all[0].len, count = nbytes / fold_itemsize(fold);
    void *const *outs = (void *const *)(addresses + rows);
    if (nbytes * (size_t)rows < MANY_BYTES) {
        run_fold(fold, earlier, addresses, (int)rows, outs, every, count);
    } else {
        Py_BEGIN_ALLOW_THREADS
        run_fold(fold, earlier, addresses, (int)rows, outs, every, count);
        Py_END_ALLOW_THREADS
    }
    if (addresses != few) PyMem_Free(addresses);
    return 0;
}

static int fold_number(PyObject *object)
{
    const long fold = PyLong_AsLong(object);
    if (fold >= 0 && fold < DTYPES * OPS) return (int)fold;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "no fold has the number %ld", fold);
    return -1;
}

/* Fold rows, a sequence or one array, into one result, or into as many results as rows; onto a total unless it is None. */
static PyObject *reduce_rows(int fold, PyObject *arrays, PyObject *outs, bool every, PyObject *total, int before, bool more)
{
    const Py_ssize_t rows = fold < 0 ? -1 : PySequence_Size(arrays);
    if (rows < 0) return NULL;
    if (rows == 0 || before < 0 || (every && PySequence_Size(outs) != rows))
        return PyErr_Format(PyExc_ValueError, "there must be a row, and as many results as rows");
    const size_t itemsize = fold_itemsize(fold), total_size = fold_total_size(fold);
    const bool begins = total == Py_None;
    if (!goes_on(fold) && (more || !begins)) return PyErr_Format(PyExc_ValueError, "an exact sum takes all rows at once");
    Buffers buffers;
    PyObject *result = NULL;
    if (make_room(&buffers, every ? 2 * rows : rows + 2)) return NULL;
    if (PyObject_CheckBuffer(arrays) ? take_rows(&buffers, arrays) : take_all(&buffers, arrays, rows, PyBUF_SIMPLE)) goto end;
    if (every ? take_all(&buffers, outs, rows, PyBUF_WRITABLE) : take(&buffers, outs, PyBUF_WRITABLE)) goto end;
    if (!begins && take(&buffers, total, PyBUF_SIMPLE)) goto end;
    if (check_rows(&buffers, rows, every ? rows : 1, itemsize, more ? total_size : itemsize, total_size)) goto end;
    const Earlier earlier = {begins ? NULL : buffers.all[rows + 1].buf, before, more};
    if (run(&buffers, fold, earlier, rows, every) == 0) result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

static PyObject *py_fold(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "takes a fold, rows, and what is written");
    return reduce_rows(fold_number(args[0]), args[1], args[2], false, Py_None, 0, false);
}

static PyObject *py_prefixes(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "takes a fold, rows, and what is written");
    return reduce_rows(fold_number(args[0]), args[1], args[2], true, Py_None, 0, false);
}

static PyObject *py_fold_on(PyObject *module, PyObject *args)
{
    PyObject *number, *total, *arrays, *out;
    int before, more;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOiOOp", &number, &total, &before, &arrays, &out, &more)) return NULL;
    return reduce_rows(fold_number(number), arrays, out, false, total, before, more);
}

/* Add the rows of an array to words, or round those of each element. */
static PyObject *with_words(PyObject *args, bool rounds)
{
    PyObject *number, *x, *memory, *result = NULL;
    Py_ssize_t columns = 1;
    Py_buffer elements = {0}, words = {0};
    if (!PyArg_ParseTuple(args, rounds ? "OOO" : "OOOn", &number, &x, &memory, &columns)) return NULL;
    const int fold = fold_number(number);
    if (fold < 0 || PyObject_GetBuffer(x, &elements, rounds ? PyBUF_WRITABLE : PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(memory, &words, PyBUF_WRITABLE)) goto end;
    const size_t nbytes = (size_t)elements.len, size = fold_itemsize(fold), each = exact_words(fold) * sizeof(int64_t);
    const size_t many = columns > 0 ? (size_t)columns : 0, places = rounds ? nbytes / size : many;
    if (many == 0 || goes_on(fold) || nbytes % (size * many) || (size_t)words.len != places * each ||
        (uintptr_t)words.buf % sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "there must be whole rows, and the words of an exact sum for each column");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    if (rounds) run_round_words(fold, words.buf, elements.buf, places);
    else run_add_rows(fold, elements.buf, nbytes / (size * many), many, words.buf);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    if (words.obj) PyBuffer_Release(&words);
    PyBuffer_Release(&elements);
    return result;
}

static PyObject *py_add_rows(PyObject *module, PyObject *args)
{
    (void)module;
    return with_words(args, false);
}

static PyObject *py_round_words(PyObject *module, PyObject *args)
{
    (void)module;
    return with_words(args, true);
}

static PyObject *py_copy(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers;
    PyObject *result = NULL;
    (void)module;
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "copy takes out and x");
    if (make_room(&buffers, 2)) return NULL;
    if (take(&buffers, args[1], PyBUF_SIMPLE) || take(&buffers, args[0], PyBUF_WRITABLE)) goto end;
    if (check_rows(&buffers, 1, 1, 1, 1, 1)) goto end;
    Py_BEGIN_ALLOW_THREADS
    stream_copy(buffers.all[1].buf, buffers.all[0].buf, (size_t)buffers.all[0].len);
    end_stream();
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

static PyObject *py_reduce_chunks(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *place, *x, *fold, *result = NULL;
    Py_buffer buffer;
    Chunks chunks = {0};
    if (!PyArg_ParseTuple(args, "O!OO", &PyTuple_Type, &place, &x, &fold)) return NULL;
    chunks.fold = fold_number(fold);
    if (chunks.fold < 0 || PyObject_GetBuffer(x, &buffer, PyBUF_SIMPLE)) return NULL;
    chunks.x = buffer.buf;
    chunks.nbytes = (size_t)buffer.len;
    if (chunks.nbytes % fold_itemsize(chunks.fold) == 0) result = reduce_in_segment(&chunks, place);
    else PyErr_SetString(PyExc_ValueError, "an array must have whole elements");
    PyBuffer_Release(&buffer);
    return result;
}

static PyObject *py_find_fold(PyObject *module, PyObject *args)
{
    const char *op, *dtype;
    (void)module;
    if (!PyArg_ParseTuple(args, "ss", &op, &dtype)) return NULL;
    return PyLong_FromLong(find_fold(op, dtype));
}

/* Wait for all ranks' slots beside other threads, without the GIL, after this many seconds have been waited, and at most this many. */
static PyObject *py_wait_aside(PyObject *module, PyObject *args)
{
    PyObject *memory, *flag;
    Py_buffer slots, woken;
    Py_ssize_t slot;
    int size;
    long long step;
    double waited, seconds;
    (void)module;
    if (!PyArg_ParseTuple(args, "OinLddO", &memory, &size, &slot, &step, &waited, &seconds, &flag)) return NULL;
    if (PyObject_GetBuffer(memory, &slots, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(flag, &woken, PyBUF_WRITABLE)) {
        PyBuffer_Release(&slots);
        return NULL;
    }
    bool done = false;
    const bool fits = size > 0 && slot >= PAYLOAD && slot % 8 == 0 && slots.len / 2 / size >= slot &&
                      (uintptr_t)slots.buf % 8 == 0 && woken.len == 4 && (uintptr_t)woken.buf % 4 == 0;
    if (fits) {
        const Slots all = {slots.buf, (size_t)slot, 0, size};
        const int64_t now = clock_now();
        Py_BEGIN_ALLOW_THREADS
        done = wait_aside(&all, step, now - (int64_t)(1e9 * waited), now + (int64_t)(1e9 * seconds), woken.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&woken);
    PyBuffer_Release(&slots);
    if (!fits) return PyErr_Format(PyExc_ValueError, "the slots are not as the control channel has them");
    return PyBool_FromLong(done);
}

static PyObject *py_fence_everywhere(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    Py_BEGIN_ALLOW_THREADS
    fence_everywhere();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_levels(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    PyObject *names = PyList_New(0);
    for (int level = 0; names && level < level_count(); ++level) {
        PyObject *name = PyUnicode_FromString(level_names[level]);
        if (name == NULL || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *py_use_level(PyObject *module, PyObject *number)
{
    (void)module;
    const long level = PyLong_AsLong(number), before = current_level();
    if (PyErr_Occurred()) return NULL;
    if (level < 0 || level >= level_count()) return PyErr_Format(PyExc_ValueError, "no level %ld", level);
    use_level((int)level);
    return PyLong_FromLong(before);
}

static PyObject *py_use_threads(PyObject *module, PyObject *number)
{
    (void)module;
    const long limit = PyLong_AsLong(number), before = thread_limit();
    if (PyErr_Occurred()) return NULL;
    if (limit < 1 || limit > MOST_THREADS)
        return PyErr_Format(PyExc_ValueError, "there may be 1 to %d threads, not %ld", MOST_THREADS, limit);
    use_threads((int)limit);
    return PyLong_FromLong(before);
}

static PyMethodDef methods[] = {
    {"find_fold", py_find_fold, METH_VARARGS,
     PyDoc_STR("find_fold(op, dtype): return the number of a reduction, or -1.")},
    {"fold", (PyCFunction)(void (*)(void))py_fold, METH_FASTCALL,
     PyDoc_STR("fold(number, rows, out): write the fold of the rows, a sequence or one array, in their order, to `out`.")},
    {"fold_on", py_fold_on, METH_VARARGS,
     PyDoc_STR("fold_on(number, total, before, rows, out, more): fold rows, a sequence or one array, onto the total of as many before, or None; "
               "`out` gets a total if more rows are to come.")},
    {"prefixes", (PyCFunction)(void (*)(void))py_prefixes, METH_FASTCALL,
     PyDoc_STR("prefixes(number, rows, outs): write the fold of the rows up to row k to `outs[k]`.")},
    {"add_rows", py_add_rows, METH_VARARGS,
     PyDoc_STR("add_rows(number, x, words, columns): add the rows of an array to the words of each column's exact sum.")},
    {"round_words", py_round_words, METH_VARARGS,
     PyDoc_STR("round_words(number, out, words): round the exact sum of each element, whose words change.")},
    {"copy", (PyCFunction)(void (*)(void))py_copy, METH_FASTCALL,
     PyDoc_STR("copy(out, x): copy past the caches, for another core to read.")},
    {"reduce_chunks", py_reduce_chunks, METH_VARARGS,
     PyDoc_STR("reduce_chunks(place, x, fold): reduce an array in a segment; see segment.h for the place and what is returned.")},
    {"wait_aside", py_wait_aside, METH_VARARGS,
     PyDoc_STR("wait_aside(slots, size, slot, step, waited, seconds, woken): wait beside other threads until all ranks have posted a step.")},
    {"fence_everywhere", py_fence_everywhere, METH_NOARGS,
     PyDoc_STR("fence_everywhere(): have all threads of the machine show what they wrote before; it takes milliseconds.")},
    {"levels", py_levels, METH_NOARGS,
     PyDoc_STR("levels(): return the names of the instruction sets that folds can use here.")},
    {"use_level", py_use_level, METH_O,
     PyDoc_STR("use_level(number): have folds use that instruction set; return the number before.")},
    {"use_threads", py_use_threads, METH_O,
     PyDoc_STR("use_threads(limit): have a large fold take this many threads at most; return the limit before.")},
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module)
{
    use_level(level_count() - 1);
    if (PyModule_AddStringConstant(module, "sources", SOURCES)) return -1;
    return add_nodes(module) || add_turns(module) || add_exchange(module) || add_leaves(module) || add_ending(module) || add_device(module) ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, exec_module},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "arraycomm._native.compiled",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_compiled(void)
{
    return PyModuleDef_Init(&definition);
}
