// The reductions of arraycomm._folds on a device, with the same bits, and the packing of pieces.
//
// Each reduction is compiled by itself. With OP and DTYPE, which kernels.py takes from the two
// lists below, this file has the folds and `prefixes`; without them it has `copy_pieces` and `spoil`. The compiler
// must not fuse a product with a sum, nor flush subnormal numbers: see the options in kernels.py.
//
// No header is included, so that NVRTC needs no other files. A host compiler takes the file as
// well; then the indices of a thread are variables, which the tests set for thread after thread.

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ __launch_bounds__(256)
#define SHARED __shared__
#define MEET __syncthreads()
#else
#define DEVICE inline
#define SHARED static
#define MEET
#define KERNEL extern "C"
struct Index {
    unsigned x;
};
static Index gridDim, blockDim, blockIdx, threadIdx;
#endif

typedef long long Size;  // an array may have more than 2^31 elements

// Elements that a thread loads and stores at once: 16 bytes, or one element with its own alignment.
template <class T, int COUNT>
struct alignas(16) Pack {
    T at[COUNT];
};
template <class T>
struct Pack<T, 1> {
    T at[1];
};

// ---- dtypes: how an element is stored, and what it is reduced as --------------------------------

union Float32 {
    float number;
    unsigned bits;
};

DEVICE float from_bits(unsigned bits) {
    Float32 word;
    word.bits = bits;
    return word.number;
}

DEVICE unsigned to_bits(float number) {
    Float32 word;
    word.number = number;
    return word.bits;
}

template <class T>
struct Complex {
    T real, imag;
};

template <class T>
DEVICE Complex<T> operator+(Complex<T> a, Complex<T> b) {
    return {a.real + b.real, a.imag + b.imag};
}

template <class T>
DEVICE Complex<T> operator*(Complex<T> a, Complex<T> b) {
    return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}

// Reduced in the type in which it is stored. Sums and products are computed in `Arithmetic`.
template <class T, class A = T>
struct Plain {
    using Element = T;
    using Total = T;
    using Arithmetic = A;
    static DEVICE Total widen(Element element) { return element; }
    static DEVICE Element narrow(Total total) { return total; }
};

// Overflow has to wrap. In C++ only unsigned integers do so; signed overflow is undefined.
template <class T>
using Integer = Plain<T, unsigned long long>;

// Any byte but zero is true; min and max of zeros and ones are `and` and `or`.
struct Bool : Plain<unsigned char> {
    static DEVICE Total widen(Element element) { return element != 0; }
};

// A float of 16 or 8 bits, reduced in float32, and rounded to nearest even once at the end.
// FINITE: the format has no infinities, and one NaN for each sign, whose other bits are all ones.
template <class T, int EXPONENT, int MANTISSA, bool FINITE = false>
struct Narrow {
    using Element = T;
    using Total = float;
    using Arithmetic = float;

    static constexpr int SHIFT = 23 - MANTISSA;  // of the mantissa in a float32
    static constexpr unsigned BIAS = (1u << (EXPONENT - 1)) - 1;
    static constexpr unsigned REBIAS = (127 - BIAS) << 23;
    static constexpr unsigned MAGNITUDE = (1u << (EXPONENT + MANTISSA)) - 1;  // all but the sign
    static constexpr unsigned ENDLESS = ((1u << EXPONENT) - 1) << MANTISSA;   // infinity, if any
    static constexpr unsigned NOT_A_NUMBER = FINITE ? MAGNITUDE : ENDLESS | 1u << (MANTISSA - 1);
    static constexpr unsigned BEYOND = FINITE ? MAGNITUDE : ENDLESS;  // what an overflow becomes

    static DEVICE float widen(Element element) {
        const unsigned magnitude = element & MAGNITUDE;
        const unsigned sign = (element & (MAGNITUDE + 1)) << (31 - EXPONENT - MANTISSA);
        // In a float32 these exponent bits mean 2^(127 - BIAS) times less. The product corrects
        // that, and makes a subnormal number normal.
        unsigned wide = to_bits(from_bits(magnitude << SHIFT) * from_bits((254 - BIAS) << 23));
        if (FINITE ? magnitude == NOT_A_NUMBER : magnitude > ENDLESS) wide = 0x7fc00000;
        if (!FINITE && magnitude == ENDLESS) wide = 0x7f800000;
        return from_bits(wide | sign);
    }

    static DEVICE Element narrow(float number) {
        const unsigned wide = to_bits(number) & 0x7fffffff;
        const unsigned sign = to_bits(number) >> 31 << (EXPONENT + MANTISSA);
        unsigned magnitude;
        if (wide > 0x7f800000) {
            magnitude = NOT_A_NUMBER;
        } else if (wide < REBIAS + (1u << 23)) {
            // Subnormal here. The last bit of 2^(24 - BIAS - MANTISSA) is the smallest such number.
            // So the addition rounds to a multiple of it, which is then in the lowest bits.
            const float unit = from_bits((24 + 127 - BIAS - MANTISSA) << 23);
            magnitude = to_bits(from_bits(wide) + unit) - to_bits(unit);
        } else {
            const unsigned odd = wide >> SHIFT & 1;
            magnitude = (wide - REBIAS + (1u << (SHIFT - 1)) - 1 + odd) >> SHIFT;
            if (magnitude > BEYOND) magnitude = BEYOND;
        }
        return Element(sign | magnitude);
    }
};

using dtype_bool = Bool;
using dtype_int8 = Integer<signed char>;
using dtype_int16 = Integer<short>;
using dtype_int32 = Integer<int>;
using dtype_int64 = Integer<long long>;
using dtype_uint8 = Integer<unsigned char>;
using dtype_uint16 = Integer<unsigned short>;
using dtype_uint32 = Integer<unsigned>;
using dtype_uint64 = Integer<unsigned long long>;
using dtype_float16 = Narrow<unsigned short, 5, 10>;
using dtype_float32 = Plain<float>;
using dtype_float64 = Plain<double>;
using dtype_bfloat16 = Narrow<unsigned short, 8, 7>;
using dtype_float8_e4m3fn = Narrow<unsigned char, 4, 3, true>;
using dtype_float8_e5m2 = Narrow<unsigned char, 5, 2>;
using dtype_complex64 = Plain<Complex<float>>;
using dtype_complex128 = Plain<Complex<double>>;

// ---- reductions: `join` makes one total of two, and `finish` the result of the last ------------

template <class D>
struct Reduction {
    static constexpr bool EXACT = false;
    using Total = typename D::Total;
    using Arithmetic = typename D::Arithmetic;
    static DEVICE Total finish(Total total, int) { return total; }
};

template <class D>
struct op_sum : Reduction<D> {
    using typename Reduction<D>::Total;
    using typename Reduction<D>::Arithmetic;
    static DEVICE Total join(Total a, Total b) { return Total(Arithmetic(a) + Arithmetic(b)); }
};

template <class T>
DEVICE T divide(T number, int count) {
    return number / T(count);
}

// Part by part: a complex division of (inf + 0i) by n would have a NaN part.
template <class T>
DEVICE Complex<T> divide(Complex<T> number, int count) {
    return {number.real / T(count), number.imag / T(count)};
}

template <class D>
struct op_mean : op_sum<D> {
    using typename Reduction<D>::Total;
    static DEVICE Total finish(Total total, int count) { return divide(total, count); }
};

template <class D>
struct op_prod : Reduction<D> {
    using typename Reduction<D>::Total;
    using typename Reduction<D>::Arithmetic;
    static DEVICE Total join(Total a, Total b) { return Total(Arithmetic(a) * Arithmetic(b)); }
};

// A NaN is unequal to itself, and comparisons with it are false: so a NaN in a or b is the result.
template <class D>
struct op_min : Reduction<D> {
    using typename Reduction<D>::Total;
    static DEVICE Total join(Total a, Total b) { return a != a || a <= b ? a : b; }
};

template <class D>
struct op_max : Reduction<D> {
    using typename Reduction<D>::Total;
    static DEVICE Total join(Total a, Total b) { return a != a || a >= b ? a : b; }
};

#define BITWISE(NAME, OPERATOR)                                                     \
    template <class D>                                                              \
    struct NAME : Reduction<D> {                                                    \
        using typename Reduction<D>::Total;                                         \
        static DEVICE Total join(Total a, Total b) { return Total(a OPERATOR b); }  \
    };
BITWISE(op_and, &)
BITWISE(op_or, |)
BITWISE(op_xor, ^)

// An exact sum has no total that is an element: see `sum_rows`.
template <class D>
struct op_fsum {
    static constexpr bool EXACT = true;
};

// ---- fold and prefixes --------------------------------------------------------------------------

// The argument of a launch. It is passed by value, so no table of addresses is copied to the device
// first; it fits in the 4096 bytes that every CUDA passes. More rows than MAX_ROWS take several
// launches; between these the unrounded totals stay in `carry`. kernels.py has the same dtype.
constexpr int MAX_ROWS = 240;

struct Rows {
    const void *rows[MAX_ROWS];
    void *outs[MAX_ROWS];  // a fold has only the first
    void *carry;           // a Total for each element
    Size elements;
    int count;   // of rows, in this launch
    int before;  // rows, in earlier launches
    int more;    // whether launches follow
    int packed;  // whether all rows and outs are aligned to 16 bytes
};

// What ranks that go ahead of the check of their headers have gathered: a digest of each rank's header.
struct Shown {
    const unsigned long long *digests;  // or null
    Size ranks;
};

// The argument of a fold of a few rows, in one launch, which ends a call.
constexpr int FEW_ROWS = 16;

struct Few {
    const void *rows[FEW_ROWS];
    void *outs[1];
    void *carry;  // null
    Size elements;
    int count, before, more, packed;    // as in Rows; nothing is before and nothing follows
    const volatile unsigned *given_up;  // the host's memory; or null
    volatile unsigned *word;            // the same, where `number` is written at the end; or null
    unsigned number;
    Shown shown;
};

template <class D, int COUNT>
struct Totals {
    typename D::Total at[COUNT];

    DEVICE void load(const void *row, Size place) {
        const auto pack = static_cast<const Pack<typename D::Element, COUNT> *>(row)[place];
        for (int i = 0; i < COUNT; ++i) at[i] = D::widen(pack.at[i]);
    }

    template <class Op>
    DEVICE void join(const Totals &other) {
        for (int i = 0; i < COUNT; ++i) at[i] = Op::join(at[i], other.at[i]);
    }

    template <class Op>
    DEVICE void store(void *out, Size place, int rows) const {
        Pack<typename D::Element, COUNT> pack;
        for (int i = 0; i < COUNT; ++i) pack.at[i] = D::narrow(Op::finish(at[i], rows));
        static_cast<Pack<typename D::Element, COUNT> *>(out)[place] = pack;
    }
};

// Reduces the packs from `place` to `end`; each thread of the grid takes its share of them.
template <class D, class Op, bool EVERY, int COUNT, class Call>
DEVICE void reduce_packs(const Call &call, Size place, Size end) {
    place += Size(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; place < end; place += Size(gridDim.x) * blockDim.x) {
        Totals<D, COUNT> *const carry = static_cast<Totals<D, COUNT> *>(call.carry) + place;
        Totals<D, COUNT> total, next;
        if (call.before) total = *carry;
        for (int row = 0; row < call.count; ++row) {
            const int joined = call.before + row + 1;
            next.load(call.rows[row], place);
            if (joined == 1) total = next;
            else total.template join<Op>(next);
            if (EVERY) total.template store<Op>(call.outs[row], place, joined);
        }
        if (call.more) *carry = total;
        else if (!EVERY) total.template store<Op>(call.outs[0], place, call.before + call.count);
    }
}

// ---- exact sums, as in arraycomm/_native/exact.c ------------------------------------------------

constexpr int SUM_WORDS = 67, NANS = 67, INFINITIES = 68, MINUS_INFINITIES = 69, EXACT_WORDS = 70;

union Float64 {
    double number;
    unsigned long long bits;
};

// The parts of a complex number are summed as two real ones.
template <class D>
struct Reals {
    using Real = D;
    static constexpr int PARTS = 1;
};
template <class T>
struct Reals<Plain<Complex<T>>> {
    using Real = Plain<T>;
    static constexpr int PARTS = 2;
};

// A rounded sum, and what it has lost: exact, but NaN if anything is not finite.
struct Added {
    double sum, lost;
};

DEVICE Added add(double a, double b) {
    const double sum = a + b, added = sum - a;
    return {sum, (a - (sum - added)) + (b - added)};
}

// Of a number that was rounded, and what is left of it, the one of the two floats beside it that is odd.
DEVICE double make_odd(double sum, double left) {
    Float64 made, rest;
    made.number = sum, rest.number = left;
    if ((left < 0 || left > 0) && !(made.bits & 1)) made.bits += (made.bits ^ rest.bits) >> 63 ? -1 : 1;
    return made.number;
}

DEVICE float make_odd_float(double number) {
    Float32 made;
    made.number = float(number);
    const double left = number - made.number;
    if ((left < 0 || left > 0) && !(made.bits & 1)) made.bits += (left < 0) != (made.bits >> 31) ? -1 : 1;
    return made.number;
}

template <class R>
struct Narrowing {  // of doubles that are odd, unless they are the elements
    static constexpr bool ODD = true;
    static DEVICE typename R::Element narrow(double sum) { return R::narrow(make_odd_float(sum)); }
};
template <>
struct Narrowing<Plain<float>> {
    static constexpr bool ODD = true;
    static DEVICE float narrow(double sum) { return float(sum); }
};
template <>
struct Narrowing<Plain<double>> {
    static constexpr bool ODD = false;
    static DEVICE double narrow(double sum) { return sum; }
};

// An exact sum in units of 2^-1074: words of 32 bits each but for the last, and the counts of what is not finite.
struct Words {
    long long at[EXACT_WORDS];

    DEVICE void clear() {
        for (int place = 0; place < EXACT_WORDS; ++place) at[place] = 0;
    }

    DEVICE void add(double number) {
        Float64 word;
        word.number = number;
        const unsigned long long fraction = word.bits & 0xfffffffffffffULL;
        const int exponent = int(word.bits >> 52 & 0x7ff);
        const bool minus = word.bits >> 63;
        if (exponent == 0x7ff) {
            ++at[fraction ? NANS : minus ? MINUS_INFINITIES : INFINITIES];
            return;
        }
        const int place = exponent ? exponent - 1 : 0, shift = place % 32;
        const unsigned long long significand = fraction | (exponent ? 1ULL << 52 : 0);
        const long long low = significand << shift & 0xffffffffULL, high = significand >> (32 - shift);
        at[place / 32] += minus ? -low : low;
        at[place / 32 + 1] += minus ? -high : high;
    }

    DEVICE void carry() {
        for (int place = 0; place < SUM_WORDS - 1; ++place) {
            const long long over = at[place] >> 32;
            at[place] &= 0xffffffffLL;
            at[place + 1] += over;
        }
    }

    // To nearest even, or to odd. A sum of zeros is +0.
    DEVICE double rounded(bool odd) const {
        const unsigned long long infinity = 0x7ff0000000000000ULL;
        Words sum = *this;
        Float64 made;
        made.bits = 0x7ff8000000000000ULL;
        if (at[NANS] || (at[INFINITIES] && at[MINUS_INFINITIES])) return made.number;
        made.bits = infinity | (at[MINUS_INFINITIES] ? 1ULL << 63 : 0);
        if (at[INFINITIES] || at[MINUS_INFINITIES]) return made.number;
        sum.carry();
        const unsigned long long sign = sum.at[SUM_WORDS - 1] < 0 ? 1ULL << 63 : 0;
        if (sign) {
            for (int place = 0; place < SUM_WORDS; ++place) sum.at[place] = -sum.at[place];
            sum.carry();
        }
        int top = SUM_WORDS - 1, length = 0;
        while (top > 0 && !sum.at[top]) --top;
        const unsigned long long high = sum.at[top], middle = top > 0 ? sum.at[top - 1] : 0;
        const unsigned long long low = top > 1 ? sum.at[top - 2] : 0, whole = high << 32 | middle;
        unsigned long long below = 0;
        for (int place = 0; place < top - 2; ++place) below |= sum.at[place];
        while (high >> length) ++length;
        const int more = 32 * top + length - 53;  // bits than a double has
        made.bits = sign | (top ? whole : high);
        if (more <= 0) return made.number;
        const unsigned long long first = whole << (32 - length) | low >> length, significand = first >> 11;
        const unsigned long long behind = low << (32 - length) & 0xffffffffULL;
        const unsigned long long rest = (first & 0x7ff) << 1 | (below || behind);
        const bool up = odd ? rest && !(significand & 1) : rest > 0x800 || (rest == 0x800 && significand & 1);
        const unsigned long long bits = ((unsigned long long)more << 52) + significand + up;
        made.bits = sign | (bits < infinity ? bits : infinity);
        return made.number;
    }
};

// The sum of one place of all rows: by pairs of doubles if these lose nothing, and else in words, as
// with EVERY, or if it takes several launches.
template <class D, bool EVERY, class Call>
DEVICE void sum_rows(const Call &call, Size place) {
    using R = typename Reals<D>::Real;
    using Element = typename R::Element;
    using N = Narrowing<R>;
    const auto load = [&](int row) { return double(R::widen(static_cast<const Element *>(call.rows[row])[place])); };
    const auto store = [&](int out, double sum) { static_cast<Element *>(call.outs[out])[place] = N::narrow(sum); };
    if (!EVERY && !call.before && !call.more) {
        Added total = {load(0), 0};
        double failed = 0;
        for (int row = 1; row < call.count; ++row) {
            const Added next = add(total.sum, load(row)), lost = add(total.lost, next.lost);
            failed += lost.lost < 0 ? -lost.lost : lost.lost;
            total = {next.sum, lost.sum};
        }
        const Added sum = add(total.sum, total.lost);
        if (failed == 0) {
            store(0, N::ODD ? make_odd(sum.sum, sum.lost) : sum.sum);
            return;
        }
    }
    Words *const carried = static_cast<Words *>(call.carry) + place;
    Words words;
    if (call.before) words = *carried;
    else words.clear();
    for (int row = 0; row < call.count; ++row) {
        words.add(load(row));
        if (EVERY) store(row, words.rounded(N::ODD));
    }
    words.carry();
    if (call.more) *carried = words;
    else if (!EVERY) store(0, words.rounded(N::ODD));
}

// EVERY: the prefix up to each row goes to its own out; otherwise the fold goes to the first out.
template <class D, class Op, bool EVERY, class Call>
DEVICE void reduce_rows(const Call &call) {
    if constexpr (Op::EXACT) {
        const Size places = call.elements * Reals<D>::PARTS;
        for (Size place = Size(blockIdx.x) * blockDim.x + threadIdx.x; place < places; place += Size(gridDim.x) * blockDim.x)
            sum_rows<D, EVERY>(call, place);
    } else {
        constexpr int COUNT = 16 / sizeof(typename D::Element);
        const Size packs = call.packed ? call.elements / COUNT : 0;
        reduce_packs<D, Op, EVERY, COUNT>(call, 0, packs);
        reduce_packs<D, Op, EVERY, 1>(call, packs * COUNT, call.elements);
    }
}

// ---- pieces -------------------------------------------------------------------------------------

constexpr int MAX_PIECES = 120;
constexpr Size CHUNK_BYTES = 16 << 10;  // copied by one block

struct Piece {
    const char *source;  // null for zeros
    char *target;
    Size nbytes;
    Size end;  // the number of chunks of this piece and of those before it
};

struct Pieces {
    Piece at[MAX_PIECES];
    int count;
};

// Copies words of one size, if the addresses and the length are multiples of it.
template <class Word>
DEVICE bool copy_words(const char *source, char *target, Size nbytes) {
    if ((Size(source) | Size(target) | nbytes) % sizeof(Word)) return false;
    for (Size word = threadIdx.x; word < nbytes / Size(sizeof(Word)); word += blockDim.x) {
        reinterpret_cast<Word *>(target)[word] =
            source ? reinterpret_cast<const Word *>(source)[word] : Word();
    }
    return true;
}

DEVICE void copy_chunk(const Pieces &pieces) {
    const Size chunk = blockIdx.x;
    int low = 0, high = pieces.count - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (chunk < pieces.at[middle].end) high = middle;
        else low = middle + 1;
    }
    const Piece &piece = pieces.at[low];
    const Size start = (chunk - (low ? pieces.at[low - 1].end : 0)) * CHUNK_BYTES;
    const Size left = piece.nbytes - start, nbytes = left < CHUNK_BYTES ? left : CHUNK_BYTES;
    const char *const source = piece.source ? piece.source + start : nullptr;
    char *const target = piece.target + start;
    copy_words<Pack<unsigned, 4>>(source, target, nbytes) ||
        copy_words<unsigned>(source, target, nbytes) ||
        copy_words<unsigned short>(source, target, nbytes) ||
        copy_words<char>(source, target, nbytes);
}

// ---- results of calls that were given up, or in which the ranks differ ---------------------------

struct Spoiled {
    char *target;
    Size nbytes;
    const volatile unsigned *given_up;  // the host's memory
    Shown shown;
};

// Whether a call has no result: it was given up, or the ranks do not call the same.
DEVICE bool is_void(const volatile unsigned *given_up, const Shown &shown) {
    SHARED bool found;
    if (!threadIdx.x) {
        bool differ = given_up && *given_up;
        if (shown.digests)
            for (Size rank = 1; rank < shown.ranks; ++rank) differ |= shown.digests[rank] != shown.digests[0];
        found = differ;
    }
    MEET;
    return found;
}

DEVICE void set_all_bits(char *target, Size nbytes) {
    const Size step = Size(gridDim.x) * blockDim.x;
    for (Size at = Size(blockIdx.x) * blockDim.x + threadIdx.x; at < nbytes; at += step)
        target[at] = -1;
}

DEVICE void spoil_result(const Spoiled &result) {
    if (is_void(result.given_up, result.shown)) set_all_bits(result.target, result.nbytes);
}

// Folds a few rows, or spoils the result; tells the host that the device has come here.
template <class D, class Op>
DEVICE void fold_few_rows(const Few &call) {
    if (is_void(call.given_up, call.shown)) {
        const Size nbytes = call.elements * Size(sizeof(typename D::Element));
        set_all_bits(static_cast<char *>(call.outs[0]), nbytes);
    } else {
        reduce_rows<D, Op, false>(call);
    }
    if (call.word && !blockIdx.x && !threadIdx.x) *call.word = call.number;
}

// ---- kernels ------------------------------------------------------------------------------------

#ifdef OP
KERNEL void fold(const Rows call) { reduce_rows<DTYPE, OP<DTYPE>, false>(call); }
KERNEL void fold_few(const Few call) { fold_few_rows<DTYPE, OP<DTYPE>>(call); }
KERNEL void prefixes(const Rows call) { reduce_rows<DTYPE, OP<DTYPE>, true>(call); }
#else
KERNEL void copy_pieces(const Pieces pieces) { copy_chunk(pieces); }
KERNEL void spoil(const Spoiled result) { spoil_result(result); }
#endif
