/* Exact sums, rounded once: of the rows of a fold, and of columns of any length. arraycomm/_folds/exact.py has the same in
 * Python. */

#ifndef ARRAYCOMM_EXACT_H
#define ARRAYCOMM_EXACT_H

#include <stdint.h>

#include "folds.h"

/* An exact sum of any real numbers is an integer of SUM_WORDS words, of 32 bits each but for the last, in units of 2^-1074;
 * then come the counts of NaN, of inf and of -inf, of which those beside NaN may count as NaN: a "small superaccumulator"
 * (Neal: Fast exact summation using small and large superaccumulators, 2015). Those of several ranks are added up word by
 * word. */
enum { SUM_WORDS = 67, NANS = SUM_WORDS, INFINITIES, MINUS_INFINITIES, EXACT_WORDS };

/* Fold `count` elements from `start` on of all rows into outs[0], or of those up to row k into outs[k] if `every`. */
void fold_exactly(const Arithmetic *with, const void *const *rows, int row_count, void *const *outs, bool every, size_t start,
                  size_t count);

/* Add the rows of an array to the words of each column; a complex number has two. */
void add_rows(const Arithmetic *with, const void *x, size_t rows, size_t columns, int64_t *words);

/* Round the words of each element, which change, to an element. */
void round_words(const Arithmetic *with, int64_t *words, void *out, size_t count);

#endif
