/* See slots.h. */

#define _GNU_SOURCE

#include "slots.h"

#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/syscall.h>
#endif

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Looks between two times that the core is given up. */
enum { LOOKS = 16 };
/* Linux's MEMBARRIER_CMD_GLOBAL, which old headers lack; where the system has no such call, nanoseconds in which every
 * processor has shown the others what it wrote before. */
enum { GLOBAL = 1, SHOWN = 10000000 };
/* Of waits beside another thread, in nanoseconds: those in which ranks that call at about the same time have all called, and
 * the naps after that, a part of the time waited. Each disturbs the other thread, if only by its timer. */
enum { GLANCE = 200000, SHORT_NAP = 50000, LONG_NAP = 1000000, PART = 20 };

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

char *slot_of(const Slots *slots, int64_t step, int rank)
{
    return slots->memory + ((size_t)(step & 1) * (size_t)slots->size + (size_t)rank) * slots->slot;
}

static _Atomic int64_t *stamp_of(const Slots *slots, int64_t step, int rank)
{
    return (_Atomic int64_t *)slot_of(slots, step, rank);
}

void post_step(const Slots *slots, int64_t step, const void *header, const void *payload, size_t nbytes)
{
    char *const own = slot_of(slots, step, slots->rank);
    memcpy(own + HEADER, header, PAYLOAD - HEADER);
    if (nbytes) memcpy(own + PAYLOAD, payload, nbytes);
    atomic_store_explicit((_Atomic int64_t *)own, step, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
}

void post_stamp(const Slots *slots, int64_t step)
{
    atomic_store_explicit(stamp_of(slots, step, slots->rank), step, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
}

/* Whether no rank has taken its step back while others were looked at. Of two ranks only one was. */
static bool still_posted(const Slots *slots, int64_t step)
{
    if (slots->size > 2)
        for (int rank = 0; rank < slots->size; ++rank)
            if (atomic_load_explicit(stamp_of(slots, step, rank), memory_order_acquire) < step) return false;
    return true;
}

bool all_posted(const Slots *slots, int64_t step, int looks)
{
    for (int rank = 0; rank < slots->size; ++rank) {
        _Atomic int64_t *const stamp = stamp_of(slots, step, rank);
        while (atomic_load_explicit(stamp, memory_order_acquire) < step) {
            if (--looks <= 0) return false;
            PAUSE();
        }
    }
    return still_posted(slots, step);
}

void fence_everywhere(void)
{
#ifdef SYS_membarrier
    if (!syscall(SYS_membarrier, GLOBAL, 0, 0)) return;
#endif
    nanosleep(&(struct timespec){0, SHOWN}, NULL);
}

int64_t clock_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

bool wait_for_word(_Atomic int64_t *word, int64_t step, int64_t end)
{
    for (int looks = 1; atomic_load_explicit(word, memory_order_acquire) < step; ++looks) {
        PAUSE();
        if (looks % LOOKS) continue;
        if (clock_now() >= end) return false;
        sched_yield();
    }
    return true;
}

bool wait_for_stamp(const Slots *slots, int64_t step, int rank, int64_t end)
{
    return wait_for_word(stamp_of(slots, step, rank), step, end);
}

bool wait_for_all(const Slots *slots, int64_t step, int64_t end)
{
    for (int rank = 0; rank < slots->size; ++rank)
        if (!wait_for_stamp(slots, step, rank, end)) return false;
    return still_posted(slots, step);
}

static void sleep_between_looks(int64_t waited)
{
    int64_t nap = waited / PART;
    if (nap < SHORT_NAP) nap = SHORT_NAP;
    if (nap > LONG_NAP) nap = LONG_NAP;
    nanosleep(&(struct timespec){0, (long)nap}, NULL);
}

bool wait_aside(const Slots *slots, int64_t step, int64_t since, int64_t end, _Atomic int32_t *woken)
{
    while (!all_posted(slots, step, 1)) {
        const int64_t now = clock_now();
        if (now >= end || atomic_load(woken)) return false;
        if (now - since < GLANCE) sched_yield();
        else sleep_between_looks(now - since);
    }
    return true;
}

#ifdef __SSE2__
void stream_copy(void *out, const void *from, size_t nbytes)
{
    char *to = out;
    const char *x = from;
    size_t ahead = -(uintptr_t)to % sizeof(__m128i);
    if (ahead > nbytes) ahead = nbytes;
    memcpy(to, x, ahead);
    for (to += ahead, x += ahead, nbytes -= ahead; nbytes >= 64; to += 64, x += 64, nbytes -= 64) {
        const __m128i *words = (const __m128i *)x;
        const __m128i a = _mm_loadu_si128(words), b = _mm_loadu_si128(words + 1);
        const __m128i c = _mm_loadu_si128(words + 2), d = _mm_loadu_si128(words + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
    memcpy(to, x, nbytes);
}

void end_stream(void)
{
    _mm_sfence();
}
#else
void stream_copy(void *out, const void *from, size_t nbytes)
{
    memcpy(out, from, nbytes);
}

void end_stream(void)
{
}
#endif

bool headers_begin(const Slots *slots, int64_t step, const char *expected, size_t nbytes)
{
    for (int rank = 0; rank < slots->size; ++rank)
        if (memcmp(slot_of(slots, step, rank) + HEADER, expected + (size_t)rank * nbytes, nbytes)) return false;
    return true;
}
