/* See chunks.h. */

#include "chunks.h"
#include "folds.h"

#include <sched.h>
#include <string.h>

/* Looks at the stamps before the core is given up in between; and nanoseconds after which Python goes on waiting. */
enum { LOOKS = 1000, LONGEST_WAIT = 1000000 };

/* Which bytes of an array a chunk has, and which of the chunk's a rank folds of it and does not publish; of a tree only how
 * many it has. */
typedef struct {
    size_t start, nbytes, own, own_end;
} Span;

static Span span_of(const Chunks *chunks, size_t number)
{
    if (chunks->tree) return (Span){0, (size_t)chunks->tree[number].nbytes, 0, 0};
    const size_t start = number * chunks->chunk, left = chunks->nbytes - start;
    const size_t nbytes = left < chunks->chunk ? left : chunks->chunk, itemsize = fold_itemsize(chunks->fold);
    const size_t count = nbytes / itemsize, rank = (size_t)chunks->slots.rank, size = (size_t)chunks->slots.size;
    return (Span){start, nbytes, count * rank / size * itemsize, count * (rank + 1) / size * itemsize};
}

static char *memory_of(const Chunks *chunks, const Part *part)
{
    return (part->leaf == RESULTS ? chunks->out : chunks->leaves[part->leaf]) + part->first;
}

static char *row_of(const Chunks *chunks, size_t number, int rank)
{
    return chunks->rows + (number % (size_t)chunks->row_count * (size_t)chunks->slots.size + (size_t)rank) * chunks->chunk;
}

static char *folded_of(const Chunks *chunks, size_t number)
{
    const size_t rows = (size_t)chunks->row_count * (size_t)chunks->slots.size;
    return chunks->rows + (rows + (number + 1) % (size_t)chunks->folded_count) * chunks->chunk;
}

static void copy(bool streams, char *out, const char *from, size_t nbytes)
{
    if (streams) stream_copy(out, from, nbytes);
    else memcpy(out, from, nbytes);
}

/* What a byte took since a time, if it is to be known. */
static void note(const Chunks *chunks, size_t number, int which, int64_t since)
{
    const double nbytes = (double)span_of(chunks, number).nbytes;
    chunks->seconds[2 * number + (size_t)which] = (double)(clock_now() - since) / 1e9 / nbytes;
}

static void publish(const Chunks *chunks, size_t number)
{
    const Span span = span_of(chunks, number);
    const bool streams = chunks->streams[number];
    char *const row = row_of(chunks, number, chunks->slots.rank);
    const int64_t since = clock_now();
    if (chunks->tree) {
        const TreeChunk *const in = &chunks->tree[number];
        for (const Part *part = chunks->parts + in->others; part < chunks->parts + in->own; ++part)
            copy(streams, row + part->at, memory_of(chunks, part), (size_t)part->nbytes);
    } else {
        const char *const x = chunks->x + span.start;
        copy(streams, row, x, span.own);
        copy(streams, row + span.own_end, x + span.own_end, span.nbytes - span.own_end);
    }
    if (streams) end_stream();
    note(chunks, number, 0, since);
}

/* Fold the same bytes of all rows, but for this rank's, which are elsewhere: there they are in the cache. */
static void fold_rows(const Chunks *chunks, size_t number, int fold, size_t at, const char *own, size_t nbytes)
{
    const void **const rows = chunks->addresses;
    void *out = folded_of(chunks, number) + at;
    for (int rank = 0; rank < chunks->slots.size; ++rank) rows[rank] = row_of(chunks, number, rank) + at;
    rows[chunks->slots.rank] = own;
    run_fold(fold, (Earlier){0}, rows, chunks->slots.size, &out, false, nbytes / fold_itemsize(fold));
}

static void fold_own(const Chunks *chunks, size_t number)
{
    const Span span = span_of(chunks, number);
    const int64_t since = clock_now();
    if (chunks->tree) {
        const TreeChunk *const in = &chunks->tree[number];
        for (const Part *part = chunks->parts + in->own; part < chunks->parts + in->results; ++part)
            fold_rows(chunks, number, (int)in->fold, (size_t)part->at, memory_of(chunks, part), (size_t)part->nbytes);
    } else {
        fold_rows(chunks, number, chunks->fold, span.own, chunks->x + span.start + span.own, span.own_end - span.own);
    }
    note(chunks, number, 1, since);
}

static void take(const Chunks *chunks, size_t number)
{
    const char *const folded = folded_of(chunks, number);
    if (chunks->tree) {
        const TreeChunk *const in = &chunks->tree[number];
        for (const Part *part = chunks->parts + in->results; part < chunks->parts + in->end; ++part)
            copy(chunks->large, memory_of(chunks, part), folded + part->at, (size_t)part->nbytes);
    } else {
        const Span span = span_of(chunks, number);
        copy(chunks->large, chunks->out + span.start, folded, span.nbytes);
    }
}

size_t make_turns(const Chunks *chunks, size_t turn, int64_t *step, int64_t end)
{
    const size_t count = chunks->count;
    bool published = turn > 0;
    for (; turn < count + 2; ++turn, published = false) {
        if (turn < count && !published) publish(chunks, turn);
        if (turn) {
            const int64_t now = clock_now();
            if (now >= end && !published) return turn;
            if (!all_posted(&chunks->slots, *step, LOOKS) && !wait_for_all(&chunks->slots, *step, now + LONGEST_WAIT))
                return turn;
            if (turn <= count) fold_own(chunks, turn - 1);
        }
        if (turn <= count) post_stamp(&chunks->slots, ++*step);
        if (turn >= 2) take(chunks, turn - 2);
    }
    return turn;
}
