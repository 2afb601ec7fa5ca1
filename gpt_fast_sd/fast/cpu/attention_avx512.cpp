// Attention of a few query rows over bf16 or int8 keys, on a CPU with AVX-512 dot products of both, by AMX tiles where
// it has them.
//
// A tile is 64 keys. The softmax of few rows has a key in every lane, so that they cost few exponentials. With AMX,
// products take up to 16 rows at once, with keys as the cache stores them; their scores are transposed, four rows at a
// time. Without, each query costs only dot products, no horizontal sum, either of keys that are transposed in registers
// or, where there are 13 rows of bf16 or more, with a row in every lane. The next tile is prefetched all the while,
// into L2, as L1 has no room.
//
// int8 keys and values have a scale each, one a token and kv head, that stays outside the products. A row of queries is
// rounded to int8 by its own largest; its weights of a tile, times the scales of the values, to uint8 by theirs. Their
// integer products are exact, whatever computes them; the softmax and all sums of tiles are fp32. Where queries need
// more than 8 bits, what int8 leaves of each number is rounded to int8 once more, FINER times finer.
//
// The bytes may lie in two planes of nibbles, see model/cache.py: they are joined as a tile is gathered. Where only the
// upper plane is read, a byte is as if its lower nibble was 7, which is half too small: the sum of a row's queries
// times a half is missing from its scores, and half of its weights' sum from every output.
//
// Names: E element of keys and values, bf16 or int8_t, NQ bytes of a number of a query; else as in attention.hpp.
#include "simd.hpp"
#include "attention.hpp"

namespace {
constexpr int TILE = 64, PAGES = TILE / PAGE;
constexpr int WEIGHTS = 16 * 16; // pairs of keys between the weights of 32 keys and of the next, 16 rows of 16
template <class E> constexpr bool BYTES = sizeof(E) == 1;
template <class E> constexpr int IN_DWORD = 4 / sizeof(E);
template <class E> constexpr int IN_LINE = 64 / sizeof(E);
constexpr int FINER = 254; // the second byte of a query counts in these parts of the first one's steps
constexpr float LOWEST = -0x1p100f; // finite, so that a difference of two is not NaN; times a scale it stays exact
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// 2^x for x <= 0, relative error below 3e-6; results below 2^-126 are rounded up to about it. The weights are rounded
// to bf16 afterwards.
static inline __m512 exp2_approx(__m512 x) {
    const __m512 magic = _mm512_set1_ps(12582912.f); // 1.5 * 2^23: adding it rounds to whole numbers
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.f));
    const __m512 shifted = _mm512_add_ps(x, magic), f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic)); // -0.5 .. 0.5
    __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(9.6725e-3f), _mm512_set1_ps(5.5504e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022152e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314719e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.f));
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), exponent));
}

// One query row of a split, and the state of its softmax. out has its dims in the order of group_values.
template <class E, int H, int NQ> struct Row {
    alignas(64) uint32_t q[NQ][H / IN_DWORD<E>];
    alignas(64) float out[H], sum[16], halves[16]; // sum, and what upper planes leave out of all outputs: by lanes
    float max, to_log2; // to_log2: times a score, whose exp2 is its weight
    float q_half; // of bytes, half of the sum of q
    int64_t first, limit; // first and last positions it may see
};

static inline bool is_finite(const bf16* q, int n) {
    __mmask32 not_finite = 0;
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (int i = 0; i < n; i += 32) {
        const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(q + i), exponent);
        not_finite |= _mm512_cmpeq_epi16_mask(bits, exponent);
    }
    return !not_finite;
}
// Load a query as the products take it -> the unit of its scores. That is NaN for a query that is not finite, and so is
// the output then: integers, and a largest score, would hide it.
template <int H> static inline float load_query(const bf16* q, Row<bf16, H, 1>& row) {
    if (is_finite(q, H)) {
        memcpy(row.q, q, sizeof row.q);
        return 1.f;
    }
    memset(row.q, 0, sizeof row.q);
    return NOT_A_NUMBER;
}
template <int H, int NQ> static inline float load_query(const bf16* q, Row<int8_t, H, NQ>& row) {
    __m512 wide[H / 16], max_abs = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int c = 0; c < H / 16; c++) {
        const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(q + 16 * c)));
        wide[c] = (__m512)_mm512_slli_epi32(bits, 16);
        max_abs = _mm512_max_ps(max_abs, _mm512_abs_ps(wide[c]));
    }
    const float top = std::max(_mm512_reduce_max_ps(max_abs), 1e-30f);
    const __m512 by = _mm512_set1_ps(127.f / top);
    __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int c = 0; c < H / 16; c++) {
        const __m512 x = _mm512_mul_ps(wide[c], by);
        const __m512i n = _mm512_cvtps_epi32(x);
        _mm_store_si128((__m128i*)(row.q[0] + 4 * c), _mm512_cvtsepi32_epi8(n));
        sum = _mm512_add_epi32(sum, n);
    }
    if constexpr (NQ == 2) {
        sum = _mm512_mullo_epi32(sum, _mm512_set1_epi32(FINER));
#pragma GCC unroll 8
        for (int c = 0; c < H / 16; c++) {
            const __m512 x = _mm512_mul_ps(wide[c], by);
            const __m512 rounded = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            const __m512 rest = _mm512_sub_ps(x, rounded);
            const __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(FINER)));
            _mm_store_si128((__m128i*)(row.q[1] + 4 * c), _mm512_cvtsepi32_epi8(n));
            sum = _mm512_add_epi32(sum, n);
        }
    }
    row.q_half = .5f * _mm512_reduce_add_epi32(sum);
    return is_finite(q, H) ? top / (NQ == 2 ? 127.f * FINER : 127.f) : NOT_A_NUMBER;
}

// Store 64 dims, which come in the order of group_values, as bf16 in theirs.
template <class E> static inline void store_in_order(const __m512* from, bf16* to) {
    __m512 dims[4];
    if constexpr (BYTES<E>) { // four vectors of four dims in each quarter
        const __m512 a = _mm512_shuffle_f32x4(from[0], from[1], 0x44), b = _mm512_shuffle_f32x4(from[2], from[3], 0x44);
        const __m512 c = _mm512_shuffle_f32x4(from[0], from[1], 0xee), d = _mm512_shuffle_f32x4(from[2], from[3], 0xee);
        dims[0] = _mm512_shuffle_f32x4(a, b, 0x88), dims[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
        dims[2] = _mm512_shuffle_f32x4(c, d, 0x88), dims[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
    } else {
        const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
        const __m512i half = _mm512_set1_epi32(8);
#pragma GCC unroll 2
        for (int c = 0; c < 4; c += 2) {
            dims[c] = _mm512_permutex2var_ps(from[c], first, from[c + 1]);
            dims[c + 1] = _mm512_permutex2var_ps(from[c], _mm512_add_epi32(first, half), from[c + 1]);
        }
    }
#pragma GCC unroll 2
    for (int c = 0; c < 4; c += 2) _mm512_storeu_si512(to + 16 * c, (__m512i)_mm512_cvtne2ps_pbh(dims[c + 1], dims[c]));
}

// The keys and values of one tile, 16 of each one after the other; position is null for first, first + 1, ...
template <class E> struct Tile {
    const E *key[TILE / 16], *value[TILE / 16];
    const float *key_scale, *value_scale; // of bytes
    const float* upper; // 1 for each whose upper plane alone is read, else 0; null: for none
    const int64_t* position; // INT64_MAX: does not exist
    int64_t first, last; // last: the largest position that exists
    int64_t least; // no position that exists is smaller
    int n; // entries from n on do not exist
    bool gaps; // whether any before n does not
    uint64_t nan_scales = 0; // of bytes: those with a NaN for a scale, a bit each
};

// Of the keys of a tile, those that exist and that a row may see from a first position to a limit, a bit each.
template <class E> static inline uint64_t seen_keys(const Tile<E>& tile, int64_t first, int64_t limit) {
    const uint64_t exist = tile.n < TILE ? (uint64_t(1) << tile.n) - 1 : ~uint64_t(0);
    if (!tile.position) {
        const int64_t n = std::clamp<int64_t>(limit + 1 - tile.first, 0, TILE);
        const int64_t before = std::clamp<int64_t>(first - tile.first, 0, TILE);
        const uint64_t after = before < TILE ? ~uint64_t(0) << before : 0;
        return exist & after & (n < TILE ? (uint64_t(1) << n) - 1 : ~uint64_t(0));
    }
    uint64_t seen = 0;
    for (int j = 0; j < TILE; j += 8) {
        const __m512i position = _mm512_loadu_si512(tile.position + j);
        const __mmask8 after = _mm512_cmpge_epi64_mask(position, _mm512_set1_epi64(first));
        seen |= uint64_t(_mm512_mask_cmple_epi64_mask(after, position, _mm512_set1_epi64(limit))) << j;
    }
    return exist & seen;
}

// Store the sums of the 16 lanes of each of w [4].
static inline void store_sums(const __m512* w, float* to) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(w[0], w[1]), _mm512_unpackhi_ps(w[0], w[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(w[2], w[3]), _mm512_unpackhi_ps(w[2], w[3]));
    const __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd);
    const __m512d high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
    const __m512 all = _mm512_add_ps((__m512)low, (__m512)high);
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

// Scores of a row over a tile, a key in every lane -> its weights in pairs of keys, or in quads times *unit, and the
// row's maximum and sum with this tile. Returns the factor for what has been summed so far. r: the row's place in
// page_sum and page_max, if mass is wanted.
template <class E, int H, int NQ>
static inline float online_softmax_step(__m512* score, const Tile<E>& tile, Row<E, H, NQ>& row, uint32_t* weight,
                                        float* unit, float* page_sum, float* page_max, int64_t r) {
    constexpr int V = TILE / 16;
    if constexpr (BYTES<E>) {
#pragma GCC unroll 4
        for (int c = 0; c < V; c++) {
            score[c] = _mm512_cvtepi32_ps((__m512i)score[c]);
            if (tile.upper)
                score[c] = _mm512_fmadd_ps(_mm512_load_ps(tile.upper + 16 * c), _mm512_set1_ps(row.q_half), score[c]);
            score[c] = _mm512_mul_ps(score[c], _mm512_load_ps(tile.key_scale + 16 * c));
        }
    }
    const bool sees_all = tile.n == TILE && !tile.gaps && row.first <= tile.least && tile.last <= row.limit;
    const uint64_t seen = sees_all ? ~uint64_t(0) : seen_keys(tile, row.first, row.limit);
    if (!sees_all) {
#pragma GCC unroll 4
        for (int c = 0; c < V; c++)
            score[c] = _mm512_mask_blend_ps(seen >> 16 * c, _mm512_set1_ps(LOWEST), score[c]);
    }
    __m512 best = _mm512_set1_ps(LOWEST);
#pragma GCC unroll 4
    for (int c = 0; c < V; c++) best = _mm512_max_ps(score[c], best); // in this order a NaN hides no other score
    float shrink = 1.f;
    if (_mm512_cmp_ps_mask(best, _mm512_set1_ps(row.max), _CMP_GT_OQ)) { // rare, after the first tiles
        const float top = _mm512_reduce_max_ps(best);
        shrink = exp2f((row.max - top) * row.to_log2);
        row.max = top;
    }
    const __m512 scale = _mm512_set1_ps(row.to_log2), shift = _mm512_set1_ps(-row.max * row.to_log2);
    __m512 w[V];
#pragma GCC unroll 4
    for (int c = 0; c < V; c++) w[c] = exp2_approx(_mm512_fmadd_ps(score[c], scale, shift));
    if (!sees_all) { // unseen keys weigh 0: otherwise it would be 2^-126
#pragma GCC unroll 4
        for (int c = 0; c < V; c++) w[c] = _mm512_maskz_mov_ps(seen >> 16 * c, w[c]);
    }
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(w[0], w[1]), _mm512_add_ps(w[2], w[3]));
    _mm512_store_ps(row.sum, _mm512_fmadd_ps(_mm512_load_ps(row.sum), _mm512_set1_ps(shrink), sum));
    if constexpr (BYTES<E>) {
        __m512 scaled[V];
#pragma GCC unroll 4
        for (int c = 0; c < V; c++)
            scaled[c] = _mm512_maskz_mul_ps(seen >> 16 * c, w[c], _mm512_load_ps(tile.value_scale + 16 * c));
        const __m512 first = _mm512_max_ps(scaled[0], scaled[1]), last = _mm512_max_ps(scaled[2], scaled[3]);
        const float top = std::max(_mm512_reduce_max_ps(_mm512_max_ps(first, last)), 1e-30f);
        const __m512 by = _mm512_set1_ps(255.f / top);
        __m512i n[V];
#pragma GCC unroll 4
        for (int c = 0; c < V; c++) n[c] = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[c], by));
        const __m512i low = _mm512_packus_epi32(n[0], n[1]), high = _mm512_packus_epi32(n[2], n[3]);
        _mm512_store_si512(weight, _mm512_packus_epi16(low, high));
        // integers, and a largest weight, would hide a NaN
        *unit = seen & tile.nan_scales ? NOT_A_NUMBER : top * (1.f / 255.f);
        if (tile.upper) {
            __m512 weights = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int c = 0; c < V; c++)
                weights = _mm512_fmadd_ps(_mm512_cvtepi32_ps(n[c]), _mm512_load_ps(tile.upper + 16 * c), weights);
            const __m512 before = _mm512_mul_ps(_mm512_load_ps(row.halves), _mm512_set1_ps(shrink));
            _mm512_store_ps(row.halves, _mm512_fmadd_ps(weights, _mm512_set1_ps(.5f * *unit), before));
        } else if (shrink != 1.f) {
            _mm512_store_ps(row.halves, _mm512_mul_ps(_mm512_load_ps(row.halves), _mm512_set1_ps(shrink)));
        }
    } else {
        _mm512_store_si512(weight, (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]));
        _mm512_store_si512(weight + WEIGHTS, (__m512i)_mm512_cvtne2ps_pbh(w[3], w[2]));
    }
    if (page_sum) {
        store_sums(w, page_sum + r * V);
        page_max[r] = row.max;
    }
    return shrink;
}

#ifdef __AMX_BF16__
// Group the values of keys from .. to of a tile by pairs of keys. What does not exist counts as 0, whatever it holds.
template <int H> static inline void group_values(const Tile<bf16>& tile, __m512i (*pairs)[H / 16], int from, int to) {
    for (int j = from; j < to; j += 2) {
        const bf16* value = tile.value[j / 16] + j % 16 * H;
#pragma GCC unroll 4
        for (int c = 0; c < H / 32; c++) {
            const __m512i zero = _mm512_setzero_si512();
            const __m512i even = j < tile.n ? _mm512_loadu_si512(value + 32 * c) : zero;
            const __m512i odd = j + 1 < tile.n ? _mm512_loadu_si512(value + H + 32 * c) : zero;
            pairs[j / 2][2 * c] = _mm512_unpacklo_epi16(even, odd);
            pairs[j / 2][2 * c + 1] = _mm512_unpackhi_epi16(even, odd);
        }
    }
}
#endif

// Group the values of keys from .. to of a tile by quads of keys, in the order in which online_softmax_step packs the
// weights, which are 0 for what does not exist.
template <int H> static inline void group_values(const Tile<int8_t>& tile, __m512i (*quads)[H / 16], int from, int to) {
    for (int j = from; j < to; j += 4) {
        const int8_t* value = tile.value[j / 16] + j % 16 * H;
#pragma GCC unroll 2
        for (int c = 0; c < H / 16; c += 4, value += 64) {
            const __m512i a = _mm512_loadu_si512(value), b = _mm512_loadu_si512(value + H);
            const __m512i d = _mm512_loadu_si512(value + 2 * H), e = _mm512_loadu_si512(value + 3 * H);
            const __m512i low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
            const __m512i low2 = _mm512_unpacklo_epi8(d, e), high2 = _mm512_unpackhi_epi8(d, e);
            __m512i* quad = quads[j % 16 + j / 16] + c;
            quad[0] = _mm512_unpacklo_epi16(low, low2), quad[1] = _mm512_unpackhi_epi16(low, low2);
            quad[2] = _mm512_unpacklo_epi16(high, high2), quad[3] = _mm512_unpackhi_epi16(high, high2);
        }
    }
}

// FINER times x.
static inline __m512i times_finer(__m512i x) {
    return _mm512_sub_epi32(_mm512_slli_epi32(x, 8), _mm512_slli_epi32(x, 1));
}

// Add the integer products of a tile to the outputs so far.
static inline void add_products(float* out, __m512 products, float unit, float shrink) {
    const __m512 before = _mm512_mul_ps(_mm512_load_ps(out), _mm512_set1_ps(shrink));
    _mm512_store_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)products), _mm512_set1_ps(unit), before));
}

// Prefetch n keys or values that lie one after the other.
template <int H, class E> static inline void prefetch(const E* from, int n) {
    for (int h = 0; h < n * H; h += IN_LINE<E>) _mm_prefetch((const char*)(from + h), _MM_HINT_T0);
}

// Join the upper nibbles of the bytes of `up` with the lower ones of low, or without these with 7 -> int8.
template <bool WHOLE> static inline __m512i join_nibbles(__m512i up, __m512i low) {
    const __m512i high = _mm512_set1_epi8(int8_t(0xf0)), sign = _mm512_set1_epi8(int8_t(0x80));
    if constexpr (WHOLE) // high ? up : low
        return _mm512_xor_si512(_mm512_ternarylogic_epi32(up, high, low, 0xe2), sign);
    else return _mm512_ternarylogic_epi32(up, high, _mm512_set1_epi8(int8_t(0x87)), 0x6a); // (up & high) ^ 0x87
}

// Join N entries that lie one after the other in their planes, and prefetch those `ahead` bytes further on. WHOLE: of
// both planes; else as if all lower nibbles were 7.
template <int H, bool WHOLE, int N>
static inline void join_planes(const uint8_t* upper, const uint8_t* lower, int8_t* to, int ahead) {
    constexpr bool LINES = N * H >= 128; // a line is two heads of 64 or one of 128
#pragma GCC unroll 8
    for (int i = 0; i < N * H / 2; i += 64, upper += 64, lower += 64, to += 128) {
        __m512i up, low = _mm512_setzero_si512();
        if constexpr (LINES) {
            _mm_prefetch((const char*)(upper + ahead), _MM_HINT_T0);
            up = _mm512_loadu_si512(upper);
            if constexpr (WHOLE) {
                _mm_prefetch((const char*)(lower + ahead), _MM_HINT_T0);
                low = _mm512_loadu_si512(lower);
            }
        } else {
            up = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)upper));
            if constexpr (WHOLE) low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)lower));
        }
        const __m512i first = join_nibbles<WHOLE>(_mm512_slli_epi16(up, 4), low);
        const __m512i second = join_nibbles<WHOLE>(up, _mm512_srli_epi16(low, 4));
        if constexpr (H == 128) {
            _mm512_storeu_si512(to, first);
            _mm512_storeu_si512(to + 64, second);
        } else {
            _mm512_storeu_si512(to, _mm512_shuffle_i64x2(first, second, 0x44));
            if constexpr (LINES) _mm512_storeu_si512(to + 64, _mm512_shuffle_i64x2(first, second, 0xee));
        }
    }
}

// Where a tile is gathered whose keys are not consecutive, or in planes; by the tile's parity.
template <class E, int H> struct Gathered {
    alignas(64) E gathered_key[2][TILE * H], gathered_value[2][TILE * H];
    alignas(64) float key_scale[2][TILE], value_scale[2][TILE], upper[2][TILE];
    int64_t position[2][TILE];
};

#ifdef __AMX_BF16__
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static void begin_tiles() { static thread_local TileConfig config; _tile_loadconfig(&config); }
static void end_tiles() { _tile_release(); }
static inline void tile_fence() { asm volatile("" ::: "memory"); } // compilers do not see what tiles load and store

// The first index of what is there twice is the parity of the tile or of the step.
template <class E, int H, int NQ> struct Scratch : Gathered<E, H> {
    alignas(64) float score[2][NQ][TILE][16]; // of a key, 16 rows
    alignas(64) uint32_t weight[2][2][16][16]; // of 32 keys and 32 more, in pairs: of a row; quads: of 64
    __m512i value[2][TILE / IN_DWORD<E>][H / 16]; // pairs or quads of keys
    alignas(64) float products[H / 16][16][16], unit[2][16]; // of bytes
};

template <class E, int H, int NQ> struct alignas(64) Queries { uint32_t q[NQ][H / IN_DWORD<E>][16]; }; // of 16 rows

// Transpose the scores of four rows over 16 keys from the layout of the products: a key in every lane.
static inline void transpose_scores(const float (*score)[16], __m512* to, int apart) {
    __m512 a[4], b[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { // keys i, i + 4, i + 8, i + 12
        a[i] = _mm512_castps128_ps512(_mm_load_ps(score[i]));
        a[i] = _mm512_mask_broadcast_f32x4(a[i], 0x00f0, _mm_load_ps(score[i + 4]));
        a[i] = _mm512_mask_broadcast_f32x4(a[i], 0x0f00, _mm_load_ps(score[i + 8]));
        a[i] = _mm512_mask_broadcast_f32x4(a[i], 0xf000, _mm_load_ps(score[i + 12]));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        to[2 * i * apart] = (__m512)_mm512_unpacklo_pd((__m512d)b[i], (__m512d)b[i + 2]);
        to[(2 * i + 1) * apart] = (__m512)_mm512_unpackhi_pd((__m512d)b[i], (__m512d)b[i + 2]);
    }
}

// The rows of a split while its tiles are read, 16 rows and a tile at a step. What a step begins ends two steps later:
// its scores' products, then their softmax, then its values' products, so that vectors and tiles work side by side, and
// neither waits for what the other has just written.
template <class E, int H, int NQ> struct Rows {
    static Scratch<E, H, NQ>& scratch() { static thread_local Scratch<E, H, NQ> at; return at; }

    struct Reading { // of a tile
        Tile<E> tile;
        float *page_sum, *page_max;
        bool ahead;
    };
    struct Stage {
        int parity = 0; // of the tile
        int64_t row = -1; // the first of 16; -1: there is none
    };

    Rows(Row<E, H, NQ>* rows, int64_t n_rows, bool) : rows(rows), n_rows(n_rows), at(scratch()) {
        static thread_local std::vector<Queries<E, H, NQ>> kept;
        const int64_t n = (n_rows + 15) / 16;
        if ((int64_t)kept.size() < n) kept.resize(n);
        groups = kept.data();
        for (int64_t g = 0; g < n; g++)
            for (int part = 0; part < NQ; part++)
                for (int h = 0; h < H / IN_DWORD<E>; h += 16) {
                    const char* q = (const char*)(rows[16 * g].q[part] + h);
                    transpose_16x16(q, sizeof *rows, (char*)groups[g].q[part][h], 64);
                }
    }
    void read(const Tile<E>& tile, int parity, float* page_sum, float* page_max, const E* next_key, const E*) {
        readings[parity] = {tile, page_sum, page_max, next_key == tile.key[0] + TILE * H};
        for (int64_t r = 0; r < n_rows; r += 16) step({parity, r});
    }
    void finish() {
        step({});
        step({});
        scored = weighted = {};
    }

    // Part i of H / 16 of the products of 16 rows with a half of a tile's keys, 16 and 16 of those at a time.
    __attribute__((always_inline)) void multiply_keys(const Tile<E>& tile, const Queries<E, H, NQ>& group, int half,
                                                      int i, int odd) {
        const int product = BYTES<E> ? i / 2 : i, d = product / 2;
        if (i == 0) { _tile_zero(0); _tile_zero(1); }
        if constexpr (NQ == 2) { // with both bytes of queries, 16 keys after the other 16
            constexpr int DS = H / 64;
            const int keys = product / DS, dims = product % DS;
            if (i % 2 == 0) {
                if (i && dims == 0) { _tile_zero(0); _tile_zero(1); }
                _tile_loadd(3, tile.key[2 * half + keys] + 64 * dims, H);
                _tile_loadd(2, group.q[0][16 * dims], 64);
                _tile_dpbssd(0, 3, 2);
                _tile_loadd(2, group.q[1][16 * dims], 64);
                _tile_dpbssd(1, 3, 2);
                if (dims == DS - 1) {
                    _tile_stored(0, at.score[odd][0][32 * half + 16 * keys], 64);
                    _tile_stored(1, at.score[odd][1][32 * half + 16 * keys], 64);
                }
            }
        } else if (BYTES<E> && i % 2) {
        } else if (product % 2 == 0) {
            _tile_loadd(2, group.q[0][16 * d], 64);
            _tile_loadd(3, tile.key[2 * half] + IN_LINE<E> * d, sizeof(E) * H);
            if constexpr (BYTES<E>) _tile_dpbssd(0, 3, 2);
            else _tile_dpbf16ps(0, 3, 2);
        } else {
            _tile_loadd(3, tile.key[2 * half + 1] + IN_LINE<E> * d, sizeof(E) * H);
            if constexpr (BYTES<E>) _tile_dpbssd(1, 3, 2);
            else _tile_dpbf16ps(1, 3, 2);
        }
        if (NQ == 1 && i == H / 16 - 1) {
            _tile_stored(0, at.score[odd][0][32 * half], 64);
            _tile_stored(1, at.score[odd][0][32 * half + 16], 64);
        }
    }

    // Part i of H / 16 of a half of the products of 16 rows' weights with the values, in the order of group_values.
    __attribute__((always_inline)) void multiply_values(const __m512i (*value)[H / 16], Row<E, H, NQ>* last, int half,
                                                        int i, int odd) {
        if constexpr (BYTES<E>) {
            if (i % 2) { // 16 dims
                const int c = (half * (H / 16) + i) / 2;
                _tile_zero(4);
                _tile_loadd(6, at.weight[odd], 64);
                _tile_loadd(7, value[0] + c, 4 * H);
                _tile_dpbusd(4, 6, 7);
                _tile_stored(4, at.products[c], 64);
            }
        } else { // outputs by 32 dims
            const int pair = half * (H / 64) + i / 4, keys = i / 2 % 2;
            float* out = last->out + 32 * pair;
            if (i % 4 == 0) { _tile_loadd(4, out, sizeof *last); _tile_loadd(5, out + 16, sizeof *last); }
            if (i % 2 == 0) {
                _tile_loadd(6, at.weight[odd][keys], 64);
                _tile_loadd(7, &value[16 * keys][2 * pair], 4 * H);
                _tile_dpbf16ps(4, 6, 7);
            } else {
                _tile_loadd(7, &value[16 * keys][2 * pair + 1], 4 * H);
                _tile_dpbf16ps(5, 6, 7);
            }
            if (i % 4 == 3) { _tile_stored(4, out, sizeof *last); _tile_stored(5, out + 16, sizeof *last); }
        }
    }

    // The scores of rows r .. r + 3 over 16 keys c, which a step has stored -> a key in every lane.
    __attribute__((always_inline)) void load_scores(__m512 (*score)[TILE / 16], int c, int r, int odd) const {
        constexpr int V = TILE / 16;
        transpose_scores((const float (*)[16])&at.score[odd][0][16 * c][r], &score[0][c], V);
        if constexpr (NQ == 2) {
            __m512 finer[4];
            transpose_scores((const float (*)[16])&at.score[odd][1][16 * c][r], finer, 1);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                score[j][c] = (__m512)_mm512_add_epi32(times_finer((__m512i)score[j][c]), (__m512i)finer[j]);
        }
    }

    void step(Stage begun) {
        constexpr int V = TILE / 16, PARTS = H / 8, EACH = 16 / PARTS; // EACH: rows of a part
        const int odd = n_steps++ & 1;
        const Reading &from = readings[begun.parity], &of = readings[scored.parity];
        const Queries<E, H, NQ>& group = groups[std::max<int64_t>(begun.row, 0) / 16];
        Row<E, H, NQ> *now = rows + scored.row, *last = rows + weighted.row;
        const int n = scored.row < 0 ? 0 : std::min<int64_t>(16, n_rows - scored.row);
        const auto value = at.value[weighted.parity];
        float shrinks[16] = {};
        bool shrunk = false;
        __m512 score[4][V];
        tile_fence();
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 8
            for (int i = 0; i < H / 16; i++) {
                const int part = half * (H / 16) + i, begin = part * TILE / PARTS, end = (part + 1) * TILE / PARTS;
                if (begun.row >= 0) {
                    multiply_keys(from.tile, group, half, i, odd);
                    if (begun.row == 0 && from.ahead) {
                        const int entry = (TILE + begin % 16) * H;
                        prefetch<H>(from.tile.key[part * V / PARTS] + entry, TILE / PARTS);
                        prefetch<H>(from.tile.value[part * V / PARTS] + entry, TILE / PARTS);
                    }
                }
                if (weighted.row >= 0) multiply_values(value, last, half, i, odd);
                if (scored.row == 0) group_values<H>(of.tile, at.value[scored.parity], begin, end);
                const int r = part * EACH;
                if (r >= n) continue;
                if (r % 4 == 0)
#pragma GCC unroll 4
                    for (int c = 0; c < V; c++) load_scores(score, c, r, !odd);
#pragma GCC unroll 2
                for (int j = 0; j < EACH; j++) {
                    if (r + j >= n) break;
                    shrinks[r + j] = online_softmax_step(score[(i * EACH + j) % 4], of.tile, now[r + j],
                                                         at.weight[!odd][0][r + j], at.unit[!odd] + r + j, of.page_sum,
                                                         of.page_max, scored.row + r + j);
                    shrunk |= shrinks[r + j] != 1.f;
                }
            }
        tile_fence();
        if constexpr (BYTES<E>)
            for (int64_t r = 0; weighted.row >= 0 && r < std::min<int64_t>(16, n_rows - weighted.row); r++)
#pragma GCC unroll 8
                for (int c = 0; c < H / 16; c++)
                    add_products(last[r].out + 16 * c, _mm512_load_ps(at.products[c][r]), at.unit[odd][r], 1.f);
        for (int r = 0; shrunk && r < n; r++)
            for (int h = 0; h < H; h += 16) {
                float* out = now[r].out + h;
                _mm512_store_ps(out, _mm512_mul_ps(_mm512_load_ps(out), _mm512_set1_ps(shrinks[r])));
            }
        weighted = scored;
        scored = begun;
    }

    Row<E, H, NQ>* rows;
    int64_t n_rows;
    Scratch<E, H, NQ>& at;
    Queries<E, H, NQ>* groups;
    Reading readings[2];
    Stage scored, weighted;
    int64_t n_steps = 0;
};
#else
static void begin_tiles() {}
static void end_tiles() {}

template <class E, int H, int> struct Scratch : Gathered<E, H> {
    __m512i quads[BYTES<E> ? TILE / 4 : 1][H / 16]; // values of bytes, by quads of keys
    alignas(64) uint32_t weight[2][16][TILE / 4]; // of 32 keys and 32 more, in pairs; quads: of 64
    // of bf16: the values of a tile that is not full; of rows in lanes, scores and weights in pairs of keys
    alignas(64) E value[BYTES<E> ? 1 : TILE * H];
    alignas(64) float score[BYTES<E> ? 1 : TILE][16];
    alignas(64) uint32_t pairs[BYTES<E> ? 1 : TILE / 2][16];
};

// sum plus the dot products of 16 dwords, of bytes unsigned, with one in memory. The instruction reads it from there;
// GCC would load it by another.
template <class E> static inline __m512 dot_add_memory(__m512 sum, __m512i dwords, const void* one) {
    if constexpr (BYTES<E>) asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(dwords), "m"(*(const char(*)[4])one));
    else asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(dwords), "m"(*(const char(*)[4])one));
    return sum;
}

// sum plus the dot products of 16 dwords with one, of bytes unsigned.
template <class E> static inline __m512 dot_add(__m512 sum, __m512i dwords, uint32_t one) {
    const __m512i ones = _mm512_set1_epi32(one);
    if constexpr (BYTES<E>) return (__m512)_mm512_dpbusd_epi32((__m512i)sum, ones, dwords);
    else return _mm512_dpbf16_ps(sum, (__m512bh)dwords, (__m512bh)ones);
}

// Prefetches the next tile, where keys are read in order, a few lines at a time all through this one: a core has only
// so many loads in flight, and all lines at once would hold up what is read now.
struct Prefetcher {
    const char *key = nullptr, *value = nullptr;
    int64_t left = 0, each = 0; // lines that are left of each; lines of each at a time

    void advance() {
        for (int64_t n = std::min(each, left); n > 0; n--, left--, key += 64, value += 64)
            _mm_prefetch(key, _MM_HINT_T1), _mm_prefetch(value, _MM_HINT_T1);
    }
};

// P V: the outputs of N rows take in the values of a tile; weight(r, j) is row r's for pair or quad j. Pairs are
// grouped each time, which costs nothing beside their products; quads are cheaper to keep.
template <int N, class E, int H, int NQ, class Weight>
static inline void accumulate_values(const Tile<E>& tile, const Scratch<E, H, NQ>& at, Row<E, H, NQ>* rows,
                                     const float* unit, const float* shrink, Prefetcher& ahead, const Weight& weight) {
    for (int d = 0; d < H; d += 64) { // as many dims as fit the registers
        __m512 out[N][4];
#pragma GCC unroll 6
        for (int r = 0; r < N; r++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                const float* so_far = rows[r].out + d + 16 * c;
                out[r][c] = BYTES<E> ? _mm512_setzero_ps()
                                     : _mm512_mul_ps(_mm512_load_ps(so_far), _mm512_set1_ps(shrink[r]));
            }
        for (int begin = 0; begin < TILE / IN_DWORD<E>; begin += 8) {
            ahead.advance();
            for (int j = begin; j < begin + 8; j++) {
                __m512i value[4];
                if constexpr (BYTES<E>) {
#pragma GCC unroll 4
                    for (int c = 0; c < 4; c++) value[c] = at.quads[j][d / 16 + c];
                } else {
                    const E* pair = tile.value[j / 8] + j % 8 * 2 * H + d;
#pragma GCC unroll 2
                    for (int c = 0; c < 4; c += 2) {
                        const __m512i even = _mm512_loadu_si512(pair + 16 * c);
                        const __m512i odd = _mm512_loadu_si512(pair + H + 16 * c);
                        value[c] = _mm512_unpacklo_epi16(even, odd), value[c + 1] = _mm512_unpackhi_epi16(even, odd);
                    }
                }
#pragma GCC unroll 6
                for (int r = 0; r < N; r++)
#pragma GCC unroll 4
                    for (int c = 0; c < 4; c++) out[r][c] = dot_add<E>(out[r][c], value[c], weight(r, j));
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < N; r++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                if constexpr (BYTES<E>) add_products(rows[r].out + d + 16 * c, out[r][c], unit[r], shrink[r]);
                else _mm512_store_ps(rows[r].out + d + 16 * c, out[r][c]);
            }
    }
}

// Transpose eight words of each of 16 keys, `apart` bytes apart: a key in every lane, a word in each vector.
__attribute__((always_inline)) static inline void transpose_words(const char* key, int64_t apart, __m512i* to) {
    __m512i a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) { // keys i and i + 4; from 4 on, i + 4 and i + 8
        const char* first = key + (i % 4 + i / 4 * 8) * apart;
        const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)first));
        a[i] = _mm512_mask_broadcast_i64x4(low, 0xf0, _mm256_loadu_si256((const __m256i*)(first + 4 * apart)));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        to[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        to[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    }
}

// Q K': the scores of N rows over a tile, a key in every lane: 16 keys are transposed in registers, 32 bytes of each at
// a time, and multiplied at once. Meanwhile the keys that come next, after the tile's last those at next, go from L2 to
// L1, and of bf16 so do the values. Products of bytes take one side unsigned: keys, 128 larger, which the initial sums
// of the last part correct.
template <int N, class E, int H, int NQ>
static inline void compute_scores(const Tile<E>& tile, const Row<E, H, NQ>* rows, const E* next,
                                  __m512 (*score)[TILE / 16], Prefetcher& ahead) {
    constexpr int V = TILE / 16, D = H / IN_DWORD<E>, EACH = 16 * 8 * IN_DWORD<E>; // EACH: numbers a step, of 16 keys
    for (int c = 0; c < V; c++) {
        __m512 sum[NQ][N];
#pragma GCC unroll 2
        for (int part = 0; part < NQ; part++)
#pragma GCC unroll 9
            for (int r = 0; r < N; r++)
                sum[part][r] = BYTES<E> && part == NQ - 1
                                   ? (__m512)_mm512_cvtps_epi32(_mm512_set1_ps(-256.f * rows[r].q_half))
                                   : _mm512_setzero_ps();
        const E *upcoming = c + 1 < V ? tile.key[c + 1] : next, *value = tile.value[c];
        for (int from = 0; from < D; from += 8, upcoming += EACH, value += EACH) {
            ahead.advance();
            prefetch<EACH>(upcoming, 1);
            if constexpr (!BYTES<E>) prefetch<EACH>(value, 1);
            __m512i key[8];
            transpose_words((const char*)(tile.key[c] + IN_DWORD<E> * from), sizeof(E) * H, key);
#pragma GCC unroll 8
            for (int h = 0; h < 8; h++) {
                if constexpr (BYTES<E>) key[h] = _mm512_xor_si512(key[h], _mm512_set1_epi8(int8_t(0x80)));
#pragma GCC unroll 2
                for (int part = 0; part < NQ; part++)
#pragma GCC unroll 9
                    for (int r = 0; r < N; r++)
                        sum[part][r] = dot_add_memory<E>(sum[part][r], key[h], rows[r].q[part] + from + h);
            }
        }
#pragma GCC unroll 9
        for (int r = 0; r < N; r++)
            if constexpr (NQ == 2)
                score[r][c] = (__m512)_mm512_add_epi32(times_finer((__m512i)sum[0][r]), (__m512i)sum[1][r]);
            else score[r][c] = sum[0][r];
    }
}

// Rows whose values are accumulated at once, as their outputs fit the registers, and rows that are scored at once, as
// their sums and eight words of 16 keys do.
constexpr int VALUE_ROWS = 6;
template <int NQ> constexpr int SCORE_ROWS = NQ == 2 ? 6 : 9;

// Read a tile for N rows.
template <int N, class E, int H, int NQ>
static __attribute__((noinline)) void read_rows(const Tile<E>& tile, Scratch<E, H, NQ>& at, Row<E, H, NQ>* rows,
                                                float* page_sum, float* page_max, const E* next, Prefetcher& ahead) {
    __m512 score[N][TILE / 16];
    compute_scores<N>(tile, rows, next, score, ahead);
    float shrink[N], unit[N];
#pragma GCC unroll 9
    for (int r = 0; r < N; r++)
        shrink[r] = online_softmax_step(score[r], tile, rows[r], at.weight[0][r], unit + r, page_sum, page_max, r);
    auto accumulate_some = [&](auto n, int m) {
        auto weight = [&](int r, int j) { return at.weight[j / 16][m + r][j % 16]; };
        accumulate_values<decltype(n)::value>(tile, at, rows + m, unit + m, shrink + m, ahead, weight);
    };
    constexpr int FIRST = N <= VALUE_ROWS ? N : (N + 1) / 2;
    accumulate_some(std::integral_constant<int, FIRST>{}, 0);
    if constexpr (N > FIRST) accumulate_some(std::integral_constant<int, N - FIRST>{}, FIRST);
}

// Up to 16 rows of bf16, one in every lane: a key is read as the cache stores it, a pair of its dims for all rows at
// once. Results are bit for bit those of read_rows, but for scores of exactly LOWEST, which count as unseen here.
template <int H> struct alignas(64) Lanes {
    uint32_t q[H / 2][16];
    float sum[16][16]; // of keys i, 16 + i, ...
    float max[16], to_log2[16];
    int64_t first[16], limit[16], highest, lowest; // highest: the maximum of the first ones; lowest: of the limits
    int n;

    void load_rows(const Row<bf16, H, 1>* rows, int64_t n_rows) {
        n = std::min<int64_t>(16, n_rows), highest = 0, lowest = INT64_MAX;
        for (int h = 0; h < H / 2; h += 16)
            transpose_16x16((const char*)(rows->q[0] + h), sizeof *rows, (char*)q[h], 64);
        memset(sum, 0, sizeof sum);
        for (int r = 0; r < 16; r++) {
            max[r] = LOWEST, to_log2[r] = r < n ? rows[r].to_log2 : 0.f, limit[r] = r < n ? rows[r].limit : -1;
            first[r] = r < n ? rows[r].first : 0;
            if (r < n) highest = std::max(highest, first[r]), lowest = std::min(lowest, limit[r]);
        }
    }
    void store_rows(Row<bf16, H, 1>* rows) const {
        for (int r = 0; r < n; r++) {
            rows[r].max = max[r];
            for (int i = 0; i < 16; i++) rows[r].sum[i] = sum[i][r];
        }
    }
    bool see_all(const Tile<bf16>& tile) const {
        return tile.n == TILE && !tile.gaps && highest <= tile.least && tile.last <= lowest;
    }

    // Compute the scores over a tile; returns the best of each row. Meanwhile the keys that come next, after the tile's
    // last those at next, go from L2 to L1, and so do the values.
    __m512 score(const Tile<bf16>& tile, const bf16* next, float (*to)[16], Prefetcher& ahead) const {
        const bool sees_all = see_all(tile);
        __m512 best = _mm512_set1_ps(LOWEST);
        for (int c = 0; c < TILE / 16; c++) {
            const bf16 *upcoming = c + 1 < TILE / 16 ? tile.key[c + 1] : next;
            const bf16 *key = tile.key[c], *value = tile.value[c];
            __m512 s[16];
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) s[j] = _mm512_setzero_ps();
            for (int from = 0; from < H / 2; from += 8, upcoming += 256, value += 256) {
                ahead.advance();
                prefetch<256>(upcoming, 1);
                prefetch<256>(value, 1);
                for (int h = from; h < from + 8; h++) {
                    const __m512i pairs = _mm512_load_si512(q[h]);
#pragma GCC unroll 16
                    for (int j = 0; j < 16; j++) s[j] = dot_add_memory<bf16>(s[j], pairs, key + j * H + 2 * h);
                }
            }
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) {
                if (!sees_all) {
                    const int i = 16 * c + j;
                    const int64_t position = tile.position ? tile.position[i] : tile.first + i;
                    const __m512i at = _mm512_set1_epi64(i >= tile.n ? INT64_MAX : position);
                    const __mmask8 after[2] = {_mm512_cmpge_epi64_mask(at, _mm512_load_si512(first)),
                                               _mm512_cmpge_epi64_mask(at, _mm512_load_si512(first + 8))};
                    const __mmask8 low = _mm512_mask_cmple_epi64_mask(after[0], at, _mm512_load_si512(limit));
                    const __mmask8 high = _mm512_mask_cmple_epi64_mask(after[1], at, _mm512_load_si512(limit + 8));
                    s[j] = _mm512_mask_blend_ps(_mm512_kunpackb(high, low), _mm512_set1_ps(LOWEST), s[j]);
                }
                best = _mm512_max_ps(s[j], best); // in this order a NaN hides no other score
                _mm512_store_ps(to[16 * c + j], s[j]);
            }
        }
        return best;
    }

    // Scores -> weights in pairs of keys, as in the online_softmax_step of one row.
    void online_softmax_step(const Tile<bf16>& tile, const float (*score)[16], __m512 best, uint32_t (*pairs)[16],
                             float* shrink) {
        const __m512i alternate = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, //
                                                   23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const bool sees_all = see_all(tile);
        _mm512_store_ps(shrink, _mm512_set1_ps(1.f));
        const __mmask16 better = _mm512_cmp_ps_mask(best, _mm512_load_ps(max), _CMP_GT_OQ);
        if (better) { // rare, after the first tiles
            float before[16];
            memcpy(before, max, sizeof max);
            _mm512_mask_store_ps(max, better, best);
            for (int r = 0; r < n; r++)
                if (better >> r & 1) shrink[r] = exp2f((before[r] - max[r]) * to_log2[r]);
        }
        const __m512 scale = _mm512_load_ps(to_log2), less = _mm512_load_ps(shrink);
        const __m512 shift = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_load_ps(max)), scale);
        for (int i = 0; i < 16; i += 2) {
            __m512 w[2][TILE / 16];
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
#pragma GCC unroll 4
                for (int c = 0; c < TILE / 16; c++) {
                    const __m512 s = _mm512_load_ps(score[16 * c + i + k]);
                    w[k][c] = exp2_approx(_mm512_fmadd_ps(s, scale, shift));
                    const __mmask16 seen = _mm512_cmp_ps_mask(s, _mm512_set1_ps(LOWEST), _CMP_NEQ_UQ);
                    if (!sees_all) w[k][c] = _mm512_maskz_mov_ps(seen, w[k][c]);
                }
                const __m512 these = _mm512_add_ps(_mm512_add_ps(w[k][0], w[k][1]), _mm512_add_ps(w[k][2], w[k][3]));
                _mm512_store_ps(sum[i + k], _mm512_fmadd_ps(_mm512_load_ps(sum[i + k]), less, these));
            }
#pragma GCC unroll 4
            for (int c = 0; c < TILE / 16; c++) {
                const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(w[1][c], w[0][c]);
                _mm512_store_si512(pairs[8 * c + i / 2], _mm512_permutexvar_epi16(alternate, halves));
            }
        }
    }
};

// The rows of a split while its tiles are read. Those of bf16 go 16 at a time into lanes, and so do the rest if they
// are MIN_IN_LANES or more; fewer cost less by transposed keys, and mass is summed there alone.
template <class E, int H, int NQ> struct Rows {
    static constexpr int MIN_IN_LANES = 13;
    static Scratch<E, H, NQ>& scratch() { static thread_local Scratch<E, H, NQ> at; return at; }

    Rows(Row<E, H, NQ>* rows, int64_t n_rows, bool mass) : rows(rows), n_rows(n_rows), at(scratch()) {
        if constexpr (!BYTES<E>) {
            if (mass) return;
            static thread_local std::vector<Lanes<H>> kept;
            in_lanes = n_rows % 16 < MIN_IN_LANES ? n_rows / 16 * 16 : n_rows;
            if ((int64_t)kept.size() < (in_lanes + 15) / 16) kept.resize((in_lanes + 15) / 16);
            lanes = kept.data();
            for (int64_t r = 0; r < in_lanes; r += 16) lanes[r / 16].load_rows(rows + r, in_lanes - r);
        }
    }
    // next_key, next_value: the next tile's, or null. Not inlined, as read_rows is not: their sums would leave the
    // registers.
    __attribute__((noinline)) void read(Tile<E> tile, int, float* page_sum, float* page_max, const E* next_key,
                                        const E* next_value) {
        constexpr int V = TILE / 16, D = H / IN_DWORD<E>, LINES = TILE * H * sizeof(E) / 64;
        constexpr int OF_VALUES = H / 64 * TILE / IN_DWORD<E> / 8; // of VALUE_ROWS rows
        const bool few = n_rows > in_lanes;
        int64_t advances = (in_lanes + 15) / 16 * (V * D / 8);
        advances += (in_lanes / 16 * 3 + (in_lanes % 16 + VALUE_ROWS - 1) / VALUE_ROWS) * OF_VALUES;
        advances += BYTES<E> && few ? TILE / 4 : 0;
        for_row_blocks<SCORE_ROWS<NQ>>(in_lanes, n_rows, [&](auto n, int64_t) {
            advances += V * D / 8 + (n + VALUE_ROWS - 1) / VALUE_ROWS * OF_VALUES;
        });
        Prefetcher ahead;
        if (next_key) ahead = {(const char*)next_key, (const char*)next_value, LINES, LINES / advances + 1};
        const E* next = next_key ? next_key : tile.key[0];
        if constexpr (!BYTES<E>) {
            for (int c = 0; tile.n < TILE && c < V; c++) { // what does not exist counts as 0, whatever it holds
                const int n = std::clamp(tile.n - 16 * c, 0, 16) * H;
                memcpy(at.value + 16 * c * H, tile.value[c], n * sizeof(E));
                memset(at.value + 16 * c * H + n, 0, (16 * H - n) * sizeof(E));
                tile.value[c] = at.value + 16 * c * H;
            }
            for (int64_t from = 0; from < in_lanes; from += 16) {
                alignas(64) float shrink[16];
                Lanes<H>& group = lanes[from / 16];
                const __m512 best = group.score(tile, from + 16 < n_rows ? tile.key[0] : next, at.score, ahead);
                group.online_softmax_step(tile, at.score, best, at.pairs, shrink);
                for_row_blocks<VALUE_ROWS>(0, group.n, [&](auto n, int64_t r) {
                    auto weight = [&](int i, int j) { return at.pairs[j][r + i]; };
                    Row<E, H, NQ>* of = rows + from + r;
                    accumulate_values<decltype(n)::value>(tile, at, of, nullptr, shrink + r, ahead, weight);
                });
            }
        }
        if (!few) return;
        if constexpr (BYTES<E>)
            for (int c = 0; c < TILE; c += 4) ahead.advance(), group_values<H>(tile, at.quads, c, c + 4);
        for_row_blocks<SCORE_ROWS<NQ>>(in_lanes, n_rows, [&](auto n, int64_t r) {
            float *sums = page_sum ? page_sum + r * V : nullptr, *maxima = page_sum ? page_max + r : nullptr;
            const E* after = r + n < n_rows ? tile.key[0] : next;
            read_rows<decltype(n)::value>(tile, at, rows + r, sums, maxima, after, ahead);
        });
    }
    void finish() {
        if constexpr (!BYTES<E>)
            for (int64_t r = 0; r < in_lanes; r += 16) lanes[r / 16].store_rows(rows + r);
    }
    Row<E, H, NQ>* rows;
    int64_t n_rows, in_lanes = 0;
    Scratch<E, H, NQ>& at;
    Lanes<H>* lanes = nullptr;
};
#endif

// What the splits of a row have come to so far, dims in the order of group_values.
template <int H> struct Total {
    alignas(64) float out[H] = {};
    float max = LOWEST, sum = 0.f;
};
template <class E, int H, int NQ> static inline void add_split(Total<H>& total, const Row<E, H, NQ>& row) {
    const float sum = _mm512_reduce_add_ps(_mm512_load_ps(row.sum));
    // nothing seen here, or of bf16 only NaN: of bytes those are in the sum already
    if (sum == 0.f || (!BYTES<E> && row.max == LOWEST)) return;
    const float top = std::max(total.max, row.max);
    const float before = exp2f((total.max - top) * row.to_log2), share = exp2f((row.max - top) * row.to_log2);
    const __m512 halves = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_load_ps(row.halves)));
    for (int c = 0; c < H; c += 16) {
        const __m512 of_split = _mm512_add_ps(_mm512_load_ps(row.out + c), halves);
        const __m512 out = _mm512_load_ps(total.out + c), added = _mm512_mul_ps(of_split, _mm512_set1_ps(share));
        _mm512_store_ps(total.out + c, _mm512_fmadd_ps(out, _mm512_set1_ps(before), added));
    }
    total.sum = total.sum * before + sum * share;
    total.max = top;
}

// The cache of a batch row's kv head.
template <class E, int H> struct Cache {
    const E *keys, *values;
    const fp16 *key_scales, *value_scales; // of bytes
    const uint8_t *lower_keys, *lower_values; // of planes, else null
    const int64_t* listed; // null or [M]
    const int64_t S, M, tail;
    const int64_t whole_from; // entries before are read of the upper plane alone

    Cache(const AttentionCall& a, int64_t b, int64_t head) : S(a.S), M(a.M), tail(a.tail),
          whole_from(tail && a.T ? a.pos[b * a.T] - tail + 1 : 0) {
        const int64_t base = b * a.kv_b + head * a.kv_k, scales = b * a.scale_b + head * a.scale_k;
        keys = (const E*)a.k + base, values = (const E*)a.v + base;
        key_scales = a.k_scale + scales, value_scales = a.v_scale + scales;
        lower_keys = a.k_low ? a.k_low + base : nullptr, lower_values = a.v_low ? a.v_low + base : nullptr;
        listed = a.index ? a.index + (b * a.K + head) * M : nullptr;
    }

    // Prefetch the entries listed from .. to.
    void prefetch_listed(int64_t from, int64_t to) const {
        for (int64_t j = from; j < to; j++) {
            const int64_t place = std::min(std::max<int64_t>(listed[j], 0), S - 1);
            if (lower_keys) { // half a head is at most a line
                const int64_t byte = place * (H / 2);
                _mm_prefetch((const char*)keys + byte, _MM_HINT_T0);
                _mm_prefetch((const char*)values + byte, _MM_HINT_T0);
                if (place < whole_from) continue;
                _mm_prefetch((const char*)lower_keys + byte, _MM_HINT_T0);
                _mm_prefetch((const char*)lower_values + byte, _MM_HINT_T0);
                continue;
            }
            for (int h = 0; h < H; h += IN_LINE<E>) {
                _mm_prefetch((const char*)(keys + place * H + h), _MM_HINT_T1);
                _mm_prefetch((const char*)(values + place * H + h), _MM_HINT_T1);
            }
        }
    }

    // Join N entries of planes from `place` on, all of which are whole or none, as the tile's j, j + 1, ...
    template <int N> void join_entries(Tile<E>& tile, Gathered<E, H>& at, int parity, int64_t place, int j) const {
        if constexpr (BYTES<E>) {
            const int ahead = listed ? 0 : 2 * TILE * (H / 2);
            const int64_t byte = place * (H / 2);
            const uint8_t *key = (const uint8_t*)keys + byte, *value = (const uint8_t*)values + byte;
            E *to_key = at.gathered_key[parity] + j * H, *to_value = at.gathered_value[parity] + j * H;
            if (place >= whole_from) {
                join_planes<H, true, N>(key, lower_keys + byte, to_key, ahead);
                join_planes<H, true, N>(value, lower_values + byte, to_value, ahead);
            } else {
                join_planes<H, false, N>(key, key, to_key, ahead);
                join_planes<H, false, N>(value, value, to_value, ahead);
                std::fill_n(at.upper[parity] + j, N, 1.f);
                tile.upper = at.upper[parity];
            }
        }
    }

    // Entries c .. c + 15 of a tile: in place if they are consecutive, else gathered.
    void gather_16(Tile<E>& tile, Gathered<E, H>& at, int parity, int c) const {
        const int64_t* names = listed ? listed + tile.first + c : nullptr;
        const int64_t first = names && c < tile.n ? names[0] : tile.first + c;
        E *gathered_key = at.gathered_key[parity], *gathered_value = at.gathered_value[parity];
        float *key_scale = at.key_scale[parity], *value_scale = at.value_scale[parity];
        bool consecutive = first >= 0 && first + 16 <= S && (!names || c + 16 <= tile.n);
        for (int j = 0; j < 16 && names && c + j < tile.n; j++) {
            consecutive &= names[j] == first + j;
            at.position[parity][c + j] = names[j] < 0 ? INT64_MAX : names[j];
            tile.last = std::max(tile.last, names[j]);
            tile.gaps |= names[j] < 0;
        }
        tile.key[c / 16] = consecutive && !lower_keys ? keys + first * H : gathered_key + c * H;
        tile.value[c / 16] = consecutive && !lower_keys ? values + first * H : gathered_value + c * H;
        const bool uniform = consecutive && (first >= whole_from || first + 15 < whole_from);
        if (lower_keys && uniform) join_entries<16>(tile, at, parity, first, c);
        for (int j = c; j < c + 16 && lower_keys && consecutive && !uniform; j++)
            join_entries<1>(tile, at, parity, first + j - c, j);
        for (int j = c; j < std::min(c + 16, tile.n) && !consecutive; j++) {
            const int64_t name = names ? names[j - c] : tile.first + j;
            const int64_t place = std::min(std::max<int64_t>(name, 0), S - 1);
            if (lower_keys) {
                join_entries<1>(tile, at, parity, place, j);
            } else {
                memcpy(gathered_key + j * H, keys + place * H, sizeof(E) * H);
                if (name < 0) memset(gathered_value + j * H, 0, sizeof(E) * H);
                else memcpy(gathered_value + j * H, values + place * H, sizeof(E) * H);
            }
            if constexpr (BYTES<E>) {
                key_scale[j] = _cvtsh_ss(key_scales[place]);
                value_scale[j] = _cvtsh_ss(value_scales[place]);
            }
        }
        if constexpr (BYTES<E>) {
            if (consecutive) {
                const __m256i of_keys = _mm256_loadu_si256((const __m256i*)(key_scales + first));
                const __m256i of_values = _mm256_loadu_si256((const __m256i*)(value_scales + first));
                _mm512_store_ps(key_scale + c, _mm512_cvtph_ps(of_keys));
                _mm512_store_ps(value_scale + c, _mm512_cvtph_ps(of_values));
            }
            const __m512 of_keys = _mm512_load_ps(key_scale + c), of_values = _mm512_load_ps(value_scale + c);
            tile.nan_scales |= (uint64_t)_mm512_cmp_ps_mask(of_keys, of_values, _CMP_UNORD_Q) << c;
        }
    }

    // The tile that begins at `start`; of n_keys in view, or listed.
    Tile<E> gather_tile(int64_t start, int64_t n_keys, Gathered<E, H>& at) const {
        const int parity = start / TILE % 2, n = (int)std::min<int64_t>(TILE, n_keys - start);
        Tile<E> tile{{}, {}, at.key_scale[parity], at.value_scale[parity], nullptr,
                     listed ? at.position[parity] : nullptr, start, listed ? -1 : start + n - 1, listed ? 0 : start, n,
                     false};
        if (lower_keys && tail) memset(at.upper[parity], 0, sizeof at.upper[parity]);
        if (listed) prefetch_listed(start + TILE, std::min(start + 2 * TILE, M));
        for (int c = 0; c < TILE; c += 16) gather_16(tile, at, parity, c);
        return tile;
    }
};

template <class E, int H, int NQ> struct Attention {
    const AttentionCall& a;
    const Schedule s;
    const Buffers<Row<E, H, NQ>, Total<H>> of;
    std::atomic<int64_t> n_taken{0}; // tasks: a thread takes its next one, to prefetch it, at the last tile of one

    explicit Attention(const AttentionCall& call)
        : a(call), s(a, 16, TILE, sizeof(Row<E, H, NQ>)), of(a, s, PAGES, LOWEST) {} // products take 16 rows

    void run() {
#pragma omp parallel num_threads(a.threads)
        {
            begin_tiles();
            int64_t next_task = -1; // not known
            for (int64_t i = n_taken++; i < s.n_tasks(); i = next_task < 0 ? n_taken++ : next_task) {
                next_task = -1;
                run_task(s.task(i), next_task);
            }
            end_tiles();
        }
        if (s.shared)
#pragma omp parallel for num_threads(a.threads)
            for (int64_t n = 0; n < s.B * s.K * s.n_blocks; n++) {
                const int64_t bk = n / s.n_blocks, b = bk / s.K, from = n % s.n_blocks * s.n_rows;
                const int64_t n_rows = std::min(s.n_rows, s.R - from);
                for (int64_t r = from; r < from + n_rows; r++) {
                    Total<H>& total = of.totals[bk * s.R + r] = {};
                    for (int64_t split = 0; split < s.splits_of(b); split++)
                        add_split(total, of.rows[s.row_of(b, bk % s.K, split) + r]);
                }
                write_results(bk, from, n_rows);
            }
    }

    // Read the splits of a task for its rows. next_task: set if it is known at the end
    void run_task(const Task& task, int64_t& next_task) {
        const int64_t b = task.b, bk = b * s.K + task.head, n_rows = task.n_rows;
        auto limit_of = [&](int64_t r) { // the last position that a row may see
            const int64_t place = a.pos[b * s.T + (task.first_row + r) % s.T];
            return place < s.M || a.index ? std::min(place, INT64_MAX - 1) : -1;
        };
        int64_t n_keys = 0, first = INT64_MAX; // first: that any row sees
        for (int64_t r = 0; r < n_rows; r++) {
            n_keys = std::max(n_keys, limit_of(r) + 1);
            if (limit_of(r) >= 0) first = std::min(first, first_seen(a, limit_of(r)));
        }
        first = a.index ? 0 : first / TILE * TILE;
        n_keys = a.index ? s.M : std::min(n_keys, s.M);
        const int64_t end_of_task = std::min(n_keys, task.end_split * SPLIT);
        const Cache<E, H> cache(a, b, task.head);
        Total<H>* totals = of.totals + bk * s.R + task.first_row;
        for (int64_t r = 0; r < n_rows && !s.shared; r++) totals[r] = {};
        for (int64_t split = task.first_split; split < task.end_split; split++) {
            Row<E, H, NQ>* rows = of.rows + s.row_of(b, task.head, split) + task.first_row;
            for (int64_t r = 0; r < n_rows; r++) {
                Row<E, H, NQ>& row = rows[r];
                if (s.shared || split == task.first_split) row.to_log2 = a.scale * 1.44269504f * load_row(task, r, row);
                memset(row.out, 0, sizeof row.out), memset(row.sum, 0, sizeof row.sum);
                memset(row.halves, 0, sizeof row.halves);
                row.max = LOWEST, row.limit = limit_of(r), row.first = first_seen(a, row.limit);
            }
            if (split && split * SPLIT >= n_keys) continue; // of shorter rows than others
            if ((split + 1) * SPLIT <= first) continue;
            Rows<E, H, NQ> reading(rows, n_rows, a.mass);
            const int64_t end = std::min(n_keys, (split + 1) * SPLIT);
            for (int64_t start = std::max(split * SPLIT, first); start < end; start += TILE) {
                const Tile<E> tile = cache.gather_tile(start, n_keys, reading.at);
                const auto [next_key, next_value] = next_entries(cache, tile, end_of_task, next_task);
                const int64_t n = (bk * s.n_tiles + start / TILE) * s.R;
                reading.read(tile, start / TILE % 2, of.sums_of(n), of.maxima_of(n), next_key, next_value);
            }
            reading.finish();
            for (int64_t r = 0; r < n_rows && !s.shared; r++) add_split(totals[r], rows[r]);
        }
        if (!s.shared) write_results(bk, task.first_row, n_rows);
    }

    // Load row r of a task -> the unit of its scores.
    float load_row(const Task& task, int64_t r, Row<E, H, NQ>& row) const {
        const int64_t g = (task.first_row + r) / s.T, t = (task.first_row + r) % s.T;
        return load_query((const bf16*)a.q + task.b * a.q_b + (task.head * a.G + g) * a.q_n + t * a.q_t, row);
    }

    // The keys and values to prefetch while a tile is read: the next tile's, or those of the next task, or null.
    std::pair<const E*, const E*> next_entries(const Cache<E, H>& cache, const Tile<E>& tile, int64_t end_of_task,
                                               int64_t& next_task) {
        if (a.index || a.k_low) return {nullptr, nullptr};
        if (tile.first + 2 * TILE <= end_of_task) return {tile.key[0] + TILE * H, tile.value[0] + TILE * H};
        if (tile.first + TILE < end_of_task || next_task >= 0) return {nullptr, nullptr};
        next_task = n_taken++;
        if (next_task >= s.n_tasks()) return {nullptr, nullptr};
        const Task next = s.task(next_task);
        const int64_t place = next.first_split * SPLIT, base = next.b * a.kv_b + next.head * a.kv_k + place * H;
        if (place + TILE > a.S) return {nullptr, nullptr};
        return {(const E*)a.k + base, (const E*)a.v + base};
    }

    // The outputs of rows of a kv head, and the mass.
    void write_results(int64_t bk, int64_t first_row, int64_t n_rows) const {
        for (int64_t r = first_row; r < first_row + n_rows; r++) {
            const Total<H>& total = of.totals[bk * s.R + r];
            const __mmask16 any = total.sum ? 0xffff : 0;
            __m512 dims[H / 16];
            for (int c = 0; c < H / 16; c++)
                dims[c] = _mm512_maskz_div_ps(any, _mm512_load_ps(total.out + 16 * c), _mm512_set1_ps(total.sum));
            for (int c = 0; c < H / 16; c += 4)
                store_in_order<E>(dims + c, (bf16*)a.out + (bk * s.R + r) * H + 16 * c);
        }
        if (a.mass) of.write_mass(a, s, bk, LOWEST);
    }
};
}

// Head dims are 64 or 128; every one is a library of its own, as one takes seconds to build.
extern "C" void attention(const AttentionCall* call) {
    if (!call->B) return;
    if (!call->k_scale) Attention<bf16, HEAD_DIM, 1>(*call).run();
    else if (call->fine) Attention<int8_t, HEAD_DIM, 2>(*call).run();
    else Attention<int8_t, HEAD_DIM, 1>(*call).run();
}
