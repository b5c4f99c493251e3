/* Threads of this process that take pieces of a large loop, beside the thread that calls. */

#ifndef ARRAYCOMM_POOL_H
#define ARRAYCOMM_POOL_H

#include <stddef.h>

/* Call `piece` with each number below `count`, in any order, and on several threads if there may be several.
 * Returns once all have returned. One loop is shared at a time: another one meanwhile stays on its thread. */
void share_pieces(void (*piece)(const void *context, size_t number), const void *context, size_t count);

/* How many threads a loop takes at most, its caller's included. */
enum { MOST_THREADS = 64 };
int thread_limit(void);
void use_threads(int limit);

#endif
