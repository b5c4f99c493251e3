/* Where Python says that the segment lies, for the chunks that are reduced in it. */

#ifndef ARRAYCOMM_SEGMENT_H
#define ARRAYCOMM_SEGMENT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "chunks.h"

/* Go on with chunks of which only what is reduced is known, by a tuple of Python that says where: the slots, the segment,
 * the results, for each chunk whether to stream and room for two numbers; the bytes of a slot, rank, size, the bytes
 * of a row, whether results are large, the rows, the folded chunks and the first row; the turn and the step to go on from, and for how many nanoseconds. Return the turn and the step that were reached, or
 * NULL. */
PyObject *reduce_in_segment(Chunks *chunks, PyObject *place);

#endif
