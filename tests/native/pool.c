/* Threads share loops at the same time, and change how many may, for a sanitizer to look for races. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

enum { CALLERS = 3, LOOPS = 300, PIECES = 20 };

typedef struct {
    int caller, loop, found[PIECES];
} Loop;

/* Each piece is taken once: nobody else may write there, which the sanitizer sees. */
static void take(const void *context, size_t number)
{
    Loop *const loop = (Loop *)context;
    loop->found[number] += loop->caller * LOOPS + loop->loop + 1;
}

static void *play(void *number)
{
    Loop loop = {.caller = (int)(size_t)number};
    for (loop.loop = 0; loop.loop < LOOPS; ++loop.loop) {
        memset(loop.found, 0, sizeof(loop.found));
        if (loop.caller == 0) use_threads(1 + loop.loop % 4);
        const size_t count = (size_t)loop.loop % (PIECES + 1);
        share_pieces(take, &loop, count);
        for (size_t piece = 0; piece < PIECES; ++piece) {
            if (loop.found[piece] == (piece < count ? loop.caller * LOOPS + loop.loop + 1 : 0)) continue;
            printf("caller %d, loop %d, piece %zu\n", loop.caller, loop.loop, piece);
            exit(1);
        }
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[CALLERS];
    for (size_t caller = 0; caller < CALLERS; ++caller) pthread_create(&threads[caller], NULL, play, (void *)caller);
    for (size_t caller = 0; caller < CALLERS; ++caller) pthread_join(threads[caller], NULL);
    puts("done");
    return 0;
}
