// Shared by every kernel of this folder: vectors, and loops over blocks of rows. build.py puts this text in place of
// `#include "simd.hpp"`, so a built kernel is looked up by it, too.
//
// Vectors are the compiler's own, as wide as the instruction set has them. Only what no compiler makes of plain
// expressions is written out for an instruction set: 16-bit floats and integer dot products. A sum never depends on how
// many rows are computed together, so a row has the same bits in any batch.
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

typedef uint16_t bf16, fp16;
constexpr int IN_PLANES = 2; // for by_sums: bf16 weights in planes
enum Dtype : int64_t { FP32, FP16, BF16, INT8 }; // as Python numbers them

// One product, see linear_avx512.cpp.
typedef void LinearKernel(const bf16* x, const void* w, const void* blocks, const float* scale, const bf16* bias,
                          bf16* y, int64_t M, int64_t I, int64_t O, int64_t x_row, int gated, int by_sums, int threads);

namespace { // a process may load this built in several ways, whose names must not clash
// Call body(n, m) for n rows from row m on until all M are done, in blocks as even as they can be, of N rows at most; n
// is a constant.
template <int N, class Body> static inline void with_constant(int64_t n, int64_t m, const Body& body) {
    if (n == N) body(std::integral_constant<int, N>{}, m);
    else if constexpr (N > 1) with_constant<N - 1>(n, m, body);
}
template <int N, class Body> static inline void for_row_blocks(int64_t m, int64_t M, const Body& body) {
    for (int64_t left = (M - m + N - 1) / N; left; left--) {
        const int64_t n = (M - m + left - 1) / left;
        with_constant<N>(n, m, body);
        m += n;
    }
}

#if defined(__AVX512BW__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__ARM_NEON)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
static_assert(std::endian::native == std::endian::little); // packed weights and halves of words rely on it
typedef float F __attribute__((vector_size(4 * LANES)));
typedef double D __attribute__((vector_size(4 * LANES)));
typedef float HalfF __attribute__((vector_size(2 * LANES))); // as many floats as a D has doubles
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

template <class V, class T> static inline V load(const T* from) { V x; memcpy(&x, from, sizeof x); return x; }
template <class V, class T> static inline void store(T* to, V x) { memcpy(to, &x, sizeof x); }
static inline F broadcast(float x) { return x - F{}; } // -0 stays -0
static inline I broadcast(int32_t x) { return x - I{}; }
static inline I iota() { // 0, 1, 2, ...
    I x;
    for (int i = 0; i < LANES; i++) x[i] = i;
    return x;
}
// sum + a * b, the sum first; rounded once where the instruction set has such an instruction
static inline F fmadd(F sum, F a, F b) {
#if defined(__AVX512F__)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    return (F)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}
static inline D fmadd(D sum, D a, D b) {
#if defined(__AVX512F__)
    return (D)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum);
#elif defined(__FMA__)
    return (D)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)sum);
#elif defined(__aarch64__)
    return (D)vfmaq_f64((float64x2_t)sum, (float64x2_t)a, (float64x2_t)b);
#else
    return sum + a * b;
#endif
}
static inline F larger(F a, F b) { return a > b ? a : b; } // NaN: b
static inline F to_float(I x) { return __builtin_convertvector(x, F); }
static inline D load_double(const float* x) { return __builtin_convertvector(load<HalfF>(x), D); }
// The sum of the lanes of a D, or of as many int64, added one after another.
template <class V> static inline auto sum_in_order(V x) {
    auto sum = x[0];
    for (int i = 1; i < LANES / 2; i++) sum += x[i];
    return sum;
}

// Join 32 outputs of a bf16 weight in two planes (ops/planes.py): n lines of 32 inputs, whose words hold two inputs of
// an output. A plane's words hold those of two words, as linear.py's pack_planes lays them: upper bytes of the first
// above those of the second, lower ones below. Without the lower plane: what a draft reads, e4m3 over their scale.
static inline void join_planes(const char* upper, const char* lower, const float* scale, int64_t n, char* to) {
    constexpr int V = 16 / LANES, BYTES = 4 * LANES; // vectors of 16 outputs
    Shorts base[2 * V]; // in both halves of a word: of e4m3, and with the lower plane over 15 << 7
    for (int v = 0; v < 2 * V; v++) {
        const I exponent = ((load<I>(scale + v * LANES) >> 23) - (lower ? 22 : 7)) << 7;
        base[v] = (Shorts)(exponent << 16 | (exponent & 0xffff));
    }
    auto less = [](Shorts a, Shorts b) { return a < b ? a : b; };
    for (int64_t line = 0; line < n; line++)
        for (int half = 0; half < 2; half++)
            for (int pair = 0; pair < 8; pair++, upper += V * BYTES, to += 2 * V * BYTES) {
                for (int v = 0; v < V; v++) {
                    const Shorts u = load<Shorts>(upper + v * BYTES), l = lower ? load<Shorts>(lower + v * BYTES) : u;
                    for (int word = 0; word < 2; word++) {
                        const Shorts byte = word ? u << 8 : u, t = (word ? u << 4 : u >> 4) & 0x07f0;
                        Shorts b; // without its sign
                        if (lower) {
                            const Shorts k = (word ? l >> 5 : l << 3) & 0x0780;
                            b = t + ((word ? l >> 8 : l) & 15) + 0x778 - k;
                            b += base[half * V + v] & (b != 0);
                        } else { // of subnormal numbers, too
                            b = less(less(t, 2 * t - 128), less(4 * t - 256, 8 * t - 384));
                            b = (b + base[half * V + v]) & (t != 0);
                        }
                        store(to + (word * V + v) * BYTES, b | (byte & -0x8000));
                    }
                }
                if (lower) lower += V * BYTES;
            }
}

// The lanes L of a followed by b.
template <int... L> static inline F shuffle(F a, F b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, L...);
#else
    return __builtin_shuffle(a, b, I{L...});
#endif
}
template <int S, int... L> static inline F reduce_max_by(F x, std::integer_sequence<int, L...> lanes) {
    x = larger(x, shuffle<(L ^ S)...>(x, x));
    if constexpr (S > 1) return reduce_max_by<S / 2>(x, lanes);
    else return x;
}
static inline float reduce_max(F x) { return reduce_max_by<LANES / 2>(x, std::make_integer_sequence<int, LANES>{})[0]; }
static inline bool any_above(F x, float bound) { // whether any lane is
#if defined(__AVX2__) && !defined(__AVX512BW__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)broadcast(bound), _CMP_GT_OQ));
#else
    return reduce_max(x) > bound;
#endif
}

static inline float reduce_sum(F x) {
    float sum[LANES];
    store(sum, x);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) sum[i] += sum[i + n];
    return sum[0];
}

// 2^x for -126 <= x <= 126, relative error below 2e-7; NaN stays NaN
static inline F exp2_in_range(F x) {
    const float magic = 12583039.f; // 1.5 * 2^23 + 127: adding it rounds to whole numbers, biased as exponents are
    const F shifted = x + magic, f = x - (shifted - magic); // -0.5 .. 0.5
    F y = broadcast(1.5345812e-4f);
    for (float c : {1.3399931e-3f, 9.6184890e-3f, 5.5503288e-2f, 2.4022647e-1f, 6.9314721e-1f, 1.f})
        y = fmadd(broadcast(c), y, f);
    return y * (F)((I)shifted << 23);
}
// 2^x, x clamped to -126 .. 126
static inline F exp2_clamped(F x) {
    return exp2_in_range(x < -126.f ? broadcast(-126.f) : x > 126.f ? broadcast(126.f) : x);
}

// 16-bit and 8-bit numbers, widened. GCC splits these conversions unless the instruction is named.
static inline F load_bf16(const bf16* x) {
#if defined(__AVX512BW__)
    const I bits = (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
#elif defined(__AVX2__)
    const I bits = (I)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x));
#elif defined(__aarch64__)
    const I bits = (I)vmovl_u16(vld1_u16(x));
#else
    const I bits = __builtin_convertvector(load<Halves>(x), I);
#endif
    return (F)(bits << 16);
}
static inline I load_int8(const int8_t* x) {
#if defined(__AVX512BW__)
    return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x));
#elif defined(__AVX2__)
    return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x));
#else
    return __builtin_convertvector(load<Bytes>(x), I);
#endif
}
static inline F load_int8_as_float(const int8_t* x) { return to_float(load_int8(x)); }
static inline float bf16_to_float(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    return load<float>(&bits);
}
static inline float fp16_to_float(fp16 x) {
    const uint32_t exponent = x >> 10 & 31, sign = (uint32_t)(x & 0x8000) << 16;
    // subnormals, below 2^-14, by a product: an fp32 subnormal might be flushed to zero
    const float subnormal = (float)(x & 0x3ff) * 0x1p-24f;
    uint32_t bits = ((uint32_t)(x & 0x7fff) << 13) + (exponent == 31 ? 0x70000000 : 0x38000000);
    if (!exponent) bits = load<uint32_t>(&subnormal);
    bits |= sign;
    return load<float>(&bits);
}
static inline F load_fp16(const fp16* x) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x));
#elif defined(__F16C__)
    return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x));
#elif defined(__aarch64__)
    return (F)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
#else
    F y;
    for (int i = 0; i < LANES; i++) y[i] = fp16_to_float(x[i]);
    return y;
#endif
}

// Round to nearest even; NaN stays NaN.
static inline void store_bf16(bf16* to, F x) {
    const I bits = (I)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    const I bits_or_nan = x == x ? rounded : bits | 0x400000;
    store(to, __builtin_convertvector(bits_or_nan >> 16 & 0xffff, Halves));
}
static inline void store_fp16(fp16* to, F x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
    for (int i = 0; i < LANES; i++) {
        const float y = x[i], size = std::fabs(y);
        const uint32_t bits = load<uint32_t>(&y), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
        uint32_t half;
        if (rest > 0x7f800000) half = 0x7e00;
        else if (size >= 65520.f) half = 0x7c00;
        else if (size < 0x1p-14f) half = (uint32_t)std::nearbyint(size * 0x1p24f); // a multiple of the smallest one
        else half = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
        to[i] = (fp16)(sign | half);
    }
#endif
}

// For every lane: the dot product of its two int16.
static inline I dot2(I a, I b) {
#if defined(__AVX512BW__)
    return (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (I)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
// sum + dot2(a, b): one instruction with VNNI, though of longer latency than two
static inline I dot2(I sum, I a, I b) {
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
    return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && defined(__AVXVNNI__)
    return (I)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#else
    return sum + dot2(a, b);
#endif
}

// sum and, for every lane, the dot product of its four int8
#if defined(__ARM_FEATURE_DOTPROD) || defined(USE_DOT4)
constexpr bool HAS_DOT4 = true; // one instruction, so kernels use it rather than dot2
#else
constexpr bool HAS_DOT4 = false;
#endif
static inline I dot4(I sum, I a, I b) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (I)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
#else
    for (int bits = 0; bits < 32; bits += 8) sum += (a << bits >> 24) * (b << bits >> 24);
    return sum;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512BW__) && !defined(USE_DOT4)
constexpr bool HAS_BYTES = true; // products of bytes, two to a sum of 16 bits, which they must not exceed
// sum and, for every int16, the dot product of its two unsigned bytes and two int8
static inline Shorts add_bytes(Shorts sum, I a, I b) {
    return sum + (Shorts)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}
// For every int16: the dot product of its two int8 of a and two of b, which has no -128.
static inline I bytes_dot2(I a, I b) {
    return (I)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)a), _mm256_sign_epi8((__m256i)b, (__m256i)a));
}
#else
constexpr bool HAS_BYTES = false;
static inline Shorts add_bytes(Shorts sum, I, I) { return sum; }
static inline I bytes_dot2(I a, I) { return a; }
#endif

#if defined(__AVX512F__)
// Transpose 16 x 16 words of 4 bytes, whose rows are from_row and to_row bytes apart; from may be to.
static inline void transpose_16x16(const char* from, int64_t from_row, char* to, int64_t to_row) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * from_row);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(to + i * to_row, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 4) * to_row, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_storeu_si512(to + (i + 8) * to_row, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        _mm512_storeu_si512(to + (i + 12) * to_row, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
    }
}
#endif
}
