/* Ranks as threads post steps and read one another's slots, for a sanitizer to look for races. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "slots.h"

enum { RANKS = 3, STEPS = 3000, DIFFERING = 100, WORDS = 4, BYTES = PAYLOAD + 8 * WORDS };

static _Alignas(64) char memory[2 * RANKS * BYTES];

static void fail(const char *what, int rank, int64_t step)
{
    printf("%s: rank %d, step %lld\n", what, rank, (long long)step);
    exit(1);
}

/* What a rank shows in a step: its digest differs in every 100th. */
static void fill(int64_t *header, int64_t *payload, int rank, int64_t step)
{
    memset(header, 0, PAYLOAD - HEADER);
    header[0] = step % DIFFERING ? 7 : rank;
    for (int word = 0; word < WORDS; ++word) payload[word] = 1000 * step + 10 * rank + word;
}

static const int64_t usual[RANKS] = {7, 7, 7};

static void *play(void *number)
{
    const int rank = (int)(intptr_t)number;
    const Slots slots = {memory, BYTES, rank, RANKS};
    int64_t header[(PAYLOAD - HEADER) / 8], payload[WORDS];
    for (int64_t step = 1; step <= STEPS; ++step) {
        fill(header, payload, rank, step);
        post_step(&slots, step, header, payload, sizeof(payload));
        if (step % 3 == 0) {
            _Atomic int32_t woken = 0;
            const int64_t now = clock_now();
            while (!wait_aside(&slots, step, now, now + 1000000000, &woken)) continue;
        }
        while (!all_posted(&slots, step, 100) && !wait_for_all(&slots, step, clock_now() + 100000)) continue;
        if (headers_begin(&slots, step, (const char *)usual, 8) != (step % DIFFERING != 0)) fail("headers", rank, step);
        for (int other = 0; other < RANKS; ++other) {
            fill(header, payload, other, step);
            if (memcmp(slot_of(&slots, step, other) + PAYLOAD, payload, sizeof(payload))) fail("payload", rank, step);
        }
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[RANKS];
    for (int rank = 0; rank < RANKS; ++rank) pthread_create(&threads[rank], NULL, play, (void *)(intptr_t)rank);
    for (int rank = 0; rank < RANKS; ++rank) pthread_join(threads[rank], NULL);
    puts("done");
    return 0;
}
