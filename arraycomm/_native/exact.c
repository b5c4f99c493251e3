/* See exact.h.
 *
 * A fold adds its rows up in pairs of doubles, a sum and what its additions have lost. Both are exact unless the second is
 * rounded as well, or something is not finite; the few elements of which that is so are added up in words. */

#include "exact.h"

#include <string.h>

/* The additions that fit before carries are moved: each puts less than 2^53 into a word. */
enum { TERMS = 512 };

/* The chunks of a column that are added up as doubles before these are put into words. */
enum { CHUNKS = 128 };

/* Columns are long from LONG rows on, if there are at most LONG_COLUMNS of them. */
enum { LONG = 4096, LONG_COLUMNS = 2 };

typedef union {
    double number;
    uint64_t bits;
} Float64;

typedef union {
    float number;
    uint32_t bits;
} Float32;

/* ---- elements and doubles ------------------------------------------------------------------------- */

static bool has_doubles(const Arithmetic *with)
{
    return with->itemsize == 8 * with->parts;
}

/* Convert up to EXACT_BLOCK elements, a complex number as two, to doubles, which have them all. */
static void widen(const Arithmetic *with, double *reals, const void *elements, size_t count)
{
    if (has_doubles(with)) {
        memcpy(reals, elements, count * sizeof(double));
        return;
    }
    _Alignas(64) float wide[EXACT_BLOCK];
    if (with->load) with->load(wide, elements, count);
    else memcpy(wide, elements, count * sizeof(float));
    for (size_t i = 0; i < count; ++i) reals[i] = wide[i];
}

/* Of a number that was rounded to the nearest double, and what is left of it, make the one of the two doubles beside it
 * that is odd. It is rounded to a format of fewer bits as the number itself would be. */
static inline double make_odd(double sum, double left)
{
    const Float64 rest = {left};
    Float64 made = {sum};
    const uint64_t inexact = (left > 0) | (left < 0), even = ~made.bits & inexact, away = (rest.bits ^ made.bits) >> 63 & even;
    made.bits += even - 2 * away;
    return made.number;
}

static inline float make_odd_float(double number)
{
    Float32 made = {(float)number};
    const double left = number - made.number;
    const Float32 rest = {(float)left};
    const uint32_t inexact = (left > 0) | (left < 0), even = ~made.bits & inexact, away = (rest.bits ^ made.bits) >> 31 & even;
    made.bits += even - 2 * away;
    return made.number;
}

/* Round up to EXACT_BLOCK doubles, which are odd unless elements are doubles, to elements. */
static void narrow(const Arithmetic *with, void *elements, const double *reals, size_t count)
{
    if (has_doubles(with)) {
        memcpy(elements, reals, count * sizeof(double));
        return;
    }
    _Alignas(64) float wide[EXACT_BLOCK];
    if (with->load) {
        for (size_t i = 0; i < count; ++i) wide[i] = make_odd_float(reals[i]);
        with->store(elements, wide, count);
    } else {
        for (size_t i = 0; i < count; ++i) wide[i] = (float)reals[i];
        memcpy(elements, wide, count * sizeof(float));
    }
}

/* ---- words ------------------------------------------------------------------------------------------ */

/* Add a value below 2^53, or take it away if `minus` is -1, from a place of the integer on. */
static inline void add_at(int64_t *words, unsigned place, uint64_t value, int64_t minus)
{
    const unsigned shift = place % 32;
    int64_t *const low = words + place / 32;
    low[0] += ((int64_t)(value << shift & 0xffffffff) ^ minus) - minus;
    low[1] += ((int64_t)(value >> (32 - shift)) ^ minus) - minus;
}

static inline void add_number(int64_t *words, double number)
{
    const uint64_t bits = (Float64){number}.bits, fraction = bits & 0xfffffffffffff;
    const unsigned exponent = bits >> 52 & 0x7ff;
    if (exponent == 0x7ff) {
        ++words[fraction ? NANS : bits >> 63 ? MINUS_INFINITIES : INFINITIES];
        return;
    }
    const uint64_t significand = fraction | (uint64_t)(exponent != 0) << 52;
    add_at(words, exponent - (exponent != 0), significand, -(int64_t)(bits >> 63));
}

/* Let each word but the last have 32 bits and no sign. */
static void carry(int64_t *words)
{
    for (int place = 0; place < SUM_WORDS - 1; ++place) {
        const int64_t over = words[place] >> 32;
        words[place] &= 0xffffffff;
        words[place + 1] += over;
    }
}

/* Round to nearest even, or to odd. A sum of zeros is +0. */
static double rounded(int64_t *words, bool odd)
{
    if (words[NANS] || (words[INFINITIES] && words[MINUS_INFINITIES])) return (Float64){.bits = 0x7ff8000000000000}.number;
    carry(words);
    const bool endless = words[INFINITIES] || words[MINUS_INFINITIES];
    const bool minus = endless ? words[MINUS_INFINITIES] != 0 : words[SUM_WORDS - 1] < 0;
    const uint64_t sign = (uint64_t)minus << 63, infinity = 0x7ff0000000000000;
    if (endless) return (Float64){.bits = sign | infinity}.number;
    if (minus) {
        for (int place = 0; place < SUM_WORDS; ++place) words[place] = -words[place];
        carry(words);
    }
    int top = SUM_WORDS - 1;
    while (top > 0 && words[top] == 0) --top;
    if (words[top] >> 32) return (Float64){.bits = sign | infinity}.number;
    /* The two words up to the highest one but zero that are in use, and whether there is anything below. */
    const uint64_t high = (uint64_t)words[top], middle = top ? (uint64_t)words[top - 1] : 0;
    uint64_t below = 0;
    for (int place = 0; place < top - 2; ++place) below |= (uint64_t)words[place];
    const uint64_t low = top > 1 ? (uint64_t)words[top - 2] : 0;
    int length = 0;
    while (high >> length) ++length;
    /* How many bits more than 53 there are; the number is whole if there are none. */
    const int more = 32 * top + length - 53;
    const uint64_t whole = high << 32 | middle;
    if (more <= 0) return (Float64){.bits = sign | (top ? whole : high)}.number;
    /* 64 bits from the first one on, of which 53 stay, and what is behind these. */
    const uint64_t first = whole << (32 - length) | low >> length;
    const uint64_t rest = (first & 0x7ff) << 1 | (below != 0 || (low << (32 - length) & 0xffffffff) != 0);
    const uint64_t significand = first >> 11;
    const bool up = odd ? rest != 0 && !(significand & 1) : rest > 0x800 || (rest == 0x800 && significand & 1);
    const uint64_t bits = ((uint64_t)more << 52) + significand + up;
    return (Float64){.bits = sign | (bits < infinity ? bits : infinity)}.number;
}

/* ---- folds ------------------------------------------------------------------------------------------ */

/* The sum of one place of all rows, from which the doubles have lost something. */
static double sum_in_words(const Arithmetic *with, const void *const *rows, int row_count, size_t real)
{
    int64_t words[EXACT_WORDS] = {0};
    for (int row = 0; row < row_count; ++row) {
        double number;
        widen(with, &number, (const char *)rows[row] + real * (with->itemsize / with->parts), 1);
        add_number(words, number);
        if (row % TERMS == TERMS - 1) carry(words);
    }
    return rounded(words, !has_doubles(with));
}

void fold_exactly(const Arithmetic *with, const void *const *rows, int row_count, void *const *outs, bool every, size_t start,
                  size_t count)
{
    _Alignas(64) double sums[3 * EXACT_BLOCK], reals[EXACT_BLOCK];
    double *const lost = sums + EXACT_BLOCK, *const failed = lost + EXACT_BLOCK;
    const size_t first = start * with->parts, parts = count * with->parts, at = start * with->itemsize;
    memset(lost, 0, 2 * EXACT_BLOCK * sizeof(double));
    for (int row = 0; row < row_count; ++row) {
        widen(with, row ? reals : sums, (const char *)rows[row] + at, parts);
        if (row) with->join[FSUM](sums, sums, reals, parts);
        if (!every && row < row_count - 1) continue;
        if (has_doubles(with)) {
            for (size_t i = 0; i < parts; ++i) reals[i] = sums[i] + lost[i];
        } else {
            for (size_t i = 0; i < parts; ++i) {
                const double sum = sums[i] + lost[i], other = sum - sums[i];
                reals[i] = make_odd(sum, (sums[i] - (sum - other)) + (lost[i] - other));
            }
        }
        for (size_t i = 0; i < parts; ++i)
            if (!(failed[i] == 0)) reals[i] = sum_in_words(with, rows, row + 1, first + i);
        narrow(with, (char *)outs[every ? row : 0] + at, reals, parts);
    }
}

/* ---- columns ---------------------------------------------------------------------------------------- */

/* Rows of up to EXACT_BLOCK reals, `stride` bytes apart; `step` of them are taken at a time, as one chunk, if they lie
 * side by side. */
typedef struct {
    const Arithmetic *with;
    const char *x;
    size_t rows, columns, stride, step;
} Rows;

/* Convert the chunk from a row on, and return how many reals it has. */
static size_t widen_chunk(const Rows *all, double *reals, size_t row)
{
    const size_t left = all->rows - row, count = (left < all->step ? left : all->step) * all->columns;
    widen(all->with, reals, all->x + row * all->stride, count);
    return count;
}

static void carry_all(int64_t *words, size_t columns)
{
    for (size_t column = 0; column < columns; ++column) carry(words + column * EXACT_WORDS);
}

/* Add the places of a chunk of which that is to be done to the words of their columns. */
static void add_places(const double *reals, const double *failed, bool has_failed, size_t count, size_t columns, int64_t *words)
{
    for (size_t start = 0; start < count; start += columns)
        for (size_t column = 0; column < columns; ++column)
            if ((failed[start + column] == 0) != has_failed) add_number(words + column * EXACT_WORDS, reals[start + column]);
}

/* Add the chunks from a row on, place by place, as a fold does; the places that have lost something in words. */
static void add_chunks(const Rows *all, size_t first, size_t end, int64_t *words)
{
    _Alignas(64) double sums[3 * EXACT_BLOCK], reals[EXACT_BLOCK];
    double *const lost = sums + EXACT_BLOCK, *const failed = lost + EXACT_BLOCK;
    memset(lost, 0, 2 * EXACT_BLOCK * sizeof(double));
    const size_t count = widen_chunk(all, sums, first);
    for (size_t row = first + all->step; row < end; row += all->step) {
        const size_t some = widen_chunk(all, reals, row);
        all->with->join[FSUM](sums, sums, reals, some);
    }
    add_places(sums, failed, false, count, all->columns, words);
    carry_all(words, all->columns);
    add_places(lost, failed, false, count, all->columns, words);
    carry_all(words, all->columns);
    bool has_failed = false;
    for (size_t place = 0; place < count; ++place) has_failed |= !(failed[place] == 0);
    for (size_t row = first; has_failed && row < end; row += all->step) {
        const size_t some = widen_chunk(all, reals, row);
        add_places(reals, failed, true, some, all->columns, words);
        if ((row - first) % TERMS + all->step >= TERMS) carry_all(words, all->columns);
    }
    carry_all(words, all->columns);
}

/* ---- long columns ----------------------------------------------------------------------------------- */

enum { BINADES = 4096, COUNT = 41, MOST_NUMBERS = 1 << (COUNT - 20) };

/* The sums of the fractions of all numbers of one sign and exponent: of the low 32 bits, and of the 20 above, with the count
 * of the numbers before these. It is a "large superaccumulator" (see exact.h), but for that a chunk is two integers, which
 * hold MOST_NUMBERS. They lie half a page apart: to a processor, addresses with the same last 12 bits may seem to be one. */
typedef struct {
    uint64_t low[BINADES], apart[256], high[BINADES];
} Fractions;

/* Add the sums to the words, each of which gets less than TERMS numbers. Infinities beside NaN count as NaN. */
static void add_fractions(const Fractions *sums, int64_t *words)
{
    for (unsigned binade = 0; binade < BINADES; ++binade) {
        const uint64_t low = sums->low[binade], high = sums->high[binade] & (((uint64_t)1 << COUNT) - 1);
        const uint64_t count = sums->high[binade] >> COUNT;
        const unsigned exponent = binade % 2048, place = exponent - (exponent != 0), minus = binade / 2048;
        if (count && exponent == 0x7ff) {
            words[low || high ? NANS : minus ? MINUS_INFINITIES : INFINITIES] += (int64_t)count;
        } else if (count) {
            add_at(words, place, low, -(int64_t)minus);
            add_at(words, place + 32, high + (exponent ? count << 20 : 0), -(int64_t)minus);
        }
    }
    carry(words);
}

/* Add some rows, at most MOST_NUMBERS, that lie side by side and have at most LONG_COLUMNS. */
static void add_long(const Rows *all, size_t first, size_t end, int64_t *words)
{
    _Alignas(64) Fractions sums[LONG_COLUMNS];
    _Alignas(64) double wide[EXACT_BLOCK];
    const bool is_wide = has_doubles(all->with);
    const size_t step = is_wide ? LONG : all->step;
    memset(sums, 0, all->columns * sizeof *sums);
    for (size_t row = first; row < end; row += step) {
        const size_t count = (end - row < step ? end - row : step) * all->columns;
        if (!is_wide) widen_chunk(all, wide, row);
        const char *const reals = is_wide ? all->x + row * all->stride : (const char *)wide;
        for (size_t column = 0; column < all->columns; ++column) {
            Fractions *const sum = sums + column;
            for (size_t i = column; i < count; i += all->columns) {
                uint64_t bits;
                memcpy(&bits, reals + i * sizeof bits, sizeof bits);
                sum->low[bits >> 52] += bits & 0xffffffff;
                sum->high[bits >> 52] += (bits >> 32 & 0xfffff) + ((uint64_t)1 << COUNT);
            }
        }
    }
    for (size_t column = 0; column < all->columns; ++column) add_fractions(sums + column, words + column * EXACT_WORDS);
}

/* Add `columns` columns of an array whose rows lie `stride` bytes apart. */
static void add_columns(const Arithmetic *with, const char *x, size_t rows, size_t columns, size_t stride, int64_t *words)
{
    const bool side_by_side = stride == columns * (with->itemsize / with->parts);
    const Rows all = {with, x, rows, columns, stride, side_by_side ? EXACT_BLOCK / columns : 1};
    const bool is_long = side_by_side && rows >= LONG && columns <= LONG_COLUMNS;
    const size_t most = is_long ? MOST_NUMBERS / all.step * all.step : CHUNKS * all.step;
    for (size_t row = 0; row < rows; row += most)
        (is_long ? add_long : add_chunks)(&all, row, rows - row < most ? rows : row + most, words);
}

void add_rows(const Arithmetic *with, const void *x, size_t rows, size_t columns, int64_t *words)
{
    const size_t all = columns * with->parts, size = with->itemsize / with->parts;
    for (size_t first = 0; first < all; first += EXACT_BLOCK) {
        const size_t some = all - first < EXACT_BLOCK ? all - first : EXACT_BLOCK;
        add_columns(with, (const char *)x + first * size, rows, some, all * size, words + first * EXACT_WORDS);
    }
}

void round_words(const Arithmetic *with, int64_t *words, void *out, size_t count)
{
    const size_t reals = count * with->parts, size = with->itemsize / with->parts;
    for (size_t real = 0; real < reals; ++real) {
        const double sum = rounded(words + real * EXACT_WORDS, !has_doubles(with));
        narrow(with, (char *)out + real * size, &sum, 1);
    }
}
