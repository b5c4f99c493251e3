/* See pool.h. A helper that wakes late finds less to do, and one that does not wake keeps nobody waiting. */

#define _POSIX_C_SOURCE 200809L

#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;

/* The loop that is shared, under the lock: how many loops there have been, how many helpers may still join this
 * one, and how many are at it. */
static struct {
    void (*piece)(const void *context, size_t number);
    const void *context;
    size_t count;
    unsigned long number;
    int wanted, inside, helpers;
} loop;

static atomic_size_t next_piece;
static atomic_int limit = 1;
static atomic_flag is_shared = ATOMIC_FLAG_INIT;

int thread_limit(void)
{
    return atomic_load(&limit);
}

void use_threads(int most)
{
    atomic_store(&limit, most);
}

static void take_pieces(void)
{
    for (size_t number; (number = atomic_fetch_add(&next_piece, 1)) < loop.count;) loop.piece(loop.context, number);
}

static void *help(void *unused)
{
    unsigned long last = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (loop.wanted == 0 || loop.number == last) pthread_cond_wait(&begun, &lock);
        last = loop.number;
        --loop.wanted;
        ++loop.inside;
        pthread_mutex_unlock(&lock);
        take_pieces();
        pthread_mutex_lock(&lock);
        if (--loop.inside == 0) pthread_cond_signal(&ended);
    }
    return unused;
}

/* A forked process has no helpers, whatever they were at. */
static void forget(void)
{
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&begun, NULL);
    pthread_cond_init(&ended, NULL);
    loop.wanted = loop.inside = loop.helpers = 0;
    atomic_flag_clear(&is_shared);
}

/* Signals stay with the threads that Python knows. */
static void have_helpers(int count)
{
    static bool watched;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (!watched) watched = pthread_atfork(NULL, NULL, forget) == 0;
    while (watched && loop.helpers < count) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, NULL)) break;
        pthread_detach(thread);
        ++loop.helpers;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void share_pieces(void (*piece)(const void *context, size_t number), const void *context, size_t count)
{
    const int most = thread_limit();
    if (most < 2 || count < 2 || atomic_flag_test_and_set(&is_shared)) {
        for (size_t number = 0; number < count; ++number) piece(context, number);
        return;
    }
    pthread_mutex_lock(&lock);
    have_helpers(most - 1);
    loop.piece = piece;
    loop.context = context;
    loop.count = count;
    loop.wanted = most - 1;
    ++loop.number;
    atomic_store(&next_piece, 0);
    pthread_cond_broadcast(&begun);
    pthread_mutex_unlock(&lock);
    take_pieces();
    pthread_mutex_lock(&lock);
    loop.wanted = 0;
    while (loop.inside) pthread_cond_wait(&ended, &lock);
    pthread_mutex_unlock(&lock);
    atomic_flag_clear(&is_shared);
}
