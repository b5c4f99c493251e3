/* Ranks as threads reduce arrays of several lengths one after the other, without a step in between, for a sanitizer to look
 * for races. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "chunks.h"
#include "folds.h"

enum { RANKS = 3, CALLS = 60, MOST = 40, CHUNK = 64, ROWS = 4, FOLDED = 3, SLOT = 192 };

static _Alignas(64) char slots[2 * RANKS * SLOT], rows[(ROWS * RANKS + FOLDED) * CHUNK];

/* In place of all the others: the sum of int32. */
size_t fold_itemsize(int fold)
{
    (void)fold;
    return sizeof(int);
}

void run_fold(int fold, const void *const *from, int row_count, void *const *outs, bool every, size_t count)
{
    (void)fold, (void)every;
    for (size_t place = 0; place < count; ++place) {
        int total = 0;
        for (int row = 0; row < row_count; ++row) total += ((const int *)from[row])[place];
        ((int *)outs[0])[place] = total;
    }
}

static void *play(void *number)
{
    const int rank = (int)(size_t)number;
    int first_row = 0;
    int64_t step = 0;
    for (int call = 0; call < CALLS; ++call) {
        const int count = 1 + call * 7 % MOST;
        int x[MOST], out[MOST];
        char streams[MOST];
        double seconds[2 * MOST];
        for (int place = 0; place < count; ++place) x[place] = 1000 * call + 10 * place + rank;
        for (int chunk = 0; chunk < MOST; ++chunk) streams[chunk] = (call + chunk) % 2;
        const bool in_place = call % 3 == 0;
        const Chunks chunks = {
            .slots = {slots, SLOT, rank, RANKS}, .rows = rows, .chunk = CHUNK, .row_count = ROWS, .folded_count = FOLDED,
            .first_row = first_row, .large = call % 2, .x = (char *)x, .out = (char *)(in_place ? x : out),
            .nbytes = (size_t)count * sizeof(int), .streams = streams, .seconds = seconds};
        /* Every other call makes one turn at a time. */
        size_t turn = 0;
        while (turn < chunk_count(&chunks) + 2)
            turn = make_turns(&chunks, turn, &step, call % 2 ? 0 : clock_now() + 1000000000);
        first_row = (first_row + (int)chunk_count(&chunks)) % ROWS;
        for (int place = 0; place < count; ++place) {
            const int want = RANKS * (1000 * call + 10 * place) + 3, got = in_place ? x[place] : out[place];
            if (got == want) continue;
            printf("rank %d, call %d, place %d: %d, not %d\n", rank, call, place, got, want);
            exit(1);
        }
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[RANKS];
    for (size_t rank = 0; rank < RANKS; ++rank) pthread_create(&threads[rank], NULL, play, (void *)rank);
    for (size_t rank = 0; rank < RANKS; ++rank) pthread_join(threads[rank], NULL);
    puts("done");
    return 0;
}
