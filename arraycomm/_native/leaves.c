/* See leaves.h.
 *
 * `hold` takes the memory of all leaves of a tree at once, if they are what the caller expects. Many leaves are
 * then copied or reduced in one call. Which of their bytes, and where these lie, says a table of parts. */

#include "leaves.h"

#include <stdint.h>
#include <string.h>

#include "folds.h"
#include "segment.h"

typedef struct {
    PyObject ob_base;
    Py_ssize_t count;
    Py_buffer *leaves;
} Leaves;

PyObject *dtype_name;
static PyTypeObject *leaves_type;

static void leaves_dealloc(Leaves *self)
{
    PyTypeObject *const type = Py_TYPE((PyObject *)self);
    while (self->count) PyBuffer_Release(&self->leaves[--self->count]);
    PyMem_Free(self->leaves);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

/* ---- taking the memory ------------------------------------------------------------------------- */

bool has_dtype(PyObject *array, PyObject *dtype)
{
    PyObject *const found = PyObject_GetAttr(array, dtype_name);
    if (found == NULL) PyErr_Clear();
    Py_XDECREF(found);
    return found == dtype;
}

static bool has_shape(const Py_buffer *buffer, PyObject *shape)
{
    if (PyTuple_Size(shape) != buffer->ndim) return false;
    for (int axis = 0; axis < buffer->ndim; ++axis)
        if (PyLong_AsSsize_t(PyTuple_GetItem(shape, axis)) != buffer->shape[axis]) return false;
    return true;
}

static bool hold_one(Leaves *self, PyObject *array, PyObject *type, PyObject *dtype, PyObject *shape)
{
    Py_buffer *const buffer = &self->leaves[self->count];
    if ((PyObject *)Py_TYPE(array) != type || !has_dtype(array, dtype)) return false;
    if (PyObject_GetBuffer(array, buffer, PyBUF_ND)) {
        PyErr_Clear();
        return false;
    }
    ++self->count;
    return has_shape(buffer, shape);
}

static PyObject *py_hold(PyObject *module, PyObject *args)
{
    PyObject *type, *arrays, *dtypes, *shapes;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!O!O!", &type, &PyList_Type, &arrays, &PyTuple_Type, &dtypes, &PyTuple_Type,
                          &shapes))
        return NULL;
    const Py_ssize_t count = PyTuple_Size(dtypes);
    if (PyTuple_Size(shapes) != count) return PyErr_Format(PyExc_ValueError, "a leaf has one dtype and one shape");
    if (PyList_Size(arrays) != count) Py_RETURN_NONE;
    Leaves *self = (Leaves *)PyType_GenericAlloc(leaves_type, 0);
    if (self == NULL) return NULL;
    self->leaves = PyMem_Calloc((size_t)count + 1, sizeof(Py_buffer));
    bool held = self->leaves != NULL;
    for (Py_ssize_t leaf = 0; held && leaf < count; ++leaf)
        held = hold_one(self, PyList_GetItem(arrays, leaf), type, PyTuple_GetItem(dtypes, leaf),
                        PyTuple_GetItem(shapes, leaf));
    if (held) return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* ---- copying ----------------------------------------------------------------------------------- */

/* Whether a part lies in the leaves and in `room` bytes, as whole elements. */
static bool lies_in(const Leaves *self, const Part *part, int64_t room, int64_t itemsize)
{
    return part->leaf >= 0 && part->leaf < self->count && part->first >= 0 && part->nbytes >= 0 && part->at >= 0 &&
           part->nbytes <= self->leaves[part->leaf].len - part->first && part->nbytes <= room - part->at &&
           part->nbytes % itemsize == 0;
}

/* Take a table whose parts lie in the leaves and in `room` bytes; the parts' number, or -1. */
static Py_ssize_t take_parts(const Leaves *self, PyObject *table, Py_ssize_t room, Py_buffer *buffer)
{
    if (PyObject_GetBuffer(table, buffer, PyBUF_SIMPLE)) return -1;
    const Part *const parts = buffer->buf;
    const Py_ssize_t count = buffer->len / (Py_ssize_t)sizeof(Part);
    bool fit = (uintptr_t)parts % sizeof(int64_t) == 0 && buffer->len % (Py_ssize_t)sizeof(Part) == 0;
    for (Py_ssize_t place = 0; fit && place < count; ++place) fit = lies_in(self, &parts[place], room, 1);
    if (fit) return count;
    PyBuffer_Release(buffer);
    PyErr_SetString(PyExc_ValueError, "the parts do not lie in the leaves and in the memory for them");
    return -1;
}

static PyObject *leaves_fill(Leaves *self, PyObject *args)
{
    PyObject *into, *table;
    Py_buffer row, parts;
    if (!PyArg_ParseTuple(args, "OO", &into, &table) || PyObject_GetBuffer(into, &row, PyBUF_WRITABLE)) return NULL;
    const Py_ssize_t count = take_parts(self, table, row.len, &parts);
    if (count >= 0) {
        Py_BEGIN_ALLOW_THREADS
        for (const Part *part = parts.buf; part < (const Part *)parts.buf + count; ++part)
            memcpy((char *)row.buf + part->at, (const char *)self->leaves[part->leaf].buf + part->first, (size_t)part->nbytes);
        Py_END_ALLOW_THREADS
        PyBuffer_Release(&parts);
    }
    PyBuffer_Release(&row);
    return count < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- chunks in the segment --------------------------------------------------------------------- */

/* Whether the results of a part can be written where it says: to leaves, or to `nbytes` for all results. */
static bool can_take(const Leaves *self, const Part *part, int64_t room, int64_t itemsize, int64_t nbytes)
{
    if (part->leaf != RESULTS) return lies_in(self, part, room, itemsize) && !self->leaves[part->leaf].readonly;
    return part->first >= 0 && part->nbytes >= 0 && part->at >= 0 && part->nbytes <= nbytes - part->first &&
           part->nbytes <= room - part->at;
}

/* Whether the parts of all chunks lie in the leaves, in the chunks and in the results. */
static bool has_parts(const Leaves *self, const Chunks *chunks, size_t parts)
{
    for (size_t number = 0; number < chunks->count; ++number) {
        const TreeChunk in = chunks->tree[number];
        if (in.nbytes <= 0 || (size_t)in.nbytes > chunks->chunk || in.fold < 0 || in.fold >= DTYPES * OPS) return false;
        if (in.others < 0 || in.own < in.others || in.results < in.own || in.end < in.results) return false;
        if ((size_t)in.end > parts) return false;
        const int64_t itemsize = (int64_t)fold_itemsize((int)in.fold);
        const Part *part = chunks->parts + in.others;
        for (; part < chunks->parts + in.results; ++part)
            if (!lies_in(self, part, in.nbytes, itemsize)) return false;
        for (; part < chunks->parts + in.end; ++part)
            if (!can_take(self, part, in.nbytes, itemsize, (int64_t)chunks->nbytes)) return false;
    }
    return true;
}

static PyObject *leaves_reduce(Leaves *self, PyObject *args)
{
    PyObject *place, *tables[2], *result = NULL;
    Py_buffer tree, parts;
    Py_ssize_t chunk, nbytes;
    if (!PyArg_ParseTuple(args, "O!OOnn", &PyTuple_Type, &place, &tables[0], &tables[1], &chunk, &nbytes)) return NULL;
    if (PyObject_GetBuffer(tables[0], &tree, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(tables[1], &parts, PyBUF_SIMPLE)) {
        PyBuffer_Release(&tree);
        return NULL;
    }
    char **addresses = PyMem_Calloc((size_t)self->count + 1, sizeof(char *));
    Chunks chunks = {.tree = tree.buf, .parts = parts.buf, .leaves = addresses, .nbytes = (size_t)nbytes};
    chunks.chunk = (size_t)chunk;
    chunks.count = (size_t)tree.len / sizeof(TreeChunk);
    const bool aligned = (uintptr_t)tree.buf % sizeof(int64_t) == 0 && (uintptr_t)parts.buf % sizeof(int64_t) == 0;
    if (addresses == NULL) {
        PyErr_NoMemory();
    } else if (!aligned || !chunks.count || chunk <= 0 || nbytes < 0 ||
               !has_parts(self, &chunks, (size_t)parts.len / sizeof(Part))) {
        PyErr_SetString(PyExc_ValueError, "the parts do not lie in the leaves and in the chunks");
    } else {
        for (Py_ssize_t leaf = 0; leaf < self->count; ++leaf) addresses[leaf] = self->leaves[leaf].buf;
        result = reduce_in_segment(&chunks, place);
    }
    PyMem_Free(addresses);
    PyBuffer_Release(&parts);
    PyBuffer_Release(&tree);
    return result;
}

static PyMethodDef leaves_methods[] = {
    {"fill", (PyCFunction)(void (*)(void))leaves_fill, METH_VARARGS,
     PyDoc_STR("fill(row, parts): copy parts of the leaves into a row.")},
    {"reduce", (PyCFunction)(void (*)(void))leaves_reduce, METH_VARARGS,
     PyDoc_STR("reduce(place, tree, parts, chunk, nbytes): reduce the leaves in a segment by tables of chunks and of parts, in chunks of at most this "
               "many bytes, with this many bytes of results; see segment.h for the place and what is returned.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot leaves_slots[] = {
    {Py_tp_dealloc, leaves_dealloc},
    {Py_tp_methods, leaves_methods},
    {0, NULL},
};

static PyType_Spec leaves_spec = {
    .name = "arraycomm._native.compiled.Leaves",
    .basicsize = sizeof(Leaves),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = leaves_slots,
};

static PyMethodDef functions[] = {
    {"hold", py_hold, METH_VARARGS,
     PyDoc_STR("hold(type, arrays, dtypes, shapes): take the memory of arrays; None if one is not of this type, dtype "
               "and shape, or not contiguous.")},
    {NULL, NULL, 0, NULL},
};

int add_leaves(PyObject *module)
{
    dtype_name = PyUnicode_InternFromString("dtype");
    leaves_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &leaves_spec, NULL);
    return dtype_name && leaves_type ? PyModule_AddFunctions(module, functions) : -1;
}
