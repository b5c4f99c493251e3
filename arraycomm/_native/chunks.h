/* The reduction of an array in the segment that the ranks of a node share, chunk by chunk; see
 * _collectives/segment.py, which says what lies where and when. Nothing here knows of Python. */

#ifndef ARRAYCOMM_CHUNKS_H
#define ARRAYCOMM_CHUNKS_H

#include "slots.h"

enum { MOST_RANKS = 64 };

typedef struct {
    Slots slots;
    /* For each of `row_count` chunks a row of each rank, and behind them `folded_count` folded chunks. */
    char *rows;
    size_t chunk; /* bytes */
    int row_count, folded_count;
    int fold, first_row;
    /* Whether results are written past the caches. */
    bool large;
    const char *x;
    char *out;
    size_t nbytes;
    /* For each chunk: whether it is copied in past the caches, and where the seconds go that a byte took to be copied
     * in and to be folded. */
    const char *streams;
    double *seconds;
} Chunks;

/* How many chunks there are. Turn k publishes chunk k, and folds and takes those before; there are two more turns. */
size_t chunk_count(const Chunks *chunks);

/* Go on from a turn, whose chunk is published if it is not the first one; `step` is the last step that was posted.
 * Return the turn in which other ranks are missing, or that is begun after `end`; or the one behind the last. */
size_t make_turns(const Chunks *chunks, size_t turn, int64_t *step, int64_t end);

#endif
