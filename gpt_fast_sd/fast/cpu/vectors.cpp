// What the kernels for any CPU begin with: vectors as the compiler knows them, as wide as the instruction set has them.
//
// Only what no compiler makes of plain expressions is written out for an instruction set: 16-bit floats and products of
// pairs. Sums never depend on how many rows are computed together, so a row has the same bits in any batch.
#include <algorithm>
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
enum Dtype { FP32, FP16, BF16, INT8 }; // as Python passes it
namespace { // a process may load this built in several ways, whose names must not clash
#if defined(__AVX512BW__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__ARM_NEON)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
static_assert(std::endian::native == std::endian::little); // what is packed and what halves of words are taken for
typedef float F __attribute__((vector_size(4 * LANES)));
typedef double D __attribute__((vector_size(4 * LANES)));
typedef float FewF __attribute__((vector_size(2 * LANES))); // as many as a D has
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

template <class V, class T> static inline V load(const T* from) { V x; memcpy(&x, from, sizeof x); return x; }
template <class V, class T> static inline void store(T* to, V x) { memcpy(to, &x, sizeof x); }
static inline F all(float x) { return x - F{}; } // -0 stays -0
static inline I all(int32_t x) { return x - I{}; }
static inline I numbers() { // of the lanes
    I x;
    for (int i = 0; i < LANES; i++) x[i] = i;
    return x;
}
// sum + a * b, rounded once where the instruction set has that
static inline F more(F sum, F a, F b) {
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
static inline D more(D sum, D a, D b) {
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
static inline F floats(I x) { return __builtin_convertvector(x, F); }
static inline D doubles(const float* x) { return __builtin_convertvector(load<FewF>(x), D); }
// The sum of the lanes of doubles, or of as many whole numbers, one after another.
template <class V> static inline auto total(V x) {
    auto sum = x[0];
    for (int i = 1; i < LANES / 2; i++) sum += x[i];
    return sum;
}

// Lanes with these numbers, of a and then of b.
template <int... L> static inline F lanes_of(F a, F b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, L...);
#else
    return __builtin_shuffle(a, b, I{L...});
#endif
}
// LANES vectors transposed: by halves, by quarters, and so on, those which are not on the diagonal change places.
template <int S, int... L> static inline void turn_by(F* x, std::integer_sequence<int, L...> lanes) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & S) continue;
        const F a = x[i], b = x[i | S];
        x[i] = lanes_of<(L & S ? LANES + (L ^ S) : L)...>(a, b);
        x[i | S] = lanes_of<(L & S ? LANES + L : L | S)...>(a, b);
    }
    if constexpr (S > 1) turn_by<S / 2>(x, lanes);
}
static inline void turn(F* x) { turn_by<LANES / 2>(x, std::make_integer_sequence<int, LANES>{}); }
template <int S, int... L> static inline F largest_by(F x, std::integer_sequence<int, L...> lanes) {
    x = larger(x, lanes_of<(L ^ S)...>(x, x));
    if constexpr (S > 1) return largest_by<S / 2>(x, lanes);
    else return x;
}
static inline float largest(F x) { return largest_by<LANES / 2>(x, std::make_integer_sequence<int, LANES>{})[0]; }

static inline float sum_of(F x) {
    float sum[LANES];
    store(sum, x);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) sum[i] += sum[i + n];
    return sum[0];
}

// 2^x for -126 <= x <= 126, relative error below 2e-7; NaN stays
static inline F exp2_within(F x) {
    const float magic = 12583039.f; // 1.5 * 2^23 + 127: adding it rounds to whole numbers, biased as exponents are
    const F shifted = x + magic, f = x - (shifted - magic); // -0.5 .. 0.5
    F y = all(1.5345812e-4f);
    for (float c : {1.3399931e-3f, 9.6184890e-3f, 5.5503288e-2f, 2.4022647e-1f, 6.9314721e-1f, 1.f}) y = more(all(c), y, f);
    return y * (F)((I)shifted << 23);
}
// less is as -126, and more as 126
static inline F exp2_of(F x) { return exp2_within(x < -126.f ? all(-126.f) : x > 126.f ? all(126.f) : x); }

// GCC takes these apart unless they are named
static inline F widened(const bf16* x) {
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
static inline I whole_bytes(const int8_t* x) {
#if defined(__AVX512BW__)
    return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x));
#elif defined(__AVX2__)
    return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x));
#else
    return __builtin_convertvector(load<Bytes>(x), I);
#endif
}
static inline F of_bytes(const int8_t* x) { return floats(whole_bytes(x)); }
static inline float widened_one(bf16 x) { const uint32_t bits = (uint32_t)x << 16; float y; memcpy(&y, &bits, 4); return y; }
static inline float of_half(fp16 x) {
    const uint32_t exponent = x >> 10 & 31, sign = (uint32_t)(x & 0x8000) << 16;
    float y = (float)(x & 0x3ff) * 0x1p-24f; // below 2^-14; of no fp32 that is too small to be normal, as flushed ones would be
    uint32_t bits = ((uint32_t)(x & 0x7fff) << 13) + (exponent == 31 ? 0x70000000 : 0x38000000);
    if (!exponent) memcpy(&bits, &y, 4);
    bits |= sign;
    memcpy(&y, &bits, 4);
    return y;
}
static inline F of_halves(const fp16* x) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x));
#elif defined(__F16C__)
    return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x));
#elif defined(__aarch64__)
    return (F)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
#else
    F y;
    for (int i = 0; i < LANES; i++) y[i] = of_half(x[i]);
    return y;
#endif
}

// Rounded to even; NaN stays one.
static inline void store_bf16(bf16* to, F x) {
    const I bits = (I)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    const I kept = x == x ? rounded : bits | 0x400000;
    store(to, __builtin_convertvector(kept >> 16 & 0xffff, Halves));
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
        uint32_t bits;
        const float y = x[i], size = std::fabs(y);
        memcpy(&bits, &y, 4);
        const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
        uint32_t half;
        if (rest > 0x7f800000) half = 0x7e00;
        else if (size >= 65520.f) half = 0x7c00;
        else if (size < 0x1p-14f) half = (uint32_t)std::nearbyint(size * 0x1p24f); // in steps of the smallest one
        else half = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
        to[i] = (fp16)(sign | half);
    }
#endif
}

// the sum of the products of both 16-bit whole numbers in every lane
static inline I pairs(I a, I b) {
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
// added to a sum, in one instruction where there is VNNI, which takes longer until its sum is there
static inline I pairs(I sum, I a, I b) {
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
    return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && defined(__AVXVNNI__)
    return (I)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#else
    return sum + pairs(a, b);
#endif
}

// added to a sum, the products of all four bytes in every lane, signed
#if defined(__ARM_FEATURE_DOTPROD) || defined(BY_FOURS)
constexpr bool FOURS = true; // whether that had better be used, as one instruction
#else
constexpr bool FOURS = false;
#endif
static inline I fours(I sum, I a, I b) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (I)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
#else
    for (int bits = 0; bits < 32; bits += 8) sum += (a << bits >> 24) * (b << bits >> 24);
    return sum;
#endif
}
}
