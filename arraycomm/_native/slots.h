/* The slots of the control channel in memory that all ranks share, and copies into such memory.
 * _transports/control.py has the layout of slots and the protocol. Nothing here knows of Python. */

#ifndef ARRAYCOMM_SLOTS_H
#define ARRAYCOMM_SLOTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Where in a slot its header and its payload begin; the stamp is before. */
enum { HEADER = 8, PAYLOAD = 128 };

typedef struct {
    char *memory; /* two slots for each rank: first all of even steps, then all of odd ones */
    size_t slot;  /* bytes */
    int rank, size;
} Slots;

char *slot_of(const Slots *slots, int64_t step, int rank);

/* Write a header and its payload into this rank's slot, and publish them as a step. */
void post_step(const Slots *slots, int64_t step, const void *header, const void *payload, size_t nbytes);

/* Publish this rank's slot, and what it has written elsewhere before, as a step. */
void post_stamp(const Slots *slots, int64_t step);

/* Whether every rank has posted the step, at the last of this many looks at the others. What they wrote
 * into their slots before can be read then. */
bool all_posted(const Slots *slots, int64_t step, int looks);

/* Look until a time, and let others have the core in between: at all ranks' slots, at one rank's, or at a word that
 * another process counts up. */
bool wait_for_all(const Slots *slots, int64_t step, int64_t end);
bool wait_for_stamp(const Slots *slots, int64_t step, int rank, int64_t end);
bool wait_for_word(_Atomic int64_t *word, int64_t step, int64_t end);

/* The same for a thread that waits since a time beside another one, which can end the wait by setting `woken`. The later the
 * ranks are, the longer it sleeps between two looks. */
bool wait_aside(const Slots *slots, int64_t step, int64_t since, int64_t end, _Atomic int32_t *woken);

/* Whether the headers of all ranks begin as is expected: `nbytes` of each, one after the other. */
bool headers_begin(const Slots *slots, int64_t step, const char *expected, size_t nbytes);

/* Have every thread of this machine show what it has written before it reads on. A thread that has not seen what this one wrote
 * before is then seen to have written its stamp. It takes milliseconds; whoever posts a step needs no fence for that. */
void fence_everywhere(void);

/* Copy past the caches: what lies in this core's, other cores may read more slowly than main memory. */
void stream_copy(void *out, const void *from, size_t nbytes);

/* To be called after such copies: a stamp that is written next must not be seen before them. */
void end_stream(void);

/* Nanoseconds of a clock that only differences of have a meaning. */
int64_t clock_now(void);

#endif
