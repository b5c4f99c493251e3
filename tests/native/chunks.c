/* Ranks as threads reduce arrays and trees of several lengths one after the other, without a step in between, for a sanitizer
 * to look for races. */

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

void run_fold(int fold, Earlier earlier, const void *const *from, int row_count, void *const *outs, bool every,
              size_t count)
{
    (void)fold, (void)earlier, (void)every;
    for (size_t place = 0; place < count; ++place) {
        int total = 0;
        for (int row = 0; row < row_count; ++row) total += ((const int *)from[row])[place];
        ((int *)outs[0])[place] = total;
    }
}

typedef struct {
    char *leaves[2];
    Part parts[9 * MOST];
    TreeChunk chunks[MOST];
} Tree;

/* Append the parts of both leaves, of which the first has this many elements, that lie between two places of a chunk. */
static int64_t add_parts(Tree *tree, int64_t count, int first, int start, int from, int to)
{
    const int bounds[] = {0, first, 1 << 20};
    for (int leaf = 0; leaf < 2; ++leaf) {
        const int begin = from > bounds[leaf] ? from : bounds[leaf], end = to < bounds[leaf + 1] ? to : bounds[leaf + 1];
        if (begin < end) tree->parts[count++] = (Part){leaf, 4 * (begin - bounds[leaf]), 4 * (end - begin), 4 * (begin - start)};
    }
    return count;
}

/* Cut an array into two leaves, and its chunks into their parts; results go over the leaves if `over`. */
static void make_tree(Tree *tree, int *x, int count, int rank, bool over)
{
    const int first = count / 3, each = CHUNK / 4;
    int64_t parts = 0;
    tree->leaves[0] = (char *)x;
    tree->leaves[1] = (char *)(x + first);
    for (int number = 0; number * each < count; ++number) {
        const int start = number * each, end = start + each < count ? start + each : count;
        const int own = start + (end - start) * rank / RANKS, own_end = start + (end - start) * (rank + 1) / RANKS;
        TreeChunk *const chunk = &tree->chunks[number];
        *chunk = (TreeChunk){.nbytes = 4 * (end - start), .others = parts};
        parts = add_parts(tree, parts, first, start, start, own);
        chunk->own = parts = add_parts(tree, parts, first, start, own_end, end);
        chunk->results = parts = add_parts(tree, parts, first, start, own, own_end);
        if (over) parts = add_parts(tree, parts, first, start, start, end);
        else tree->parts[parts++] = (Part){RESULTS, 4 * start, 4 * (end - start), 0};
        chunk->end = parts;
    }
}

static void *play(void *number)
{
    const int rank = (int)(size_t)number;
    int64_t step = 0;
    Tree tree;
    for (int call = 0; call < CALLS; ++call) {
        const int count = 1 + call * 7 % MOST;
        int x[MOST], out[MOST];
        char streams[MOST];
        const void *addresses[RANKS];
        double seconds[2 * MOST];
        for (int place = 0; place < count; ++place) x[place] = 1000 * call + 10 * place + rank;
        for (int chunk = 0; chunk < MOST; ++chunk) streams[chunk] = (call + chunk) % 2;
        const bool is_tree = call % 3 == 1, in_place = call % 3 == 0 || call % 6 == 1;
        Chunks chunks = {
            .slots = {slots, SLOT, rank, RANKS}, .rows = rows, .chunk = CHUNK, .row_count = ROWS, .folded_count = FOLDED,
            .large = call % 2, .out = (char *)(in_place ? x : out), .x = (char *)x,
            .nbytes = (size_t)count * 4, .count = ((size_t)count * 4 + CHUNK - 1) / CHUNK, .streams = streams,
            .seconds = seconds, .addresses = addresses};
        make_tree(&tree, x, count, rank, in_place);
        if (is_tree) {
            chunks.leaves = tree.leaves;
            chunks.parts = tree.parts;
            chunks.tree = tree.chunks;
        }
        /* Every other call makes one turn at a time. */
        size_t turn = 0;
        while (turn < chunks.count + 2) turn = make_turns(&chunks, turn, &step, call % 2 ? 0 : clock_now() + 1000000000);
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
