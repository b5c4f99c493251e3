/* See folds.h. The loops over elements are in kernels.h. */

#include "folds.h"
#include "exact.h"
#include "pool.h"

#include <fenv.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

/* Memory that belongs to others is aligned to bytes only. */
typedef uint8_t row_u8;
typedef int8_t row_i8;
typedef uint16_t row_u16 __attribute__((aligned(1)));
typedef int16_t row_i16 __attribute__((aligned(1)));
typedef uint32_t row_u32 __attribute__((aligned(1)));
typedef int32_t row_i32 __attribute__((aligned(1)));
typedef uint64_t row_u64 __attribute__((aligned(1)));
typedef int64_t row_i64 __attribute__((aligned(1)));
typedef float row_f32 __attribute__((aligned(1)));
typedef double row_f64 __attribute__((aligned(1)));

typedef union {
    float number;
    uint32_t bits;
} Float32;

/* Macros, since a function for one instruction set may not be part of one for another. */
#define from_bits(BITS) (((Float32){.bits = (BITS)}).number)
#define to_bits(NUMBER) (((Float32){.number = (NUMBER)}).bits)

#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define WITHOUT_FUSED
#define LEVEL(NAME) NAME##_plain
#define COMPLEX_LEVEL LEVEL
#include "kernels.h"
#undef LEVEL

#if defined(__x86_64__) && defined(__GNUC__)
#define VECTORS
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define LEVEL(NAME) NAME##_avx2
#include "kernels.h"
#undef LEVEL
#undef COMPLEX_LEVEL
#undef WITHOUT_FUSED
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define LEVEL(NAME) NAME##_avx512
#define COMPLEX_LEVEL(NAME) NAME##_avx2
#include "kernels.h"
#undef LEVEL
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#ifdef VECTORS
const char *const level_names[] = {"plain", "avx2", "avx512"};
static const Arithmetic *const tables[] = {table_plain, table_avx2, table_avx512};

int level_count(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return 1;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return wide ? 3 : 2;
}
#else
/* The vector units of other processors need no options. */
const char *const level_names[] = {"plain"};
static const Arithmetic *const tables[] = {table_plain};

int level_count(void)
{
    return 1;
}
#endif

static int level;

int current_level(void)
{
    return level;
}

void use_level(int chosen)
{
    level = chosen;
}

static const char *const op_names[OPS] = {"sum", "mean", "prod", "min", "max", "and", "or", "xor", "fsum"};

int find_fold(const char *op, const char *dtype)
{
    for (int place = 0; place < DTYPES * OPS; ++place) {
        const Arithmetic *arithmetic = &table_plain[place / OPS];
        if (!strcmp(op_names[place % OPS], op) && !strcmp(arithmetic->dtype, dtype))
            return arithmetic->join[place % OPS] ? place : -1;
    }
    return -1;
}

size_t fold_itemsize(int fold)
{
    return table_plain[fold / OPS].itemsize;
}

size_t fold_total_size(int fold)
{
    return table_plain[fold / OPS].total_size;
}

bool goes_on(int fold)
{
    return fold % OPS != FSUM;
}

size_t exact_words(int fold)
{
    return (size_t)EXACT_WORDS * table_plain[fold / OPS].parts;
}

/* ---- the mode of a thread ---------------------------------------------------------------------- */

/* Whether this thread rounds to nearest even and keeps subnormal numbers; see _folds/ieee.py. */
#ifdef __SSE2__
static bool in_ieee_mode(void)
{
    /* Results or operands that are subnormal become zero; and a rounding other than to nearest even. */
    enum { ZERO_RESULTS = 1 << 15, ZERO_OPERANDS = 1 << 6, ROUNDING = 3 << 13 };
    return (_mm_getcsr() & (ZERO_RESULTS | ZERO_OPERANDS | ROUNDING)) == 0;
}
#else
static bool in_ieee_mode(void)
{
    volatile double smallest = 0x1p-1074, normal = 0x1p-1022, one = 1.0, tie = 0x1p-53;
    return smallest * one != 0.0 && normal * 0.5 != 0.0 && one + tie == one && one + 1.5 * tie != one;
}
#endif

static inline bool begin_ieee_mode(fenv_t *mode)
{
    if (in_ieee_mode()) return false;
    fegetenv(mode);
    fesetenv(FE_DFL_ENV);
    return true;
}

/* ---- rows by blocks ---------------------------------------------------------------------------- */

/* Bytes of a block of a row: those of totals that are elements fit in the level-2 cache with the result's,
 * and those of others in the level-1 cache. */
enum { BLOCK_BYTES = 64 << 10, TOTALS_BYTES = 8 << 10 };

/* Bytes of all rows from which on several threads fold, and of a row in a piece of one: to wake a thread takes as
 * long as to fold a part of these. */
enum { SHARED_BYTES = 4 << 20, PIECE_BYTES = 128 << 10 };

typedef struct {
    const Arithmetic *with;
    int op, row_count;
    const void *const *rows;
    void *const *outs;
    Earlier earlier;
    size_t start, count;
} Block;

static const void *row_of(const Block *block, int row)
{
    return (const char *)block->rows[row] + block->start * block->with->itemsize;
}

static void *out_of(const Block *block, int row)
{
    return (char *)block->outs[row] + block->start * block->with->itemsize;
}

static const void *earlier_total(const Block *block)
{
    return (const char *)block->earlier.total + block->start * block->with->total_size;
}

static void join(const Block *block, void *out, const void *left, const void *right)
{
    block->with->join[block->op](out, left, right, block->count * block->with->parts);
}

static void divide(const Block *block, void *out, const void *total, int rows)
{
    if (block->op == MEAN) block->with->divide(out, total, block->count * block->with->parts, rows);
}

/* Totals that are elements: each is what is written up to its row. */
static void fold_plain(const Block *block, bool every)
{
    const bool begins = block->earlier.total == NULL;
    const void *total = begins ? row_of(block, 0) : earlier_total(block);
    if (begins && (every || block->row_count == 1))
        memcpy(out_of(block, 0), total, block->count * block->with->itemsize);
    for (int row = begins; row < block->row_count; ++row) {
        void *const out = out_of(block, every ? row : 0);
        join(block, out, total, row_of(block, row));
        total = out;
    }
    if (block->earlier.more) return;
    for (int row = every ? 0 : block->row_count - 1; row < block->row_count; ++row) {
        void *const out = out_of(block, every ? row : 0);
        divide(block, out, out, block->earlier.rows + row + 1);
    }
}

/* Totals of another type, in memory of their own. */
static void fold_loaded(const Block *block, bool every)
{
    _Alignas(64) char total[TOTALS_BYTES], other[TOTALS_BYTES];
    const Arithmetic *const with = block->with;
    const size_t nbytes = block->count * with->total_size;
    const bool begins = block->earlier.total == NULL;
    if (!begins) memcpy(total, earlier_total(block), nbytes);
    for (int row = 0; row < block->row_count; ++row) {
        const bool first = begins && row == 0;
        with->load(first ? total : other, row_of(block, row), block->count);
        if (!first) join(block, total, total, other);
        if (!every && (row < block->row_count - 1 || block->earlier.more)) continue;
        void *const result = block->op == MEAN ? other : total;
        divide(block, result, total, block->earlier.rows + row + 1);
        with->store(out_of(block, every ? row : 0), result, block->count);
    }
    if (block->earlier.more) memcpy((char *)block->outs[0] + block->start * with->total_size, total, nbytes);
}

/* What a fold is about, and how many elements of each row a piece has that one thread folds. */
typedef struct {
    int fold;
    Earlier earlier;
    const void *const *rows;
    int row_count;
    void *const *outs;
    bool every;
    size_t count, piece;
} Work;

static inline void fold_between(const Work *work, size_t first, size_t end)
{
    const int op = work->fold % OPS;
    const Arithmetic *const with = &tables[level][work->fold / OPS];
    const size_t most = op == FSUM   ? (size_t)EXACT_BLOCK / with->parts
                        : with->load ? TOTALS_BYTES / with->total_size
                                     : BLOCK_BYTES / with->itemsize;
    const bool only_rows = !work->every && !work->earlier.total && !work->earlier.more;
    fenv_t mode;
    const bool other_mode = begin_ieee_mode(&mode);
    for (size_t start = first; start < end; start += most) {
        const size_t count = end - start < most ? end - start : most;
        const Block block = {with, op, work->row_count, work->rows, work->outs, work->earlier, start, count};
        if (op == FSUM) fold_exactly(with, work->rows, work->row_count, work->outs, work->every, start, count);
        else if (with->pair && op == SUM && work->row_count == 2 && only_rows)
            with->pair(out_of(&block, 0), row_of(&block, 0), row_of(&block, 1), count);
        else if (with->load) fold_loaded(&block, work->every);
        else fold_plain(&block, work->every);
    }
    if (other_mode) fesetenv(&mode);
}

static void fold_piece(const void *context, size_t number)
{
    const Work *const work = context;
    const size_t first = number * work->piece, left = work->count - first;
    fold_between(work, first, first + (left < work->piece ? left : work->piece));
}

void run_fold(int fold, Earlier earlier, const void *const *rows, int row_count, void *const *outs, bool every,
              size_t count)
{
    const size_t itemsize = fold_itemsize(fold);
    Work work = {fold, earlier, rows, row_count, outs, every, count, PIECE_BYTES / itemsize};
    if (count * itemsize * (size_t)row_count < SHARED_BYTES) fold_between(&work, 0, count);
    else share_pieces(fold_piece, &work, (count + work.piece - 1) / work.piece);
}

void run_add_rows(int fold, const void *x, size_t rows, size_t columns, int64_t *words)
{
    fenv_t mode;
    const bool other_mode = begin_ieee_mode(&mode);
    add_rows(&tables[level][fold / OPS], x, rows, columns, words);
    if (other_mode) fesetenv(&mode);
}

void run_round_words(int fold, int64_t *words, void *out, size_t count)
{
    fenv_t mode;
    const bool other_mode = begin_ieee_mode(&mode);
    round_words(&tables[level][fold / OPS], words, out, count);
    if (other_mode) fesetenv(&mode);
}
