/* The reduction of an array in the segment that the ranks of a node share, chunk by chunk; see
 * _reduce/segment.py, which says what lies where and when. Nothing
 * here knows of Python. */

#ifndef ARRAYCOMM_CHUNKS_H
#define ARRAYCOMM_CHUNKS_H

#include "slots.h"

/* The leaf that stands for the memory of the results. */
enum { RESULTS = -1 };

/* The bytes of a leaf from `first`, and where they begin in a chunk. */
typedef struct {
    int64_t leaf, first, nbytes, at;
} Part;

/* A chunk of a tree: its bytes, its fold, and where its parts begin: first those that others fold, from `own` on those
 * that this rank folds, and from `results` to `end` those to which results are copied. */
typedef struct {
    int64_t nbytes, fold, others, own, results, end;
} TreeChunk;

typedef struct {
    Slots slots;
    /* For each of `row_count` chunks a row of each rank, and behind them `folded_count` folded chunks. A call begins with the
     * first of them: whoever has all results knows that all ranks have folded what they fold of the last chunk. */
    char *rows;
    size_t chunk; /* the bytes of a row, and of an array in a chunk */
    int row_count, folded_count;
    /* Whether results are written past the caches. */
    bool large;
    char *out;
    const void **addresses; /* room for one of each rank */
    /* How many chunks there are. Turn k publishes chunk k, and folds and takes those before; there are two more turns. */
    size_t count;
    /* For each chunk: whether it is copied in past the caches, and where the seconds go that a byte took to be copied
     * in and to be folded. */
    const char *streams;
    double *seconds;
    /* An array; or the leaves of a tree, with their parts and chunks. */
    const char *x;
    size_t nbytes;
    int fold;
    char *const *leaves;
    const Part *parts;
    const TreeChunk *tree;
} Chunks;

/* Go on from a turn, whose chunk is published if it is not the first one; `step` is the last step that was posted.
 * Return the turn in which other ranks are missing, or that is begun after `end`; or the one behind the last. */
size_t make_turns(const Chunks *chunks, size_t turn, int64_t *step, int64_t end);

#endif
