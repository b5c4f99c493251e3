/* The reductions of rows, in their order; arraycomm/_folds has the same in Python. */

#ifndef ARRAYCOMM_FOLDS_H
#define ARRAYCOMM_FOLDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SUM, MEAN, PROD, MIN, MAX, AND, OR, XOR, FSUM, OPS };
enum { DTYPES = 17 };
/* The real numbers that an exact sum takes at a time. */
enum { EXACT_BLOCK = 512 };

/* The reductions of one dtype, for one instruction set: what makes a total of a row, makes a result of a
 * total, adds two rows, divides a total, and joins two. If the first three are NULL, totals are elements. That of an exact
 * sum takes rows as doubles; see exact.c. */
typedef struct {
    const char *dtype;
    unsigned char itemsize, total_size, parts;
    void (*load)(void *restrict total, const void *restrict row, size_t count);
    void (*store)(void *restrict out, const void *restrict total, size_t count);
    void (*pair)(void *out, const void *left, const void *right, size_t count);
    void (*divide)(void *out, const void *total, size_t count, int rows);
    void (*join[OPS])(void *out, const void *left, const void *right, size_t count);
} Arithmetic;

/* Which reduction this is, for every instruction set; -1 if there is none. */
int find_fold(const char *op, const char *dtype);

size_t fold_itemsize(int fold);

/* Whether a fold can go on from a total: an exact sum takes all rows at once. */
bool goes_on(int fold);

/* The bytes of an element of a total, which 16- and 8-bit floats have in float32. */
size_t fold_total_size(int fold);

/* What a fold goes on from: the total of this many rows, NULL and 0 if it begins; and whether more rows are to come. */
typedef struct {
    const void *total;
    int rows;
    bool more;
} Earlier;

/* Fold `count` elements of each row onto what was folded earlier, into outs[0], which gets a total if more are to come;
 * or all rows up to row k into outs[k] if `every`. Runs in the IEEE default mode, whatever the thread's own is. */
void run_fold(int fold, Earlier earlier, const void *const *rows, int row_count, void *const *outs, bool every,
              size_t count);

/* Add rows to the words of an exact sum, and round these; see exact.h. */
size_t exact_words(int fold);
void run_add_rows(int fold, const void *x, size_t rows, size_t columns, int64_t *words);
void run_round_words(int fold, int64_t *words, void *out, size_t count);

/* The instruction sets that this machine has, the best one last; and which of them folds use. */
extern const char *const level_names[];
int level_count(void);
int current_level(void);
void use_level(int level);

#endif
