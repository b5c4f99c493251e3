/* The inner loops of the folds. folds.c includes this file once for each instruction set: a compiler
 * makes vector code of it, in which every element has the same bits as in plain code.
 *
 * LEVEL(name) gives the name of a function for the instruction set. A complex number counts as two. */

/* `out` may be `left`: no element depends on another one. */
#define JOIN(NAME, TYPE, ROW, EXPRESSION)                                                         \
    static void LEVEL(NAME)(void *out, const void *left, const void *right, size_t count)         \
    {                                                                                             \
        ROW *results = out;                                                                       \
        const ROW *totals = left, *elements = right;                                              \
        INDEPENDENT                                                                               \
        for (size_t i = 0; i < count; ++i) {                                                      \
            const TYPE a = totals[i], b = elements[i];                                            \
            results[i] = (TYPE)(EXPRESSION);                                                      \
        }                                                                                         \
    }

/* Overflow has to wrap: in C only that of unsigned integers does, and a short one becomes an int first. */
#define UNSIGNED(NAME, TYPE, ROW)                                                                 \
    JOIN(sum_##NAME, TYPE, ROW, a + b)                                                            \
    JOIN(prod_##NAME, TYPE, ROW, 1u * a * b)                                                      \
    JOIN(and_##NAME, TYPE, ROW, a & b)                                                            \
    JOIN(or_##NAME, TYPE, ROW, a | b)                                                             \
    JOIN(xor_##NAME, TYPE, ROW, a ^ b)                                                            \
    JOIN(min_##NAME, TYPE, ROW, a <= b ? a : b)                                                   \
    JOIN(max_##NAME, TYPE, ROW, a >= b ? a : b)

#define SIGNED(NAME, TYPE, ROW)                                                                   \
    JOIN(min_##NAME, TYPE, ROW, a <= b ? a : b)                                                   \
    JOIN(max_##NAME, TYPE, ROW, a >= b ? a : b)

/* A NaN is unequal to itself, and comparisons with it are false: so a NaN in a or b is the result. The quotient by a
 * power of two is the product with its inverse, which takes less time, to the bit: both are rounded once. */
#define REAL(NAME, TYPE, ROW)                                                                     \
    JOIN(sum_##NAME, TYPE, ROW, a + b)                                                            \
    JOIN(prod_##NAME, TYPE, ROW, a * b)                                                           \
    JOIN(min_##NAME, TYPE, ROW, (a != a) | (a < b) ? a : b)                                      \
    JOIN(max_##NAME, TYPE, ROW, (a != a) | (a > b) ? a : b)                                      \
    static void LEVEL(divide_##NAME)(void *out, const void *total, size_t count, int rows)        \
    {                                                                                             \
        ROW *results = out;                                                                       \
        const ROW *totals = total;                                                                \
        if ((rows & (rows - 1)) == 0) {                                                           \
            const TYPE part = 1 / (TYPE)rows;                                                     \
            INDEPENDENT                                                                           \
            for (size_t i = 0; i < count; ++i) results[i] = totals[i] * part;                     \
            return;                                                                               \
        }                                                                                         \
        INDEPENDENT                                                                               \
        for (size_t i = 0; i < count; ++i) results[i] = totals[i] / (TYPE)rows;                   \
    }

/* Each operation is rounded. Some compilers fuse these whatever their options say, if the instruction set
 * has fused ones: so it is the one without. */
#ifdef WITHOUT_FUSED
#define COMPLEX(NAME, TYPE, ROW)                                                                  \
    static void LEVEL(prod_##NAME)(void *out, const void *left, const void *right, size_t count)  \
    {                                                                                             \
        ROW *results = out;                                                                       \
        const ROW *totals = left, *elements = right;                                              \
        INDEPENDENT                                                                               \
        for (size_t i = 0; i < count; i += 2) {                                                   \
            const TYPE a = totals[i], b = totals[i + 1];                                          \
            const TYPE c = elements[i], d = elements[i + 1];                                      \
            results[i] = a * c - b * d;                                                           \
            results[i + 1] = a * d + b * c;                                                       \
        }                                                                                         \
    }
COMPLEX(c64, float, row_f32)
COMPLEX(c128, double, row_f64)
#undef COMPLEX
#endif

UNSIGNED(u8, uint8_t, row_u8)
UNSIGNED(u16, uint16_t, row_u16)
UNSIGNED(u32, uint32_t, row_u32)
UNSIGNED(u64, uint64_t, row_u64)
SIGNED(i8, int8_t, row_i8)
SIGNED(i16, int16_t, row_i16)
SIGNED(i32, int32_t, row_i32)
SIGNED(i64, int64_t, row_i64)
REAL(f32, float, row_f32)
REAL(f64, double, row_f64)

/* `out` is a sum of each place, what its additions have lost, and whether that was rounded as well: EXACT_BLOCK doubles of
 * each. What an addition loses is exact (Knuth), but NaN if anything is not finite. */
static void LEVEL(join_exactly)(void *out, const void *left, const void *right, size_t count)
{
    double *const sums = out, *const all_lost = sums + EXACT_BLOCK, *const failed = all_lost + EXACT_BLOCK;
    const double *const totals = left, *const elements = right;
    INDEPENDENT
    for (size_t i = 0; i < count; ++i) {
        const double a = totals[i], b = elements[i], sum = a + b, added = sum - a;
        const double lost = (a - (sum - added)) + (b - added), before = all_lost[i], both = before + lost, more = both - before;
        const double rest = (before - (both - more)) + (lost - more);
        sums[i] = sum;
        all_lost[i] = both;
        failed[i] += rest < 0 ? -rest : rest;
    }
}

/* Any byte but zero is true. */
JOIN(and_bool, uint8_t, row_u8, (a != 0) & (b != 0))
JOIN(or_bool, uint8_t, row_u8, (a | b) != 0)
JOIN(xor_bool, uint8_t, row_u8, (a != 0) ^ (b != 0))

/* A float of 16 or 8 bits is reduced in float32. FINITE: the format has no infinities, and one NaN for
 * each sign, whose other bits are all ones. A NaN is rounded to NOT_A_NUMBER.
 *
 * Widening: the same exponent bits mean 2^(127 - BIAS) times less in a float32. The product corrects
 * that, and makes a subnormal number normal.
 *
 * Rounding, to nearest even: a number that is subnormal in the narrow format is added to one whose last
 * bit is the smallest number of that format, so that the sum's lowest bits are the result. Of others
 * half a last bit is added, or just less if the last bit that stays is even. */
#define NARROW(NAME, TYPE, EXPONENT, MANTISSA, FINITE, NOT_A_NUMBER)                              \
    static inline float LEVEL(widen_##NAME)(uint32_t element)                                     \
    {                                                                                             \
        enum { BIAS = (1 << (EXPONENT - 1)) - 1, SIGN = 1 << (EXPONENT + MANTISSA) };             \
        enum { MAGNITUDE = SIGN - 1, ENDLESS = ((1 << EXPONENT) - 1) << MANTISSA };               \
        const uint32_t magnitude = element & MAGNITUDE, moved = magnitude << (23 - MANTISSA);     \
        const bool special = FINITE ? magnitude == MAGNITUDE : magnitude >= ENDLESS;              \
        const uint32_t wide = to_bits(from_bits(moved) * from_bits((uint32_t)(254 - BIAS) << 23)); \
        const uint32_t sign = (element & SIGN) << (31 - EXPONENT - MANTISSA);                     \
        return from_bits((special ? moved | 0x7f800000 : wide) | sign);                           \
    }                                                                                             \
    static inline TYPE LEVEL(round_##NAME)(float number)                                          \
    {                                                                                             \
        enum { BIAS = (1 << (EXPONENT - 1)) - 1, SIGN = 1 << (EXPONENT + MANTISSA) };             \
        enum { MAGNITUDE = SIGN - 1, ENDLESS = ((1 << EXPONENT) - 1) << MANTISSA };               \
        enum { BEYOND = FINITE ? MAGNITUDE : ENDLESS, SHIFT = 23 - MANTISSA };                    \
        const uint32_t least = (uint32_t)(128 - BIAS) << 23, rebias = least - (1u << 23);         \
        const uint32_t unit = (uint32_t)(24 + 127 - BIAS - MANTISSA) << 23;                       \
        const uint32_t bits = to_bits(number), wide = bits & 0x7fffffff, odd = wide >> SHIFT & 1; \
        const uint32_t small = to_bits(from_bits(wide) + from_bits(unit)) - unit;                 \
        uint32_t rounded = (wide - rebias + (1u << (SHIFT - 1)) - 1 + odd) >> SHIFT;              \
        rounded = rounded > BEYOND ? BEYOND : rounded;                                            \
        rounded = wide < least ? small : rounded;                                                 \
        rounded = wide > 0x7f800000 ? NOT_A_NUMBER : rounded;                                     \
        return (TYPE)(rounded | bits >> 31 << (EXPONENT + MANTISSA));                             \
    }

NARROW(float16, uint16_t, 5, 10, false, (wide >> 13 & 0x3ff) | 0x7c00)
NARROW(float8_e4m3fn, uint8_t, 4, 3, true, 0x7f)
NARROW(float8_e5m2, uint8_t, 5, 2, false, 0x7e)

/* A bfloat16 is the upper half of a float32. */
static inline float LEVEL(widen_bfloat16)(uint32_t element)
{
    return from_bits(element << 16);
}

static inline uint16_t LEVEL(round_bfloat16)(float number)
{
    const uint32_t bits = to_bits(number), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const bool not_a_number = (bits & 0x7fffffff) > 0x7f800000;
    return (uint16_t)(not_a_number ? (bits >> 16 & 0x8000) | 0x7fc0 : rounded);
}

/* The last is the whole fold of the most frequent case, two rows. */
#define CONVERTED(NAME, ROW)                                                                      \
    static void LEVEL(load_##NAME)(void *restrict total, const void *restrict row, size_t count)  \
    {                                                                                             \
        float *restrict totals = total;                                                           \
        const ROW *restrict elements = row;                                                       \
        for (size_t i = 0; i < count; ++i) totals[i] = LEVEL(widen_##NAME)(elements[i]);          \
    }                                                                                             \
    static void LEVEL(store_##NAME)(void *restrict out, const void *restrict total, size_t count) \
    {                                                                                             \
        ROW *restrict elements = out;                                                             \
        const float *restrict totals = total;                                                     \
        for (size_t i = 0; i < count; ++i) elements[i] = LEVEL(round_##NAME)(totals[i]);          \
    }                                                                                             \
    static void LEVEL(pair_##NAME)(void *out, const void *left, const void *right, size_t count)  \
    {                                                                                             \
        ROW *results = out;                                                                       \
        const ROW *one = left, *other = right;                                                    \
        INDEPENDENT                                                                               \
        for (size_t i = 0; i < count; ++i) {                                                      \
            const float a = LEVEL(widen_##NAME)(one[i]), b = LEVEL(widen_##NAME)(other[i]);       \
            results[i] = LEVEL(round_##NAME)(a + b);                                              \
        }                                                                                         \
    }

CONVERTED(float16, row_u16)
CONVERTED(bfloat16, row_u16)
CONVERTED(float8_e4m3fn, row_u8)
CONVERTED(float8_e5m2, row_u8)

#define SHARED(NAME)                                                                              \
    [SUM] = LEVEL(sum_##NAME), [PROD] = LEVEL(prod_##NAME), [AND] = LEVEL(and_##NAME),            \
    [OR] = LEVEL(or_##NAME), [XOR] = LEVEL(xor_##NAME)
#define MIN_MAX(NAME) [MIN] = LEVEL(min_##NAME), [MAX] = LEVEL(max_##NAME)
#define ARITHMETIC(NAME)                                                                          \
    [SUM] = LEVEL(sum_##NAME), [MEAN] = LEVEL(sum_##NAME), [PROD] = LEVEL(prod_##NAME), MIN_MAX(NAME),           \
    [FSUM] = LEVEL(join_exactly)
#define INTEGER(DTYPE, SIGN_FREE, ORDERED, BYTES)                                                 \
    {DTYPE, BYTES, BYTES, 1, NULL, NULL, NULL, NULL, {SHARED(SIGN_FREE), MIN_MAX(ORDERED)}}
#define FLOAT16_OR_8(NAME, BYTES)                                                                 \
    {#NAME, BYTES, 4, 1, LEVEL(load_##NAME), LEVEL(store_##NAME), LEVEL(pair_##NAME), LEVEL(divide_f32),       \
     {ARITHMETIC(f32)}}

static const Arithmetic LEVEL(table)[DTYPES] = {
    {"bool", 1, 1, 1, NULL, NULL, NULL, NULL,
     {[MIN] = LEVEL(and_bool), [MAX] = LEVEL(or_bool), [AND] = LEVEL(and_bool), [OR] = LEVEL(or_bool),
      [XOR] = LEVEL(xor_bool)}},
    INTEGER("int8", u8, i8, 1),
    INTEGER("int16", u16, i16, 2),
    INTEGER("int32", u32, i32, 4),
    INTEGER("int64", u64, i64, 8),
    INTEGER("uint8", u8, u8, 1),
    INTEGER("uint16", u16, u16, 2),
    INTEGER("uint32", u32, u32, 4),
    INTEGER("uint64", u64, u64, 8),
    {"float32", 4, 4, 1, NULL, NULL, NULL, LEVEL(divide_f32), {ARITHMETIC(f32)}},
    {"float64", 8, 8, 1, NULL, NULL, NULL, LEVEL(divide_f64), {ARITHMETIC(f64)}},
    FLOAT16_OR_8(float16, 2),
    FLOAT16_OR_8(bfloat16, 2),
    FLOAT16_OR_8(float8_e4m3fn, 1),
    FLOAT16_OR_8(float8_e5m2, 1),
    {"complex64", 8, 8, 2, NULL, NULL, NULL, LEVEL(divide_f32),
     {[SUM] = LEVEL(sum_f32), [MEAN] = LEVEL(sum_f32), [PROD] = COMPLEX_LEVEL(prod_c64),
      [FSUM] = LEVEL(join_exactly)}},
    {"complex128", 16, 16, 2, NULL, NULL, NULL, LEVEL(divide_f64),
     {[SUM] = LEVEL(sum_f64), [MEAN] = LEVEL(sum_f64), [PROD] = COMPLEX_LEVEL(prod_c128),
      [FSUM] = LEVEL(join_exactly)}},
};

#undef JOIN
#undef UNSIGNED
#undef SIGNED
#undef REAL
#undef NARROW
#undef CONVERTED
#undef SHARED
#undef MIN_MAX
#undef ARITHMETIC
#undef INTEGER
#undef FLOAT16_OR_8
