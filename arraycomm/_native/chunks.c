/* See chunks.h. */

#include "chunks.h"
#include "folds.h"

#include <string.h>

/* Looks at the stamps before the core is given up in between; and nanoseconds after which Python goes on waiting. */
enum { LOOKS = 1000, LONGEST_WAIT = 1000000 };

/* Which bytes of the array a chunk has, and which of the chunk's a rank folds. */
typedef struct {
    size_t start, nbytes, own, own_end;
} Span;

size_t chunk_count(const Chunks *chunks)
{
    return (chunks->nbytes + chunks->chunk - 1) / chunks->chunk;
}

static Span span_of(const Chunks *chunks, size_t number)
{
    const size_t start = number * chunks->chunk, left = chunks->nbytes - start;
    const size_t nbytes = left < chunks->chunk ? left : chunks->chunk, itemsize = fold_itemsize(chunks->fold);
    const size_t count = nbytes / itemsize, rank = (size_t)chunks->slots.rank, size = (size_t)chunks->slots.size;
    return (Span){start, nbytes, count * rank / size * itemsize, count * (rank + 1) / size * itemsize};
}

static char *row_of(const Chunks *chunks, size_t number, int rank)
{
    const size_t row = ((size_t)chunks->first_row + number) % (size_t)chunks->row_count;
    return chunks->rows + (row * (size_t)chunks->slots.size + (size_t)rank) * chunks->chunk;
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
    const char *const x = chunks->x + span.start;
    char *const row = row_of(chunks, number, chunks->slots.rank);
    const int64_t since = clock_now();
    copy(streams, row, x, span.own);
    copy(streams, row + span.own_end, x + span.own_end, span.nbytes - span.own_end);
    if (streams) end_stream();
    note(chunks, number, 0, since);
}

static void fold_own(const Chunks *chunks, size_t number)
{
    const Span span = span_of(chunks, number);
    const int64_t since = clock_now();
    const void *rows[MOST_RANKS];
    void *out = folded_of(chunks, number) + span.own;
    for (int rank = 0; rank < chunks->slots.size; ++rank) rows[rank] = row_of(chunks, number, rank) + span.own;
    rows[chunks->slots.rank] = chunks->x + span.start + span.own;
    run_fold(chunks->fold, rows, chunks->slots.size, &out, false, (span.own_end - span.own) / fold_itemsize(chunks->fold));
    note(chunks, number, 1, since);
}

static void take(const Chunks *chunks, size_t number)
{
    const Span span = span_of(chunks, number);
    copy(chunks->large, chunks->out + span.start, folded_of(chunks, number), span.nbytes);
}

size_t make_turns(const Chunks *chunks, size_t turn, int64_t *step, int64_t end)
{
    const size_t count = chunk_count(chunks);
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
