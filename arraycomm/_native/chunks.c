/* See chunks.h. */

#include "chunks.h"
#include "folds.h"

#include <sched.h>
#include <string.h>

/* Looks at the stamps before the core is given up in between; and nanoseconds after which Python goes on waiting. */
enum { LOOKS = 1000, LONGEST_WAIT = 1000000 };
/* The same for messages, which it takes longer to look for; and room for MPI's status. */
enum { LOOKS_FOR_MESSAGES = 4, STATUS_WORDS = 16 };
/* The bytes of results that are written past the caches at once. */
enum { FOLDED_AT_ONCE = 8 << 10 };

/* Which bytes of an array a chunk has, and which of the chunk's a rank folds of it and does not publish; of a tree only how
 * many it has. */
typedef struct {
    size_t start, nbytes, own, own_end;
} Span;

static Span span_of(const Chunks *chunks, size_t number)
{
    if (chunks->tree) return (Span){0, (size_t)chunks->tree[number].nbytes, 0, 0};
    const size_t start = number * chunks->length, left = chunks->nbytes - start;
    const size_t nbytes = left < chunks->length ? left : chunks->length, itemsize = fold_itemsize(chunks->fold);
    if (chunks->messages) return (Span){start, nbytes, 0, 0};
    const size_t count = nbytes / itemsize, rank = (size_t)chunks->slots.rank, size = (size_t)chunks->slots.size;
    return (Span){start, nbytes, count * rank / size * itemsize, count * (rank + 1) / size * itemsize};
}

static char *memory_of(const Chunks *chunks, const Part *part)
{
    return (part->leaf == RESULTS ? chunks->out : chunks->leaves[part->leaf]) + part->first;
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

/* What is sent by messages is read from there at once. */
static void copy_to_row(const Chunks *chunks, bool streams, char *row, const char *from, size_t nbytes)
{
    if (chunks->messages) copy_in(row, from, nbytes);
    else copy(streams, row, from, nbytes);
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
            copy_to_row(chunks, streams, row + part->at, memory_of(chunks, part), (size_t)part->nbytes);
    } else {
        const char *const x = chunks->x + span.start;
        copy_to_row(chunks, streams, row, x, span.own);
        copy_to_row(chunks, streams, row + span.own_end, x + span.own_end, span.nbytes - span.own_end);
    }
    if (streams) end_stream();
    note(chunks, number, 0, since);
}

/* Fold the same bytes of all rows, but for this rank's, which are elsewhere: there they are in the cache. */
static void fold_rows(const Chunks *chunks, size_t number, int fold, size_t at, const char *own, size_t nbytes)
{
    const void *rows[MOST_RANKS];
    void *out = folded_of(chunks, number) + at;
    for (int rank = 0; rank < chunks->slots.size; ++rank) rows[rank] = row_of(chunks, number, rank) + at;
    rows[chunks->slots.rank] = own;
    run_fold(fold, rows, chunks->slots.size, &out, false, nbytes / fold_itemsize(fold));
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

/* Whether a message is over; so is one that has not been begun, and after an error. */
static bool is_over(RowMessages *messages, void *request)
{
    int64_t status[STATUS_WORDS];
    int over = 0;
    if (!messages->error) messages->error = messages->test(request, &over, status);
    return over || messages->error;
}

/* Publish the next chunks, and begin their messages, as far as their rows are free. */
static void begin_chunks(const Chunks *chunks, size_t reduced)
{
    RowMessages *const messages = chunks->messages;
    while (!messages->error && messages->begun < chunks->count && messages->begun < reduced + (size_t)chunks->row_count) {
        void *const *const requests = messages->requests + 2 * (messages->begun % (size_t)chunks->row_count);
        if (!is_over(messages, requests[1]) || messages->error) return;
        publish(chunks, messages->begun);
        messages->error = messages->start(requests[0]);
        if (!messages->error) messages->error = messages->start(requests[1]);
        ++messages->begun;
    }
}

/* Fold both ranks' rows to where results go; past the caches by way of a few bytes that stay in them. */
static void fold_both(const Chunks *chunks, size_t number, int fold, size_t at, char *out, size_t nbytes)
{
    const size_t room = chunks->chunk < FOLDED_AT_ONCE ? chunks->chunk : FOLDED_AT_ONCE;
    const size_t most = chunks->large ? room : nbytes;
    for (size_t done = 0; done < nbytes; done += most) {
        const void *const rows[] = {row_of(chunks, number, 0) + at + done, row_of(chunks, number, 1) + at + done};
        const size_t some = nbytes - done < most ? nbytes - done : most;
        void *into = chunks->large ? folded_of(chunks, 0) : out + done;
        run_fold(fold, rows, 2, &into, false, some / fold_itemsize(fold));
        if (chunks->large) stream_copy(out + done, into, some);
    }
}

static void take_both(const Chunks *chunks, size_t number)
{
    if (chunks->tree) {
        const TreeChunk *const in = &chunks->tree[number];
        for (const Part *part = chunks->parts + in->results; part < chunks->parts + in->end; ++part)
            fold_both(chunks, number, (int)in->fold, (size_t)part->at, memory_of(chunks, part), (size_t)part->nbytes);
    } else {
        const Span span = span_of(chunks, number);
        fold_both(chunks, number, chunks->fold, 0, chunks->out + span.start, span.nbytes);
    }
    if (chunks->large) end_stream();
}

size_t exchange_chunks(const Chunks *chunks, size_t reduced, int64_t end)
{
    RowMessages *const messages = chunks->messages;
    int64_t moved = clock_now();
    for (int looks = 1; reduced < chunks->count; ++looks) {
        begin_chunks(chunks, reduced);
        const bool come = messages->begun > reduced && is_over(messages, messages->requests[2 * (reduced % (size_t)chunks->row_count)]);
        if (messages->error) break;
        const int64_t now = clock_now();
        if (come) {
            take_both(chunks, reduced++);
            moved = now;
        } else if (now - moved >= LONGEST_WAIT) {
            break;
        } else if (looks % LOOKS_FOR_MESSAGES == 0) {
            sched_yield();
        }
        if (now >= end) break;
    }
    return reduced;
}
