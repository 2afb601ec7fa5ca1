// Attention of a few query rows over bf16 or int8 keys, on a CPU with AVX-512 dot products of both, by AMX tiles where it
// has them.
//
// Flash-decoding (Dao et al. 2023): the keys of a row are cut into splits at absolute positions, each split is read once
// with a running softmax, and the splits are added up in the order of their keys. Sums never depend on what else is in the
// batch, on the number of queries, on how much of the cache is in view or on who reads which split: where there are rows
// enough for all threads, one reads all splits of some rows, else they share those of a row.
//
// A tile is 64 keys. The softmax of few rows has a key in every lane, so that they cost few exponentials. With AMX, products take
// up to 16 rows at once, with keys as the cache stores them; their scores are transposed, four rows at a time. Without,
// each query costs only dot products, no horizontal sum, either of keys that are transposed in registers or, where there are
// 13 rows of bf16 or more, with a row in every lane. The next tile is asked for all the while, into L2, as L1 has no room.
//
// int8 keys and values have a scale each, one a token and kv head, that stays outside the products. A row of queries is
// rounded to int8 by its own largest; its weights of a tile, times the scales of the values, to uint8 by theirs. Products
// of these are whole numbers and exact, whatever computes them; the softmax and all sums of tiles are fp32. Where queries
// need more than 8 bits, what int8 leaves of each number is rounded to int8 once more, FINER times finer.
//
// The bytes may lie in two planes of nibbles, see planes.py: they are put together as a tile is gathered. Where only the
// upper plane is read, a byte is as if its lower nibble was 7, which is half too small: the sum of a row's queries times
// a half is missing from its scores, and half of its weights' sum from every output.
//
// Names: E element of keys and values, bf16 or int8_t, B batch, K kv heads, G query heads a kv head, T queries a head,
// R = G * T rows of one kv head, H head dim, S capacity, M keys in view or entries listed,
// NQ bytes of a number of a query.
#include "simd.hpp"

namespace { // a process may hold this built in two ways, whose names must not meet
constexpr int TILE = 64, PAGE = 16, SPLIT = 1024;
constexpr int BLOCK = 64, TASKS = 8; // rows that read a split together, at least; parts of the work for each thread, as far as there are rows
constexpr int64_t MAX_KEPT = 64 << 20; // bytes of all rows of all splits that are kept at once
constexpr int WEIGHTS = 16 * 16; // pairs of keys between the weights of 32 keys and of the next, 16 rows of 16
template <class E> constexpr bool BYTES = sizeof(E) == 1;
template <class E> constexpr int IN_DWORD = 4 / sizeof(E);
template <class E> constexpr int IN_LINE = 64 / sizeof(E);
constexpr int FINER = 254; // the second byte of a query counts in these parts of the first one's steps
constexpr float LOWEST = -0x1p100f; // finite, so that the difference of two is no NaN; scaled it stays exact

// 2^x for x <= 0, relative error below 3e-6; results below 2^-126 are rounded up to about it. The weights are rounded
// to bf16 afterwards.
static inline __m512 exp2_approx(__m512 x) {
    const __m512 magic = _mm512_set1_ps(12582912.f); // 1.5 * 2^23: adding it rounds to whole numbers
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.f));
    __m512 shifted = _mm512_add_ps(x, magic), f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic)); // -0.5 .. 0.5
    __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(9.6725e-3f), _mm512_set1_ps(5.5504e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022152e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314719e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.f));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

// One query row of a split: where the softmax stands. out has its dims as group_values has them.
template <class E, int H, int NQ> struct Row {
    alignas(64) uint32_t q[NQ][H / IN_DWORD<E>];
    alignas(64) float out[H], sum[16], halves[16]; // sum, and what upper planes leave out of all outputs: by lanes
    float max, to_log2, q_half; // to_log2: times a score, whose exp2 is its weight; q_half: half of the sum of q, of bytes
    int64_t limit; // last position it may see
};

// q as the products take it -> what one of a score is worth.
// Of one that is not finite it is a NaN, as the output then is: whole numbers, and a largest score, would hide that.
static inline bool is_finite(const bf16* q, int n) {
    __mmask32 not_finite = 0;
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (int i = 0; i < n; i += 32) not_finite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(q + i), exponent), exponent);
    return !not_finite;
}
template <int H> static inline float load_query(const bf16* q, Row<bf16, H, 1>& row) {
    if (is_finite(q, H)) {
        memcpy(row.q, q, sizeof row.q);
        return 1.f;
    }
    memset(row.q, 0, sizeof row.q);
    return std::numeric_limits<float>::quiet_NaN();
}
template <int H, int NQ> static inline float load_query(const bf16* q, Row<int8_t, H, NQ>& row) {
    __m512 wide[H / 16], max_abs = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int c = 0; c < H / 16; c++) {
        wide[c] = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(q + 16 * c))), 16);
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
            const __m512 x = _mm512_mul_ps(wide[c], by), rest = _mm512_sub_ps(x, _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
            const __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(FINER)));
            _mm_store_si128((__m128i*)(row.q[1] + 4 * c), _mm512_cvtsepi32_epi8(n));
            sum = _mm512_add_epi32(sum, n);
        }
    }
    row.q_half = .5f * _mm512_reduce_add_epi32(sum);
    return is_finite(q, H) ? top / (NQ == 2 ? 127.f * FINER : 127.f) : std::numeric_limits<float>::quiet_NaN();
}

// 64 dims as group_values leaves them -> in their order, as bf16.
template <class E> static inline void store_in_order(const __m512* from, bf16* to) {
    __m512 dims[4];
    if constexpr (BYTES<E>) { // four vectors of four dims in each quarter
        const __m512 a = _mm512_shuffle_f32x4(from[0], from[1], 0x44), b = _mm512_shuffle_f32x4(from[2], from[3], 0x44);
        const __m512 c = _mm512_shuffle_f32x4(from[0], from[1], 0xee), d = _mm512_shuffle_f32x4(from[2], from[3], 0xee);
        dims[0] = _mm512_shuffle_f32x4(a, b, 0x88), dims[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
        dims[2] = _mm512_shuffle_f32x4(c, d, 0x88), dims[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
    } else {
        const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0), half = _mm512_set1_epi32(8);
#pragma GCC unroll 2
        for (int c = 0; c < 4; c += 2) {
            dims[c] = _mm512_permutex2var_ps(from[c], first, from[c + 1]);
            dims[c + 1] = _mm512_permutex2var_ps(from[c], _mm512_add_epi32(first, half), from[c + 1]);
        }
    }
#pragma GCC unroll 2
    for (int c = 0; c < 4; c += 2) _mm512_storeu_si512(to + 16 * c, (__m512i)_mm512_cvtne2ps_pbh(dims[c + 1], dims[c]));
}

// The keys and values of one tile, each 16 one after the other; position is null for first, first + 1, ...
template <class E> struct Tile {
    const E *key[TILE / 16], *value[TILE / 16];
    const float *key_scale, *value_scale; // of bytes
    const float* upper; // 1 for each whose upper plane alone is read, else 0; null: for none
    const int64_t* position; // INT64_MAX: does not exist
    int64_t first, last; // last: the largest position that exists
    int n; // entries from n on do not exist
    bool gaps; // whether any before n does not
    uint64_t nan_scales = 0; // of bytes: those with a NaN for a scale, a bit each
};

// Of the keys of a tile, those that exist and that a row with this limit may see, a bit each.
template <class E> static inline uint64_t seen_keys(const Tile<E>& tile, int64_t limit) {
    const uint64_t exist = tile.n < TILE ? (uint64_t(1) << tile.n) - 1 : ~uint64_t(0);
    if (!tile.position) {
        const int64_t n = std::clamp<int64_t>(limit + 1 - tile.first, 0, TILE);
        return exist & (n < TILE ? (uint64_t(1) << n) - 1 : ~uint64_t(0));
    }
    uint64_t seen = 0;
    for (int j = 0; j < TILE; j += 8) seen |= uint64_t(_mm512_cmple_epi64_mask(_mm512_loadu_si512(tile.position + j), _mm512_set1_epi64(limit))) << j;
    return exist & seen;
}

// A row's scores over a tile, a key in every lane -> its weights in pairs of keys, or in quads of which one is worth unit.
// Where the softmax stands moves on; returns by what has been summed so far shrinks. r: where the row's mass is, if wanted.
template <class E, int H, int NQ> static inline float online_softmax_step(__m512* score, const Tile<E>& tile, Row<E, H, NQ>& row, uint32_t* weight, float* unit, float* page_sum, float* page_max, int64_t r) {
    constexpr int V = TILE / 16;
    if constexpr (BYTES<E>) {
#pragma GCC unroll 4
        for (int c = 0; c < V; c++) {
            score[c] = _mm512_cvtepi32_ps((__m512i)score[c]);
            if (tile.upper) score[c] = _mm512_fmadd_ps(_mm512_load_ps(tile.upper + 16 * c), _mm512_set1_ps(row.q_half), score[c]);
            score[c] = _mm512_mul_ps(score[c], _mm512_load_ps(tile.key_scale + 16 * c));
        }
    }
    const bool sees_all = tile.n == TILE && !tile.gaps && tile.last <= row.limit;
    const uint64_t seen = sees_all ? ~uint64_t(0) : seen_keys(tile, row.limit);
    if (!sees_all) {
#pragma GCC unroll 4
        for (int c = 0; c < V; c++) score[c] = _mm512_mask_blend_ps(seen >> 16 * c, _mm512_set1_ps(LOWEST), score[c]);
    }
    __m512 best = _mm512_set1_ps(LOWEST);
#pragma GCC unroll 4
    for (int c = 0; c < V; c++) best = _mm512_max_ps(score[c], best); // in this order, as a score that is no number then hides none
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
        for (int c = 0; c < V; c++) scaled[c] = _mm512_maskz_mul_ps(seen >> 16 * c, w[c], _mm512_load_ps(tile.value_scale + 16 * c));
        const float top = std::max(_mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(scaled[0], scaled[1]), _mm512_max_ps(scaled[2], scaled[3]))), 1e-30f);
        const __m512 by = _mm512_set1_ps(255.f / top);
        __m512i n[V];
#pragma GCC unroll 4
        for (int c = 0; c < V; c++) n[c] = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[c], by));
        _mm512_store_si512(weight, _mm512_packus_epi16(_mm512_packus_epi32(n[0], n[1]), _mm512_packus_epi32(n[2], n[3])));
        // whole numbers, and a largest weight, would hide it
        *unit = seen & tile.nan_scales ? std::numeric_limits<float>::quiet_NaN() : top * (1.f / 255.f);
        if (tile.upper) {
            __m512 weights = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int c = 0; c < V; c++) weights = _mm512_fmadd_ps(_mm512_cvtepi32_ps(n[c]), _mm512_load_ps(tile.upper + 16 * c), weights);
            const __m512 before = _mm512_mul_ps(_mm512_load_ps(row.halves), _mm512_set1_ps(shrink));
            _mm512_store_ps(row.halves, _mm512_fmadd_ps(weights, _mm512_set1_ps(.5f * *unit), before));
        } else if (shrink != 1.f) {
            _mm512_store_ps(row.halves, _mm512_mul_ps(_mm512_load_ps(row.halves), _mm512_set1_ps(shrink)));
        }
    } else {
        _mm512_store_si512(weight, (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]));
        _mm512_store_si512(weight + WEIGHTS, (__m512i)_mm512_cvtne2ps_pbh(w[3], w[2]));
    }
    if (page_sum) { // the four sums of 16 lanes each
        __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(w[0], w[1]), _mm512_unpackhi_ps(w[0], w[1]));
        __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(w[2], w[3]), _mm512_unpackhi_ps(w[2], w[3]));
        __m512d lo = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), hi = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
        __m512 all = _mm512_add_ps((__m512)lo, (__m512)hi);
        __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
        _mm_storeu_ps(page_sum + r * V, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
        page_max[r] = row.max;
    }
    return shrink;
}

#ifdef __AMX_BF16__
// The values of keys from .. to of a tile by pairs of keys; what does not exist counts as 0, whatever it holds.
template <int H> static inline void group_values(const Tile<bf16>& tile, __m512i (*pairs)[H / 16], int from, int to) {
    for (int j = from; j < to; j += 2) {
        const bf16* value = tile.value[j / 16] + j % 16 * H;
#pragma GCC unroll 4
        for (int c = 0; c < H / 32; c++) {
            const __m512i none = _mm512_setzero_si512();
            const __m512i even = j < tile.n ? _mm512_loadu_si512(value + 32 * c) : none;
            const __m512i odd = j + 1 < tile.n ? _mm512_loadu_si512(value + H + 32 * c) : none;
            pairs[j / 2][2 * c] = _mm512_unpacklo_epi16(even, odd);
            pairs[j / 2][2 * c + 1] = _mm512_unpackhi_epi16(even, odd);
        }
    }
}
#endif

// The values of keys from .. to of a tile by quads of keys, in the order in which soften packs the weights, which are 0 for what does not exist.
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

// Products with the first byte of queries in steps of the second: 254 times as many.
static inline __m512i times_254(__m512i products) { return _mm512_sub_epi32(_mm512_slli_epi32(products, 8), _mm512_slli_epi32(products, 1)); }

// Outputs so far plus the products of a tile, which are whole numbers in bytes.
static inline void add_products(float* out, __m512 products, float unit, float shrink) {
    const __m512 before = _mm512_mul_ps(_mm512_load_ps(out), _mm512_set1_ps(shrink));
    _mm512_store_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)products), _mm512_set1_ps(unit), before));
}

// Ask for n keys or values that lie one after the other.
template <int H, class E> static inline void prefetch(const E* from, int n) {
    for (int h = 0; h < n * H; h += IN_LINE<E>) _mm_prefetch((const char*)(from + h), _MM_HINT_T0);
}

// Bytes of planes, of two numbers each -> the numbers in their upper halves, or shifted by 4 in the lower ones, as int8;
// the lower nibbles are at the same place of low, or without any 7.
template <bool WHOLE> static inline __m512i join_nibbles(__m512i up, __m512i low) {
    const __m512i high = _mm512_set1_epi8(int8_t(0xf0));
    if constexpr (WHOLE) return _mm512_xor_si512(_mm512_ternarylogic_epi32(up, high, low, 0xe2), _mm512_set1_epi8(int8_t(0x80))); // high ? up : low
    else return _mm512_ternarylogic_epi32(up, high, _mm512_set1_epi8(int8_t(0x87)), 0x6a); // (up & high) ^ 0x87
}

// N entries that lie one after the other out of their planes, while those `ahead` bytes behind are asked for. WHOLE: of
// both planes; else as if all lower nibbles were 7.
template <int H, bool WHOLE, int N> static inline void join_planes(const uint8_t* upper, const uint8_t* lower, int8_t* to, int ahead) {
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
        const __m512i first = join_nibbles<WHOLE>(_mm512_slli_epi16(up, 4), low), second = join_nibbles<WHOLE>(up, _mm512_srli_epi16(low, 4));
        if constexpr (H == 128) {
            _mm512_storeu_si512(to, first);
            _mm512_storeu_si512(to + 64, second);
        } else {
            _mm512_storeu_si512(to, _mm512_shuffle_i64x2(first, second, 0x44));
            if constexpr (LINES) _mm512_storeu_si512(to + 64, _mm512_shuffle_i64x2(first, second, 0xee));
        }
    }
}

// What a tile is gathered into, where it does not lie together or in planes, by the tile's parity.
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
static inline void tile_fence() { asm volatile("" ::: "memory"); } // before tiles are loaded, which compilers cannot see

// Of what two follow each other in the making, the parity of the tile or of the step tells which.
template <class E, int H, int NQ> struct Scratch : Gathered<E, H> {
    alignas(64) float score[2][NQ][TILE][16]; // of a key, 16 rows
    alignas(64) uint32_t weight[2][2][16][16]; // of 32 keys and 32 more, in pairs: of a row; quads: of 64
    __m512i value[2][TILE / IN_DWORD<E>][H / 16]; // pairs or quads of keys
    alignas(64) float products[H / 16][16][16], unit[2][16]; // of bytes
};

template <class E, int H, int NQ> struct alignas(64) Queries { uint32_t q[NQ][H / IN_DWORD<E>][16]; }; // of 16 rows

// The scores of four rows over 16 keys, in the layout of the products -> a key in every lane.
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
                for (int h = 0; h < H / IN_DWORD<E>; h += 16) transpose_16x16((const char*)(rows[16 * g].q[part] + h), sizeof *rows, (char*)groups[g].q[part][h], 64);
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

    void step(Stage begun) {
        constexpr int V = TILE / 16, PARTS = H / 8;
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
                const int part = half * (H / 16) + i;
                if (begun.row >= 0) { // keys by 32 and 32, of those 16 and 16: their product with all rows
                    const int product = BYTES<E> ? i / 2 : i, d = product / 2;
                    if (i == 0) { _tile_zero(0); _tile_zero(1); }
                    if constexpr (NQ == 2) { // with both bytes of queries, 16 keys after the other 16
                        constexpr int DS = H / 64;
                        const int keys = product / DS, dims = product % DS;
                        if (i % 2 == 0) {
                            if (i && dims == 0) { _tile_zero(0); _tile_zero(1); }
                            _tile_loadd(3, from.tile.key[2 * half + keys] + 64 * dims, H);
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
                        _tile_loadd(3, from.tile.key[2 * half] + IN_LINE<E> * d, sizeof(E) * H);
                        if constexpr (BYTES<E>) _tile_dpbssd(0, 3, 2);
                        else _tile_dpbf16ps(0, 3, 2);
                    } else {
                        _tile_loadd(3, from.tile.key[2 * half + 1] + IN_LINE<E> * d, sizeof(E) * H);
                        if constexpr (BYTES<E>) _tile_dpbssd(1, 3, 2);
                        else _tile_dpbf16ps(1, 3, 2);
                    }
                    if (NQ == 1 && i == H / 16 - 1) {
                        _tile_stored(0, at.score[odd][0][32 * half], 64);
                        _tile_stored(1, at.score[odd][0][32 * half + 16], 64);
                    }
                    if (begun.row == 0 && from.ahead) {
                        prefetch<H>(from.tile.key[part * V / PARTS] + (TILE + part * TILE / PARTS % 16) * H, TILE / PARTS);
                        prefetch<H>(from.tile.value[part * V / PARTS] + (TILE + part * TILE / PARTS % 16) * H, TILE / PARTS);
                    }
                }
                if constexpr (BYTES<E>) {
                    if (weighted.row >= 0 && i % 2) { // 16 dims, in the order of group_values
                        const int c = part / 2;
                        _tile_zero(4);
                        _tile_loadd(6, at.weight[odd], 64);
                        _tile_loadd(7, value[0] + c, 4 * H);
                        _tile_dpbusd(4, 6, 7);
                        _tile_stored(4, at.products[c], 64);
                    }
                } else if (weighted.row >= 0) { // outputs by 32 dims, in the order of group_values
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
                if (scored.row == 0) group_values<H>(of.tile, at.value[scored.parity], part * TILE / PARTS, (part + 1) * TILE / PARTS);
                constexpr int EACH = 16 / PARTS; // rows
                const int r = part * EACH;
                if (r >= n) continue;
                if (r % 4 == 0)
#pragma GCC unroll 4
                    for (int c = 0; c < V; c++) {
                        transpose_scores((const float (*)[16])&at.score[!odd][0][16 * c][r], &score[0][c], V);
                        if constexpr (NQ == 2) {
                            __m512 finer[4];
                            transpose_scores((const float (*)[16])&at.score[!odd][1][16 * c][r], finer, 1);
#pragma GCC unroll 4
                            for (int j = 0; j < 4; j++) score[j][c] = (__m512)_mm512_add_epi32(times_254((__m512i)score[j][c]), (__m512i)finer[j]);
                        }
                    }
#pragma GCC unroll 2
                for (int j = 0; j < EACH; j++) {
                    if (r + j >= n) break;
                    const int64_t at_row = scored.row + r + j;
                    shrinks[r + j] = online_softmax_step(score[(i * EACH + j) % 4], of.tile, now[r + j], at.weight[!odd][0][r + j], at.unit[!odd] + r + j, of.page_sum, of.page_max, at_row);
                    shrunk |= shrinks[r + j] != 1.f;
                }
            }
        tile_fence();
        if constexpr (BYTES<E>)
            for (int64_t r = 0; weighted.row >= 0 && r < std::min<int64_t>(16, n_rows - weighted.row); r++)
#pragma GCC unroll 8
                for (int c = 0; c < H / 16; c++) add_products(last[r].out + 16 * c, _mm512_load_ps(at.products[c][r]), at.unit[odd][r], 1.f);
        if (shrunk)
            for (int r = 0; r < n; r++)
                for (int h = 0; h < H; h += 16) _mm512_store_ps(now[r].out + h, _mm512_mul_ps(_mm512_load_ps(now[r].out + h), _mm512_set1_ps(shrinks[r])));
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

// Sums, of bytes whole numbers, and the products of 16 dwords, of unsigned bytes, with one that is in memory. By the instruction that
// takes it from there: GCC would load it by one of its own.
template <class E> static inline __m512 dot_add_memory(__m512 sum, __m512i dwords, const void* one) {
    if constexpr (BYTES<E>) asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(dwords), "m"(*(const char(*)[4])one));
    else asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(dwords), "m"(*(const char(*)[4])one));
    return sum;
}

// Sums, of bytes whole numbers, and the products of 16 dwords with one, of unsigned bytes.
template <class E> static inline __m512 dot_add(__m512 sum, __m512i dwords, uint32_t one) {
    const __m512i ones = _mm512_set1_epi32(one);
    if constexpr (BYTES<E>) return (__m512)_mm512_dpbusd_epi32((__m512i)sum, ones, dwords);
    else return _mm512_dpbf16_ps(sum, (__m512bh)dwords, (__m512bh)ones);
}

// The lines of the next tile, where keys are read in order: asked for a few at a time all through this one, so that they come
// meanwhile. A core waits for no more than some at once, and asked for together they would hold up what is read.
struct Prefetcher {
    const char *key = nullptr, *value = nullptr;
    int64_t left = 0, each = 0; // lines of each; so many are asked for at once

    void advance() {
        for (int64_t n = std::min(each, left); n > 0; n--, left--, key += 64, value += 64) _mm_prefetch(key, _MM_HINT_T1), _mm_prefetch(value, _MM_HINT_T1);
    }
};

// The outputs of N rows take in the values of a tile; weight(r, j) is what row r gives to pair or quad j. Pairs are put
// together each time, which costs nothing beside their products; for quads it costs less to keep them.
template <int N, class E, int H, int NQ, class Weight> static inline void accumulate_values(const Tile<E>& tile, const Scratch<E, H, NQ>& at, Row<E, H, NQ>* rows, const float* unit, const float* shrink, Prefetcher& ahead, const Weight& weight) {
    for (int d = 0; d < H; d += 64) { // as many dims as fit the registers
        __m512 out[N][4];
#pragma GCC unroll 6
        for (int r = 0; r < N; r++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++)
                out[r][c] = BYTES<E> ? _mm512_setzero_ps() : _mm512_mul_ps(_mm512_load_ps(rows[r].out + d + 16 * c), _mm512_set1_ps(shrink[r]));
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
                        const __m512i even = _mm512_loadu_si512(pair + 16 * c), odd = _mm512_loadu_si512(pair + H + 16 * c);
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

// Eight words of each of 16 keys, so many bytes apart -> a key in every lane, a word in each vector.
__attribute__((always_inline)) static inline void transpose_words(const char* key, int64_t apart, __m512i* to) {
    __m512i a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) { // keys i and i + 4; from 4 on, i + 4 and i + 8
        const __m256i* own = (const __m256i*)(key + (i % 4 + i / 4 * 8) * apart);
        a[i] = _mm512_mask_broadcast_i64x4(_mm512_castsi256_si512(_mm256_loadu_si256(own)), 0xf0, _mm256_loadu_si256((const __m256i*)((const char*)own + 4 * apart)));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) to[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), to[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
}

// The scores of N rows over a tile, a key in every lane: 16 keys are transposed in registers, 32 bytes of each at a time, and
// multiplied at once. Meanwhile the keys that come next, after the tile's last those at next, go from L2 to L1, and of bf16 so do
// the values. Products of bytes take one side unsigned: keys, 128 larger, which the last part's initial sums correct.
template <int N, class E, int H, int NQ> static inline void score_rows(const Tile<E>& tile, const Row<E, H, NQ>* rows, const E* next, __m512 (*score)[TILE / 16], Prefetcher& ahead) {
    constexpr int V = TILE / 16, D = H / IN_DWORD<E>, EACH = 16 * 8 * IN_DWORD<E>; // numbers that a step takes of 16 keys
    for (int c = 0; c < V; c++) {
        __m512 sum[NQ][N];
#pragma GCC unroll 2
        for (int part = 0; part < NQ; part++)
#pragma GCC unroll 9
            for (int r = 0; r < N; r++) sum[part][r] = BYTES<E> && part == NQ - 1 ? (__m512)_mm512_cvtps_epi32(_mm512_set1_ps(-256.f * rows[r].q_half)) : _mm512_setzero_ps();
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
                    for (int r = 0; r < N; r++) sum[part][r] = dot_add_memory<E>(sum[part][r], key[h], rows[r].q[part] + from + h);
            }
        }
#pragma GCC unroll 9
        for (int r = 0; r < N; r++)
            if constexpr (NQ == 2) score[r][c] = (__m512)_mm512_add_epi32(times_254((__m512i)sum[0][r]), (__m512i)sum[1][r]);
            else score[r][c] = sum[0][r];
    }
}

// A few rows read a tile.
constexpr int VALUE_ROWS = 6; // rows that mix at once, as their outputs fit the registers
template <int NQ> constexpr int SCORE_ROWS = NQ == 2 ? 6 : 9; // rows that are scored at once, as their sums and eight words of 16 keys do
template <int N, class E, int H, int NQ> static __attribute__((noinline)) void read_rows(const Tile<E>& tile, Scratch<E, H, NQ>& at, Row<E, H, NQ>* rows, float* page_sum, float* page_max, const E* next, Prefetcher& ahead) {
    __m512 score[N][TILE / 16];
    score_rows<N>(tile, rows, next, score, ahead);
    float shrink[N], unit[N];
#pragma GCC unroll 9
    for (int r = 0; r < N; r++) shrink[r] = online_softmax_step(score[r], tile, rows[r], at.weight[0][r], unit + r, page_sum, page_max, r);
    auto accumulate_some = [&](auto n, int m) {
        accumulate_values<decltype(n)::value>(tile, at, rows + m, unit + m, shrink + m, ahead, [&](int r, int j) { return at.weight[j / 16][m + r][j % 16]; });
    };
    constexpr int FIRST = N <= VALUE_ROWS ? N : (N + 1) / 2;
    accumulate_some(std::integral_constant<int, FIRST>{}, 0);
    if constexpr (N > FIRST) accumulate_some(std::integral_constant<int, N - FIRST>{}, FIRST);
}

// Up to 16 rows of bf16, one in every lane: a key is read as the cache stores it, a pair of its dims for all rows at once.
// What they come to is bit for bit what each comes to among few, but for scores of exactly LOWEST, which count as unseen here.
template <int H> struct alignas(64) Lanes {
    uint32_t q[H / 2][16];
    float sum[16][16]; // of keys i, 16 + i, ...
    float max[16], to_log2[16];
    int64_t limit[16], lowest; // lowest: the least of them
    int n;

    void load_rows(const Row<bf16, H, 1>* rows, int64_t n_rows) {
        n = std::min<int64_t>(16, n_rows), lowest = INT64_MAX;
        for (int h = 0; h < H / 2; h += 16) transpose_16x16((const char*)(rows->q[0] + h), sizeof *rows, (char*)q[h], 64);
        memset(sum, 0, sizeof sum);
        for (int r = 0; r < 16; r++) {
            max[r] = LOWEST, to_log2[r] = r < n ? rows[r].to_log2 : 0.f, limit[r] = r < n ? rows[r].limit : -1;
            if (r < n) lowest = std::min(lowest, limit[r]);
        }
    }
    void store_rows(Row<bf16, H, 1>* rows) const {
        for (int r = 0; r < n; r++) {
            rows[r].max = max[r];
            for (int i = 0; i < 16; i++) rows[r].sum[i] = sum[i][r];
        }
    }
    bool see_all(const Tile<bf16>& tile) const { return tile.n == TILE && !tile.gaps && tile.last <= lowest; }

    // The scores over a tile, and the best of each row. Meanwhile the keys that come next, after the tile's last those at next, go
    // from L2 to L1, and so do the values.
    __m512 score(const Tile<bf16>& tile, const bf16* next, float (*to)[16], Prefetcher& ahead) const {
        const bool sees_all = see_all(tile);
        __m512 best = _mm512_set1_ps(LOWEST);
        for (int c = 0; c < TILE / 16; c++) {
            const bf16 *key = tile.key[c], *upcoming = c + 1 < TILE / 16 ? tile.key[c + 1] : next, *value = tile.value[c];
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
                    const __m512i at = _mm512_set1_epi64(i >= tile.n ? INT64_MAX : tile.position ? tile.position[i] : tile.first + i);
                    const __mmask16 seen = _mm512_kunpackb(_mm512_cmple_epi64_mask(at, _mm512_load_si512(limit + 8)), _mm512_cmple_epi64_mask(at, _mm512_load_si512(limit)));
                    s[j] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(LOWEST), s[j]);
                }
                best = _mm512_max_ps(s[j], best); // in this order, as in the other soften
                _mm512_store_ps(to[16 * c + j], s[j]);
            }
        }
        return best;
    }

    // Scores -> weights in pairs of keys, as the other soften does.
    void online_softmax_step(const Tile<bf16>& tile, const float (*score)[16], __m512 best, uint32_t (*pairs)[16], float* shrink) {
        const __m512i alternate = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const bool sees_all = see_all(tile);
        _mm512_store_ps(shrink, _mm512_set1_ps(1.f));
        if (const __mmask16 better = _mm512_cmp_ps_mask(best, _mm512_load_ps(max), _CMP_GT_OQ)) { // rare, after the first tiles
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
                    if (!sees_all) w[k][c] = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(s, _mm512_set1_ps(LOWEST), _CMP_NEQ_UQ), w[k][c]); // those unseen
                }
                const __m512 these = _mm512_add_ps(_mm512_add_ps(w[k][0], w[k][1]), _mm512_add_ps(w[k][2], w[k][3]));
                _mm512_store_ps(sum[i + k], _mm512_fmadd_ps(_mm512_load_ps(sum[i + k]), less, these));
            }
#pragma GCC unroll 4
            for (int c = 0; c < TILE / 16; c++) _mm512_store_si512(pairs[8 * c + i / 2], _mm512_permutexvar_epi16(alternate, (__m512i)_mm512_cvtne2ps_pbh(w[1][c], w[0][c])));
        }
    }
};

// The rows of a split while its tiles are read. Those of bf16 go 16 at a time into lanes, and so do the rest if they are FEW
// or more; fewer cost less by transposed keys, and mass is summed there alone.
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
    // next_key, next_value: the next tile's, or null. By itself, as is read_rows: among the rest of attend their sums leave the registers.
    __attribute__((noinline)) void read(Tile<E> tile, int, float* page_sum, float* page_max, const E* next_key, const E* next_value) {
        constexpr int V = TILE / 16, D = H / IN_DWORD<E>, LINES = TILE * H * sizeof(E) / 64, MIXED = H / 64 * TILE / IN_DWORD<E> / 8;
        const bool few = n_rows > in_lanes;
        int64_t asks = (in_lanes + 15) / 16 * (V * D / 8) + (in_lanes / 16 * 3 + (in_lanes % 16 + VALUE_ROWS - 1) / VALUE_ROWS) * MIXED + (BYTES<E> && few ? TILE / 4 : 0);
        for_row_blocks<SCORE_ROWS<NQ>>(in_lanes, n_rows, [&](auto n, int64_t) { asks += V * D / 8 + (n + VALUE_ROWS - 1) / VALUE_ROWS * MIXED; });
        Prefetcher ahead;
        if (next_key) ahead = {(const char*)next_key, (const char*)next_value, LINES, LINES / asks + 1};
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
                    accumulate_values<decltype(n)::value>(tile, at, rows + from + r, nullptr, shrink + r, ahead, [&](int i, int j) { return at.pairs[j][r + i]; });
                });
            }
        }
        if (!few) return;
        if constexpr (BYTES<E>)
            for (int c = 0; c < TILE; c += 4) ahead.advance(), group_values<H>(tile, at.quads, c, c + 4);
        for_row_blocks<SCORE_ROWS<NQ>>(in_lanes, n_rows, [&](auto n, int64_t r) {
            read_rows<decltype(n)::value>(tile, at, rows + r, page_sum ? page_sum + r * V : nullptr, page_sum ? page_max + r : nullptr, r + n < n_rows ? tile.key[0] : next, ahead);
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

// What the splits of a row have come to so far, dims as group_values has them.
template <int H> struct Total {
    alignas(64) float out[H] = {};
    float max = LOWEST, sum = 0.f;
};
template <class E, int H, int NQ> static inline void add_split(Total<H>& total, const Row<E, H, NQ>& row) {
    const float sum = _mm512_reduce_add_ps(_mm512_load_ps(row.sum));
    if (sum == 0.f || (!BYTES<E> && row.max == LOWEST)) return; // nothing seen here, or of bf16 no number: of bytes those are NaN already
    const float top = std::max(total.max, row.max), before = exp2f((total.max - top) * row.to_log2), share = exp2f((row.max - top) * row.to_log2);
    const __m512 halves = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_load_ps(row.halves)));
    for (int c = 0; c < H; c += 16) {
        const __m512 own = _mm512_mul_ps(_mm512_add_ps(_mm512_load_ps(row.out + c), halves), _mm512_set1_ps(share));
        _mm512_store_ps(total.out + c, _mm512_fmadd_ps(_mm512_load_ps(total.out + c), _mm512_set1_ps(before), own));
    }
    total.sum = total.sum * before + sum * share;
    total.max = top;
}

template <class E, int H, int NQ>
static void attend(const bf16* q, const E* k, const E* v, const fp16* k_scale, const fp16* v_scale, const uint8_t* k_low, const uint8_t* v_low, const int64_t* pos, const int64_t* index,
                   bf16* out, float* mass, int64_t B, int64_t K, int64_t G, int64_t T, int64_t M, int64_t S, int64_t q_b, int64_t q_n, int64_t q_t,
                   int64_t kv_b, int64_t kv_k, int64_t scale_b, int64_t scale_k, int64_t tail, float scale, int threads) {
    constexpr int V = TILE / PAGE;
    const float to_log2 = scale * 1.44269504f;
    const int64_t R = G * T, slots = (R + 15) / 16 * 16; // products read and write 16 rows
    if (!B) return;
    int64_t longest = 0; // keys that some query sees, or entries listed
    static thread_local std::vector<int64_t> kept_starts;
    kept_starts.assign(B + 1, 0);
    for (int64_t b = 0; b < B; b++) {
        int64_t own = index ? M : 0;
        for (int64_t t = 0; t < T && !index; t++) own = std::max(own, pos[b * T + t] < M ? pos[b * T + t] + 1 : 0);
        longest = std::max(longest, own);
        kept_starts[b + 1] = kept_starts[b] + std::max<int64_t>(1, (own + SPLIT - 1) / SPLIT);
    }
    const int64_t* starts = kept_starts.data(); // the splits before row b's, of one kv head each
    const int64_t n_splits = std::max<int64_t>(1, (longest + SPLIT - 1) / SPLIT), n_tiles = (longest + TILE - 1) / TILE;
    const int64_t tasks = TASKS * threads, wanted = mass ? 1 : (tasks + B * K - 1) / (B * K); // mass is summed over all rows
    const int64_t n_rows = std::clamp<int64_t>(((R + wanted - 1) / wanted + 15) / 16 * 16, BLOCK, std::max<int64_t>(slots, BLOCK)), n_blocks = std::max<int64_t>(1, (R + n_rows - 1) / n_rows);
    // whether the splits of a row are different tasks': there are fewer rows as long as the longest one than tasks, and all fit some memory
    const int64_t work = K * n_blocks * starts[B];
    const bool shared = n_splits > 1 && work < tasks * n_splits && K * starts[B] * slots * (int64_t)sizeof(Row<E, H, NQ>) <= MAX_KEPT;
    const int64_t each = shared ? std::max<int64_t>(1, work / tasks) : n_splits;
    const int64_t n_kept = shared ? K * starts[B] : B * K; // splits whose rows are kept
    auto row_of = [&](int64_t b, int64_t head, int64_t split) { return (shared ? K * starts[b] + head * (starts[b + 1] - starts[b]) + split : b * K + head) * slots; };
    static thread_local std::vector<int64_t> kept_tasks;
    kept_tasks.assign(B + 1, 0);
    for (int64_t b = 0; b < B; b++) kept_tasks[b + 1] = kept_tasks[b] + K * n_blocks * ((starts[b + 1] - starts[b] + each - 1) / each);
    const int64_t* first_task = kept_tasks.data(); // of row b
    // kept between calls: fresh pages of memory would cost more than a small call
    static thread_local std::vector<Row<E, H, NQ>> kept_rows;
    static thread_local std::vector<Total<H>> kept_totals;
    static thread_local std::vector<float> kept_sums, kept_maxima;
    if ((int64_t)kept_rows.size() < n_kept * slots) kept_rows.resize(n_kept * slots);
    if ((int64_t)kept_totals.size() < B * K * R) kept_totals.resize(B * K * R);
    if (mass) {
        kept_sums.resize(B * K * n_tiles * R * V);
        kept_maxima.assign(B * K * n_tiles * R, LOWEST);
    }
    Row<E, H, NQ>* all = kept_rows.data(); // by address: each worker has thread_locals of its own
    Total<H>* totals = kept_totals.data();
    float *page_sum = mass ? kept_sums.data() : nullptr, *page_max = mass ? kept_maxima.data() : nullptr;

    auto write_results = [&](int64_t bk, int64_t from, int64_t here) { // the outputs of these rows of a kv head, and the mass
        for (int64_t r = from; r < from + here; r++) {
            const Total<H>& total = totals[bk * R + r];
            const __m512 by = _mm512_set1_ps(total.sum);
            const __mmask16 any = total.sum ? 0xffff : 0;
            __m512 dims[H / 16];
            for (int c = 0; c < H / 16; c++) dims[c] = _mm512_maskz_div_ps(any, _mm512_load_ps(total.out + 16 * c), by);
            for (int c = 0; c < H / 16; c += 4) store_in_order<E>(dims + c, out + (bk * R + r) * H + 16 * c);
        }
        if (!mass) return;
        float* shares = mass + bk * (M / PAGE);
        memset(shares, 0, M / PAGE * sizeof(float));
        for (int64_t t = 0; t < n_tiles; t++)
            for (int64_t r = 0; r < R; r++) {
                const int64_t n = (bk * n_tiles + t) * R + r;
                if (page_max[n] == LOWEST) continue; // nothing seen here
                const Total<H>& total = totals[bk * R + r];
                const float share = exp2f((page_max[n] - total.max) * all[row_of(bk / K, bk % K, 0) + r].to_log2) / total.sum;
                for (int p = 0; p < V && t * V + p < M / PAGE; p++) shares[t * V + p] += page_sum[n * V + p] * share;
            }
    };

    struct Parts { int64_t b, head, part, block; };
    auto parts_of = [&](int64_t task) {
        const int64_t b = std::upper_bound(first_task, first_task + B, task) - first_task - 1, n_parts = (starts[b + 1] - starts[b] + each - 1) / each, number = task - first_task[b];
        return Parts{b, number / n_blocks / n_parts, number / n_blocks % n_parts, number % n_blocks};
    };
    std::atomic<int64_t> n_taken{0}; // tasks: a thread takes its next one when it reads the last tile of one, whose first tile it asks for then
#pragma omp parallel num_threads(threads)
    {
    begin_tiles();
    int64_t upcoming = -1; // the next task, -1: not known
    for (int64_t task = n_taken++; task < first_task[B]; task = upcoming < 0 ? n_taken++ : upcoming, upcoming = -1) {
        const auto [b, head, part, block] = parts_of(task);
        const int64_t own = starts[b + 1] - starts[b], bk = b * K + head;
        const int64_t from = block * n_rows, here = std::min(n_rows, R - from), begin_of_part = part * each, end_of_part = std::min(own, begin_of_part + each);
        const E *keys = k + b * kv_b + head * kv_k, *values = v + b * kv_b + head * kv_k;
        const fp16 *key_scales = k_scale + b * scale_b + head * scale_k, *value_scales = v_scale + b * scale_b + head * scale_k; // of bytes
        const uint8_t *lower_keys = k_low + b * kv_b + head * kv_k, *lower_values = v_low + b * kv_b + head * kv_k; // of planes
        const int64_t whole_from = tail && T ? pos[b * T] - tail + 1 : 0; // entries before are read of the upper plane alone
        auto limit = [&](int64_t r) { // of a row: the last position it may see
            const int64_t place = pos[b * T + r % T];
            return place < M || index ? std::min(place, INT64_MAX - 1) : -1;
        };
        int64_t n_keys = 0;
        for (int64_t r = from; r < from + here; r++) n_keys = std::max(n_keys, limit(r) + 1);
        n_keys = index ? M : std::min(n_keys, M);
        for (int64_t r = from; r < from + here && !shared; r++) totals[bk * R + r] = {};
        for (int64_t split = begin_of_part; split < end_of_part; split++) {
        Row<E, H, NQ>* rows = all + row_of(b, head, split) + from;
        for (int64_t r = 0; r < here; r++) {
            const int64_t g = (from + r) / T, t = (from + r) % T;
            if (shared || split == begin_of_part) rows[r].to_log2 = to_log2 * load_query(q + b * q_b + (head * G + g) * q_n + t * q_t, rows[r]);
            memset(rows[r].out, 0, sizeof rows[r].out);
            memset(rows[r].sum, 0, sizeof rows[r].sum);
            memset(rows[r].halves, 0, sizeof rows[r].halves);
            rows[r].max = LOWEST, rows[r].limit = limit(from + r);
        }
        if (split && split * SPLIT >= n_keys) continue; // of shorter rows than others
        Rows<E, H, NQ> reading(rows, here, mass);
        Gathered<E, H>& at = reading.at;
        const int64_t end = std::min(n_keys, (split + 1) * SPLIT), end_of_reading = std::min(n_keys, end_of_part * SPLIT);
        for (int64_t start = split * SPLIT; start < end; start += TILE) {
            const int parity = start / TILE % 2;
            int64_t* position = at.position[parity];
            E *gathered_key = at.gathered_key[parity], *gathered_value = at.gathered_value[parity];
            float *key_scale = at.key_scale[parity], *value_scale = at.value_scale[parity];
            Tile<E> tile{{}, {}, key_scale, value_scale, nullptr, index ? position : nullptr, start, -1, (int)std::min<int64_t>(TILE, n_keys - start), false};
            float* upper = at.upper[parity];
            if (k_low && tail) memset(upper, 0, sizeof at.upper[parity]);
            auto join_entries = [&](auto n, int64_t place, int j) { // as many entries of planes, all of one kind
                if constexpr (BYTES<E>) {
                    constexpr int N = decltype(n)::value;
                    const int ahead = index ? 0 : 2 * TILE * (H / 2);
                    const int64_t from = place * (H / 2);
                    const uint8_t *key = (const uint8_t*)keys + from, *value = (const uint8_t*)values + from;
                    if (place >= whole_from) {
                        join_planes<H, true, N>(key, lower_keys + from, gathered_key + j * H, ahead);
                        join_planes<H, true, N>(value, lower_values + from, gathered_value + j * H, ahead);
                    } else {
                        join_planes<H, false, N>(key, key, gathered_key + j * H, ahead);
                        join_planes<H, false, N>(value, value, gathered_value + j * H, ahead);
                        std::fill_n(upper + j, N, 1.f);
                        tile.upper = upper;
                    }
                }
            };
            constexpr std::integral_constant<int, 1> ONE{};
            constexpr std::integral_constant<int, 16> ALL{};
            if (!index) tile.last = start + tile.n - 1;
            for (int64_t j = TILE; index && j < std::min<int64_t>(2 * TILE, M - start); j++) { // the next tile's entries, wherever they are
                const int64_t place = std::min(std::max<int64_t>(index[bk * M + start + j], 0), S - 1);
                if (k_low) { // half a head is at most a line
                    const int64_t from = place * (H / 2);
                    _mm_prefetch((const char*)keys + from, _MM_HINT_T0);
                    _mm_prefetch((const char*)values + from, _MM_HINT_T0);
                    if (place < whole_from) continue;
                    _mm_prefetch((const char*)lower_keys + from, _MM_HINT_T0);
                    _mm_prefetch((const char*)lower_values + from, _MM_HINT_T0);
                    continue;
                }
                for (int h = 0; h < H; h += IN_LINE<E>) {
                    _mm_prefetch((const char*)(keys + place * H + h), _MM_HINT_T1);
                    _mm_prefetch((const char*)(values + place * H + h), _MM_HINT_T1);
                }
            }
            for (int c = 0; c < TILE; c += 16) { // in place if 16 are consecutive, else gathered
                const int64_t* listed = index ? index + bk * M + start + c : nullptr;
                const int64_t first = listed && c < tile.n ? listed[0] : start + c;
                bool consecutive = first >= 0 && first + 16 <= S && (!listed || c + 16 <= tile.n);
                for (int j = 0; j < 16 && listed && c + j < tile.n; j++) {
                    consecutive &= listed[j] == first + j;
                    position[c + j] = listed[j] < 0 ? INT64_MAX : listed[j];
                    tile.last = std::max(tile.last, listed[j]);
                    tile.gaps |= listed[j] < 0;
                }
                tile.key[c / 16] = consecutive && !k_low ? keys + first * H : gathered_key + c * H;
                tile.value[c / 16] = consecutive && !k_low ? values + first * H : gathered_value + c * H;
                const bool uniform = consecutive && (first >= whole_from || first + 15 < whole_from);
                if (k_low && uniform) join_entries(ALL, first, c);
                for (int j = c; j < c + 16 && k_low && consecutive && !uniform; j++) join_entries(ONE, first + j - c, j);
                for (int j = c; j < std::min(c + 16, tile.n) && !consecutive; j++) {
                    const int64_t name = listed ? listed[j - c] : start + j, place = std::min(std::max<int64_t>(name, 0), S - 1);
                    if (k_low) {
                        join_entries(ONE, place, j);
                    } else {
                        memcpy(gathered_key + j * H, keys + place * H, sizeof(E) * H);
                        if (name < 0) memset(gathered_value + j * H, 0, sizeof(E) * H);
                        else memcpy(gathered_value + j * H, values + place * H, sizeof(E) * H);
                    }
                    if constexpr (BYTES<E>) key_scale[j] = _cvtsh_ss(key_scales[place]), value_scale[j] = _cvtsh_ss(value_scales[place]);
                }
                if constexpr (BYTES<E>)
                    if (consecutive) {
                        _mm512_store_ps(key_scale + c, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(key_scales + first))));
                        _mm512_store_ps(value_scale + c, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(value_scales + first))));
                    }
                if constexpr (BYTES<E>) tile.nan_scales |= (uint64_t)_mm512_cmp_ps_mask(_mm512_load_ps(key_scale + c), _mm512_load_ps(value_scale + c), _CMP_UNORD_Q) << c;
            }
            const int64_t n = (bk * n_tiles + start / TILE) * R;
            const E *next_key = nullptr, *next_value = nullptr;
            if (!index && !k_low && start + 2 * TILE <= end_of_reading) {
                next_key = tile.key[0] + TILE * H, next_value = tile.value[0] + TILE * H;
            } else if (!index && !k_low && start + TILE >= end_of_reading && upcoming < 0) {
                upcoming = n_taken++;
                if (upcoming < first_task[B]) {
                    const Parts next = parts_of(upcoming);
                    const int64_t place = next.part * each * SPLIT;
                    if (place + TILE <= S) next_key = k + next.b * kv_b + next.head * kv_k + place * H, next_value = v + next.b * kv_b + next.head * kv_k + place * H;
                }
            }
            reading.read(tile, parity, mass ? page_sum + n * V : nullptr, mass ? page_max + n : nullptr, next_key, next_value);
        }
        reading.finish();
        for (int64_t r = 0; r < here && !shared; r++) add_split(totals[bk * R + from + r], rows[r]);
        }
        if (!shared) write_results(bk, from, here);
    }
    end_tiles();
    }

    if (shared)
#pragma omp parallel for num_threads(threads)
        for (int64_t n = 0; n < B * K * n_blocks; n++) {
            const int64_t bk = n / n_blocks, b = bk / K, from = n % n_blocks * n_rows, here = std::min(n_rows, R - from);
            for (int64_t r = from; r < from + here; r++) {
                totals[bk * R + r] = {};
                for (int64_t split = 0; split < starts[b + 1] - starts[b]; split++) add_split(totals[bk * R + r], all[row_of(b, bk % K, split) + r]);
            }
            write_results(bk, from, here);
        }
}

}

// q [B, K * G, T, H] with strides (q_b, q_n, q_t); k, v [B, K, S, H] with strides (kv_b, kv_k), bf16, or int8 where there
// are scales [B, K, S] with strides (scale_b, scale_k); k_low, v_low null or the lower planes, of which k, v are the upper
// ones then, [B, K, S, H / 2] with their strides, where entries before pos[b, 0] - tail + 1 are read of the upper plane
// alone, with a tail of 0 none; fine: whether queries over int8 have two bytes a number; pos [B, T]; index null or [B, K, M], -1 is nothing
// -> out [B, K * G, T, H]; mass null or [B, K, M / 16], the attention that each 16 keys received, all rows of a kv head
// together. A query at or past M sees nothing: its output is 0, and it costs no reading.
// H is HEAD_DIM, 64 or 128: every head dim is a library of its own, as one takes seconds to build.
extern "C" void attend_cpu(const bf16* q, const void* k, const void* v, const fp16* k_scale, const fp16* v_scale, const uint8_t* k_low, const uint8_t* v_low,
                           const int64_t* pos, const int64_t* index, bf16* out, float* mass, int64_t B, int64_t K, int64_t G, int64_t T, int64_t M, int64_t S, int64_t q_b, int64_t q_n,
                           int64_t q_t, int64_t kv_b, int64_t kv_k, int64_t scale_b, int64_t scale_k, int64_t tail, int64_t fine, float scale, int threads) {
    auto by = [&](auto e, auto nq) {
        typedef decltype(e) E;
        attend<E, HEAD_DIM, decltype(nq)::value>(q, (const E*)k, (const E*)v, k_scale, v_scale, k_low, v_low, pos, index, out, mass, B, K, G, T, M, S, q_b, q_n, q_t, kv_b, kv_k, scale_b, scale_k, tail, scale, threads);
    };
    if (!k_scale) by(bf16{}, std::integral_constant<int, 1>{});
    else if (fine) by(int8_t{}, std::integral_constant<int, 2>{});
    else by(int8_t{}, std::integral_constant<int, 1>{});
}
