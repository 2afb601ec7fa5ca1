// Attention of a few query rows over bf16 keys, on a CPU with AVX-512 bf16 dot products, by AMX tiles where it has them.
//
// Flash-decoding (Dao et al. 2023): the keys of a row are cut into splits at absolute positions, each split is read once
// with a running softmax, and the splits are merged. Sums never depend on what else is in the batch, on the number of
// queries or on how much of the cache is in view.
//
// A tile is 64 keys. With AMX, products take up to 16 rows at once, keys as they lie in the cache, and the softmax has a
// row in every lane. Without, scores lie with a key in every lane, so the tile is transposed once and each query then
// costs dot products alone, no horizontal sum; rows are taken up to six at a time, which is what the registers hold.
//
// Names: B batch, K kv heads, G query heads a kv head, T queries a head, R = G * T rows of one kv head, H head dim,
// S capacity, M keys in view or entries listed.
#include <immintrin.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef uint16_t bf16;
namespace { // a process may hold this built in two ways, whose names must not meet
constexpr int TILE = 64, PAGE = 16, SPLIT = 4096;
constexpr float LOWEST = -1e30f; // finite, so that the difference of two is no NaN

// 2^x for x <= 0, relative error below 3e-6; what would be smaller than 2^-126 is next to it. The weights are rounded to
// bf16 afterwards.
static inline __m512 exp2_of(__m512 x) {
    const __m512 magic = _mm512_set1_ps(12582912.f); // 1.5 * 2^23: adding it rounds to whole numbers
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.f));
    __m512 shifted = _mm512_add_ps(x, magic), f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic)); // -0.5 .. 0.5
    __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(9.6725e-3f), _mm512_set1_ps(5.5504e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022152e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314719e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.f));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

// 16 rows of 16 dwords, `stride` dwords apart -> 16 vectors, the i-th with dword i of every row, `apart` vectors apart.
static inline void transpose(const uint32_t* from, int stride, __m512i* to, int apart) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * stride);
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
        to[i * apart] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        to[(i + 4) * apart] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        to[(i + 8) * apart] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
        to[(i + 12) * apart] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
    }
}

// One query row of a split: where the softmax stands. out has its dims in the order of `interleaved`.
template <int H> struct Row {
    alignas(64) uint32_t q[H / 2]; // pairs of dims
    alignas(64) float out[H], sum[16]; // sum: by lanes
    float max;
    int64_t limit; // last position it may see
};

// Dim of lane i of vector c of a pair of value rows after unpacklo (even c) and unpackhi (odd c) of their 32-dim halves.
static inline int interleaved(int c, int i) { return c / 2 * 32 + i / 4 * 8 + c % 2 * 4 + i % 4; }

// The keys and values of one tile, each 16 one after the other; position is null for first, first + 1, ...
struct Tile {
    const bf16 *key[TILE / 16], *value[TILE / 16];
    const int64_t* position; // INT64_MAX: does not exist
    int64_t first, last; // last: the largest position of those that exist
    int n; // entries from n on do not exist
    bool gaps; // whether any before n does not
};

// The values of a tile by pairs of keys; what does not exist counts as 0, whatever it holds.
template <int H> static inline void pair_values(const Tile& tile, __m512i (*to)[H / 16], int64_t ahead) {
    for (int j = 0; j < TILE; j += 2) {
        const bf16* value = tile.value[j / 16] + j % 16 * H;
        if (ahead)
            for (int h = 0; h < 2 * H; h += 32) _mm_prefetch((const char*)(value + TILE * H + h), _MM_HINT_T0);
#pragma GCC unroll 4
        for (int c = 0; c < H / 32; c++) {
            const __m512i none = _mm512_setzero_si512();
            const __m512i even = j < tile.n ? _mm512_loadu_si512(value + 32 * c) : none;
            const __m512i odd = j + 1 < tile.n ? _mm512_loadu_si512(value + H + 32 * c) : none;
            to[j / 2][2 * c] = _mm512_unpacklo_epi16(even, odd);
            to[j / 2][2 * c + 1] = _mm512_unpackhi_epi16(even, odd);
        }
    }
}

#ifdef __AMX_BF16__
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static void begin() { static thread_local TileConfig config; _tile_loadconfig(&config); }
static void end() { _tile_release(); }
static inline void written() { asm volatile("" ::: "memory"); } // before tiles are loaded, which compilers do not see

template <int H> struct Scratch {
    __m512 score[TILE]; // of a key, a row in every lane
    __m512i weight[TILE / 2], weight_of[2][16]; // pairs of keys: a row in every lane; of a row, 16 pairs and 16 more
    __m512i value[TILE / 2][H / 16]; // pairs of keys
    alignas(64) bf16 picked_key[TILE * H], picked_value[TILE * H];
    int64_t position[TILE];
};

// Up to 16 query rows of a split and where their softmax stands, a row in every lane.
template <int H> struct Group {
    alignas(64) uint32_t q[H / 2][16]; // pairs of dims
    alignas(64) float out[16][H], max[16], sum[16];
    alignas(64) int32_t limit[16];
    int32_t least; // of the limits
};

template <int H> static void read_group(const Tile& tile, Scratch<H>& at, Group<H>& group, int n_rows, float to_log2, float* page_sum, float* page_max) {
    constexpr int V = TILE / 16;
    written();
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int d = 0; d < H / 32; d++) { // a key's product with all rows
        _tile_loadd(4, group.q[16 * d], 64);
        _tile_loadd(5, tile.key[0] + 32 * d, 2 * H);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, tile.key[1] + 32 * d, 2 * H);
        _tile_dpbf16ps(1, 6, 4);
        _tile_loadd(5, tile.key[2] + 32 * d, 2 * H);
        _tile_dpbf16ps(2, 5, 4);
        _tile_loadd(6, tile.key[3] + 32 * d, 2 * H);
        _tile_dpbf16ps(3, 6, 4);
    }
    _tile_stored(0, at.score, 64); _tile_stored(1, at.score + 16, 64);
    _tile_stored(2, at.score + 32, 64); _tile_stored(3, at.score + 48, 64);

    if (tile.n < TILE || tile.gaps || tile.last > group.least) {
        const __m512i limit = _mm512_load_si512(group.limit);
        for (int j = 0; j < TILE; j++) {
            const int64_t place = j >= tile.n ? INT32_MAX : tile.position ? std::min<int64_t>(tile.position[j], INT32_MAX) : tile.first + j;
            const __mmask16 seen = _mm512_cmple_epi32_mask(_mm512_set1_epi32(place), limit);
            at.score[j] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(LOWEST), at.score[j]);
        }
    }
    __m512 best[V] = {at.score[0], at.score[16], at.score[32], at.score[48]};
    for (int j = 1; j < 16; j++)
#pragma GCC unroll 4
        for (int c = 0; c < V; c++) best[c] = _mm512_max_ps(best[c], at.score[16 * c + j]);
    const __m512 before = _mm512_load_ps(group.max), scale = _mm512_set1_ps(to_log2);
    const __m512 top = _mm512_max_ps(before, _mm512_max_ps(_mm512_max_ps(best[0], best[1]), _mm512_max_ps(best[2], best[3])));
    const __mmask16 grown = _mm512_cmp_ps_mask(before, top, _CMP_NEQ_UQ);
    alignas(64) float by[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}; // what was summed so far shrinks
    for (int r = 0; grown >> r; r++)
        if (grown >> r & 1) by[r] = exp2f((group.max[r] - ((float*)&top)[r]) * to_log2);
    const __m512 shrink = _mm512_load_ps(by);
    const __m512 shift = _mm512_mul_ps(top, _mm512_set1_ps(-to_log2));
    const __m512i both = _mm512_set_epi16( // the first vector's lanes beside the second's
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512 sum[V];
    for (int c = 0; c < V; c++) {
        sum[c] = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int j = 16 * c; j < 16 * c + 16; j += 2) {
            const __m512 even = exp2_of(_mm512_fmadd_ps(at.score[j], scale, shift)), odd = exp2_of(_mm512_fmadd_ps(at.score[j + 1], scale, shift));
            sum[c] = _mm512_add_ps(sum[c], _mm512_add_ps(even, odd));
            at.weight[j / 2] = _mm512_permutexvar_epi16(both, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
        }
    }
    _mm512_store_ps(group.max, top);
    _mm512_store_ps(group.sum, _mm512_fmadd_ps(_mm512_load_ps(group.sum), shrink, _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]))));
    if (page_sum)
        for (int r = 0; r < n_rows; r++) {
            for (int c = 0; c < V; c++) page_sum[r * V + c] = ((float*)&sum[c])[r];
            page_max[r] = group.max[r];
        }
    for (int r = 0; r < n_rows && grown; r++)
        for (int h = 0; h < H; h += 16) _mm512_store_ps(group.out[r] + h, _mm512_mul_ps(_mm512_load_ps(group.out[r] + h), _mm512_set1_ps(by[r])));
    for (int half = 0; half < 2; half++) transpose((const uint32_t*)(at.weight + 16 * half), 16, at.weight_of[half], 1);
    written();
    for (int c = 0; c < H / 16; c += 4) {
        float* out = group.out[0] + 16 * c;
        _tile_loadd(0, out, 4 * H); _tile_loadd(1, out + 16, 4 * H); _tile_loadd(2, out + 32, 4 * H); _tile_loadd(3, out + 48, 4 * H);
        for (int half = 0; half < 2; half++) {
            const __m512i* value = at.value[16 * half] + c;
            _tile_loadd(4, at.weight_of[half], 64);
            _tile_loadd(5, value, 4 * H);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, value + 1, 4 * H);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(5, value + 2, 4 * H);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, value + 3, 4 * H);
            _tile_dpbf16ps(3, 4, 6);
        }
        _tile_stored(0, out, 4 * H); _tile_stored(1, out + 16, 4 * H); _tile_stored(2, out + 32, 4 * H); _tile_stored(3, out + 48, 4 * H);
    }
}

// The rows of a split while its tiles are read.
template <int H> struct Rows {
    static Scratch<H>& scratch() { static thread_local Scratch<H> at; return at; }

    Rows(Row<H>* rows, int64_t n_rows) : rows(rows), n_rows(n_rows), at(scratch()) {
        static thread_local std::vector<Group<H>> kept;
        const int64_t n = (n_rows + 15) / 16;
        if ((int64_t)kept.size() < n) kept.resize(n);
        groups = kept.data();
        for (int64_t g = 0; g < n; g++) {
            Group<H>& group = groups[g];
            memset((void*)&group, 0, sizeof group);
            group.least = INT32_MAX;
            for (int r = 0; r < 16; r++) {
                group.max[r] = LOWEST, group.limit[r] = -1;
                if (16 * g + r >= n_rows) continue;
                const Row<H>& row = rows[16 * g + r];
                for (int h = 0; h < H / 2; h++) group.q[h][r] = row.q[h];
                group.limit[r] = std::clamp<int64_t>(row.limit, -1, INT32_MAX - 1);
                group.least = std::min(group.least, group.limit[r]);
            }
        }
    }
    void read(const Tile& tile, float to_log2, float* page_sum, float* page_max, int64_t ahead) {
        if (ahead) // the next tile, while this one is computed
            for (int c = 0; c < TILE / 16; c++)
                for (int h = 0; h < 16 * H; h += 32) _mm_prefetch((const char*)(tile.key[c] + TILE * H + h), _MM_HINT_T0);
        pair_values<H>(tile, at.value, ahead);
        for (int64_t r = 0; r < n_rows; r += 16)
            read_group<H>(tile, at, groups[r / 16], std::min<int64_t>(16, n_rows - r), to_log2, page_sum ? page_sum + r * (TILE / 16) : nullptr, page_sum ? page_max + r : nullptr);
    }
    void finish() {
        for (int64_t r = 0; r < n_rows; r++) {
            const Group<H>& group = groups[r / 16];
            memcpy(rows[r].out, group.out[r % 16], sizeof rows[r].out);
            rows[r].max = group.max[r % 16], rows[r].sum[0] = group.sum[r % 16];
        }
    }
    Row<H>* rows;
    int64_t n_rows;
    Scratch<H>& at;
    Group<H>* groups;
};
#else
static void begin() {}
static void end() {}

template <int H> struct Scratch {
    __m512i key[H / 2][TILE / 16]; // pairs of dims, a key in every lane
    __m512i value[TILE / 2][H / 16]; // pairs of keys
    alignas(64) uint32_t weight[6][TILE / 2]; // pairs of keys
    alignas(64) bf16 picked_key[TILE * H], picked_value[TILE * H];
    int64_t position[TILE];
};

template <int H, int N> static void read_rows(const Tile& tile, Scratch<H>& at, Row<H>* rows, float to_log2, float* page_sum, float* page_max) {
    constexpr int C = H / 16, V = TILE / 16;
    __m512 score[N][V];
#pragma GCC unroll 6
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int c = 0; c < V; c++) score[r][c] = _mm512_setzero_ps();
    for (int h = 0; h < H / 2; h++)
#pragma GCC unroll 6
        for (int r = 0; r < N; r++) {
            const __m512bh q = (__m512bh)_mm512_set1_epi32(rows[r].q[h]);
#pragma GCC unroll 4
            for (int c = 0; c < V; c++) score[r][c] = _mm512_dpbf16_ps(score[r][c], (__m512bh)at.key[h][c], q);
        }
    float shrink[N];
#pragma GCC unroll 6
    for (int r = 0; r < N; r++) {
        Row<H>& row = rows[r];
        if (tile.n < TILE || tile.gaps || tile.last > row.limit)
            for (int c = 0; c < V; c++) {
                unsigned seen = 0;
                for (int i = 0; i < 16; i++) {
                    const int j = 16 * c + i;
                    seen |= unsigned(j < tile.n && (tile.position ? tile.position[j] : tile.first + j) <= row.limit) << i;
                }
                score[r][c] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(LOWEST), score[r][c]);
            }
        __m512 best = _mm512_max_ps(_mm512_max_ps(score[r][0], score[r][1]), _mm512_max_ps(score[r][2], score[r][3]));
        const float top = std::max(row.max, _mm512_reduce_max_ps(best));
        shrink[r] = top == row.max ? 1.f : exp2f((row.max - top) * to_log2);
        row.max = top;
        const __m512 scale = _mm512_set1_ps(to_log2), shift = _mm512_set1_ps(-top * to_log2);
        __m512 w[V];
#pragma GCC unroll 4
        for (int c = 0; c < V; c++) w[c] = exp2_of(_mm512_fmadd_ps(score[r][c], scale, shift));
        const __m512 sum = _mm512_add_ps(_mm512_add_ps(w[0], w[1]), _mm512_add_ps(w[2], w[3]));
        _mm512_store_ps(row.sum, _mm512_fmadd_ps(_mm512_load_ps(row.sum), _mm512_set1_ps(shrink[r]), sum));
        _mm512_store_si512(at.weight[r], (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]));
        _mm512_store_si512(at.weight[r] + 16, (__m512i)_mm512_cvtne2ps_pbh(w[3], w[2]));
        if (page_sum) { // the four sums of 16 lanes each
            __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(w[0], w[1]), _mm512_unpackhi_ps(w[0], w[1]));
            __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(w[2], w[3]), _mm512_unpackhi_ps(w[2], w[3]));
            __m512d lo = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), hi = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
            __m512 all = _mm512_add_ps((__m512)lo, (__m512)hi);
            __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
            _mm_storeu_ps(page_sum + r * V, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
            page_max[r] = top;
        }
    }
    constexpr int STEP = H == 64 ? N : N > 2 ? N / 2 : N; // rows whose outputs fit the registers
    static_assert(N % STEP == 0);
    for (int from = 0; from < N; from += STEP) {
        __m512 out[STEP][C];
#pragma GCC unroll 6
        for (int r = 0; r < STEP; r++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) out[r][c] = _mm512_mul_ps(_mm512_load_ps(rows[from + r].out + 16 * c), _mm512_set1_ps(shrink[from + r]));
        for (int j = 0; j < TILE / 2; j++)
#pragma GCC unroll 6
            for (int r = 0; r < STEP; r++) {
                const __m512bh w = (__m512bh)_mm512_set1_epi32(at.weight[from + r][j]);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) out[r][c] = _mm512_dpbf16_ps(out[r][c], (__m512bh)at.value[j][c], w);
            }
#pragma GCC unroll 6
        for (int r = 0; r < STEP; r++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) _mm512_store_ps(rows[from + r].out + 16 * c, out[r][c]);
    }
}

template <int H> static void read_tile(const Tile& tile, Scratch<H>& at, Row<H>* rows, int64_t n_rows, float to_log2, float* page_sum, float* page_max, int64_t ahead) {
    constexpr int V = TILE / 16;
    for (int c = 0; c < V; c++) {
        if (ahead) // part of the next tile, while this one is computed
            for (int j = 0; j < 16; j++)
                for (int h = 0; h < H; h += 32) _mm_prefetch((const char*)(tile.key[c] + (TILE + j) * H + h), _MM_HINT_T0);
        for (int h = 0; h < H / 2; h += 16) transpose((const uint32_t*)tile.key[c] + h, H / 2, &at.key[h][c], V);
    }
    pair_values<H>(tile, at.value, ahead);
    int64_t r = 0;
    auto read = [&](auto n) {
        read_rows<H, decltype(n)::value>(tile, at, rows + r, to_log2, page_sum ? page_sum + r * V : nullptr, page_sum ? page_max + r : nullptr);
        r += n;
    };
    while (r + 6 <= n_rows && n_rows - r != 8) read(std::integral_constant<int, 6>{});
    while (r + 4 <= n_rows) read(std::integral_constant<int, 4>{});
    while (r + 2 <= n_rows) read(std::integral_constant<int, 2>{});
    while (r < n_rows) read(std::integral_constant<int, 1>{});
}

// The rows of a split while its tiles are read.
template <int H> struct Rows {
    static Scratch<H>& scratch() { static thread_local Scratch<H> at; return at; }

    Rows(Row<H>* rows, int64_t n_rows) : rows(rows), n_rows(n_rows), at(scratch()) {}
    void read(const Tile& tile, float to_log2, float* page_sum, float* page_max, int64_t ahead) { read_tile<H>(tile, at, rows, n_rows, to_log2, page_sum, page_max, ahead); }
    void finish() {}
    Row<H>* rows;
    int64_t n_rows;
    Scratch<H>& at;
};
#endif

template <int H>
static void attend(const bf16* q, const bf16* k, const bf16* v, const int64_t* pos, const int64_t* index, bf16* out, float* mass,
                   int64_t B, int64_t K, int64_t G, int64_t T, int64_t M, int64_t S, int64_t q_b, int64_t q_n, int64_t q_t,
                   int64_t kv_b, int64_t kv_k, float scale, int threads) {
    constexpr int V = TILE / PAGE;
    const float to_log2 = scale * 1.44269504f;
    const int64_t R = G * T;
    int64_t longest = index ? M : 0; // keys that some query sees, or entries listed
    for (int64_t i = 0; i < B * T && !index; i++) longest = std::max(longest, pos[i] < M ? pos[i] + 1 : 0);
    const int64_t n_splits = std::max<int64_t>(1, (longest + SPLIT - 1) / SPLIT), n_tiles = (longest + TILE - 1) / TILE;
    // kept between calls: fresh pages of memory would cost more than a small call
    static thread_local std::vector<Row<H>> kept_rows;
    static thread_local std::vector<float> kept_sums, kept_maxima;
    if ((int64_t)kept_rows.size() < B * K * n_splits * R) kept_rows.resize(B * K * n_splits * R);
    if (mass) {
        kept_sums.resize(B * K * n_tiles * R * V);
        kept_maxima.assign(B * K * n_tiles * R, LOWEST);
    }
    Row<H>* all = kept_rows.data(); // by address: each worker has thread_locals of its own
    float *page_sum = mass ? kept_sums.data() : nullptr, *page_max = mass ? kept_maxima.data() : nullptr;

    auto merge = [&](int64_t bk) { // the splits of one kv head of one row

        const Row<H>* splits = all + bk * n_splits * R;
        std::vector<float> top(R, LOWEST), total(R, 0.f);
        for (int64_t r = 0; r < R; r++) {
            float merged[H] = {};
            for (int64_t s = 0; s < n_splits; s++) top[r] = std::max(top[r], splits[s * R + r].max);
            for (int64_t s = 0; s < n_splits; s++) {
                const Row<H>& row = splits[s * R + r];
                if (row.max == LOWEST) continue; // nothing seen here
                const float share = exp2f((row.max - top[r]) * to_log2);
                total[r] += _mm512_reduce_add_ps(_mm512_load_ps(row.sum)) * share;
                for (int h = 0; h < H; h++) merged[h] += row.out[h] * share;
            }
            alignas(64) float ordered[H];
            for (int c = 0; c < H / 16; c++)
                for (int i = 0; i < 16; i++) ordered[interleaved(c, i)] = total[r] ? merged[16 * c + i] / total[r] : 0.f;
            for (int h = 0; h < H; h += 16) _mm256_storeu_si256((__m256i*)(out + (bk * R + r) * H + h), (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(ordered + h)));
        }
        if (!mass) return;
        float* shares = mass + bk * (M / PAGE);
        memset(shares, 0, M / PAGE * sizeof(float));
        for (int64_t t = 0; t < n_tiles; t++)
            for (int64_t r = 0; r < R; r++) {
                const int64_t n = (bk * n_tiles + t) * R + r;
                if (page_max[n] == LOWEST) continue; // nothing seen here
                const float share = exp2f((page_max[n] - top[r]) * to_log2) / total[r];
                for (int p = 0; p < V && t * V + p < M / PAGE; p++) shares[t * V + p] += page_sum[n * V + p] * share;
            }
    };

#pragma omp parallel num_threads(threads)
    {
    begin();
#pragma omp for schedule(dynamic) nowait
    for (int64_t task = 0; task < B * K * n_splits; task++) {
        const int64_t split = task % n_splits, bk = task / n_splits, head = bk % K, b = bk / K;
        const bf16 *keys = k + b * kv_b + head * kv_k, *values = v + b * kv_b + head * kv_k;
        Row<H>* rows = all + task * R;
        int64_t n_keys = 0;
        for (int64_t r = 0; r < R; r++) {
            const int64_t g = r / T, t = r % T;
            memcpy(rows[r].q, q + b * q_b + (head * G + g) * q_n + t * q_t, 2 * H);
            memset(rows[r].out, 0, sizeof rows[r].out);
            memset(rows[r].sum, 0, sizeof rows[r].sum);
            rows[r].max = LOWEST, rows[r].limit = pos[b * T + t] < M || index ? pos[b * T + t] : -1;
            n_keys = std::max(n_keys, rows[r].limit + 1);
        }
        n_keys = index ? M : std::min(n_keys, M);
        Rows<H> reading(rows, R);
        Scratch<H>& at = reading.at;
        const int64_t end = std::min(n_keys, (split + 1) * SPLIT);
        for (int64_t start = split * SPLIT; start < end; start += TILE) {
            Tile tile{{}, {}, index ? at.position : nullptr, start, -1, (int)std::min<int64_t>(TILE, n_keys - start), false};
            if (!index) tile.last = start + tile.n - 1;
            for (int64_t j = TILE; index && j < std::min<int64_t>(2 * TILE, M - start); j++) { // the next tile's, wherever they are
                const int64_t place = std::min(std::max<int64_t>(index[bk * M + start + j], 0), S - 1);
                for (int h = 0; h < H; h += 32) {
                    _mm_prefetch((const char*)(keys + place * H + h), _MM_HINT_T0);
                    _mm_prefetch((const char*)(values + place * H + h), _MM_HINT_T0);
                }
            }
            for (int c = 0; c < TILE; c += 16) { // where they are, if 16 lie together, else gathered
                const int64_t* named = index ? index + bk * M + start + c : nullptr;
                const int64_t first = named && c < tile.n ? named[0] : start + c;
                bool together = first >= 0 && first + 16 <= S && (!named || c + 16 <= tile.n);
                for (int j = 0; j < 16 && named && c + j < tile.n; j++) {
                    together &= named[j] == first + j;
                    at.position[c + j] = named[j] < 0 ? INT64_MAX : named[j];
                    tile.last = std::max(tile.last, named[j]);
                    tile.gaps |= named[j] < 0;
                }
                tile.key[c / 16] = together ? keys + first * H : at.picked_key + c * H;
                tile.value[c / 16] = together ? values + first * H : at.picked_value + c * H;
                for (int j = c; j < std::min(c + 16, tile.n) && !together; j++) {
                    const int64_t name = named ? named[j - c] : start + j, place = std::min(std::max<int64_t>(name, 0), S - 1);
                    memcpy(at.picked_key + j * H, keys + place * H, 2 * H);
                    if (name < 0) memset(at.picked_value + j * H, 0, 2 * H);
                    else memcpy(at.picked_value + j * H, values + place * H, 2 * H);
                }
            }
            const int64_t n = (bk * n_tiles + start / TILE) * R;
            reading.read(tile, to_log2, mass ? page_sum + n * V : nullptr, mass ? page_max + n : nullptr, !index && start + 2 * TILE <= end);
        }
        reading.finish();
        if (n_splits == 1) merge(bk);
    }
    end();
    }

    if (n_splits > 1)
#pragma omp parallel for num_threads(threads)
        for (int64_t bk = 0; bk < B * K; bk++) merge(bk);
}

}

// q [B, K * G, T, H] with strides (q_b, q_n, q_t); k, v [B, K, S, H] with strides (kv_b, kv_k); pos [B, T]; index null or
// [B, K, M], -1 is nothing -> out [B, K * G, T, H]; mass null or [B, K, M / 16], the attention that each 16 keys received,
// all rows of a kv head together. A query at or past M sees nothing: its output is 0, and it costs no reading.
// H is HEAD_DIM, 64 or 128: every head dim is a library of its own, as one takes seconds to build.
extern "C" void attend_cpu(const bf16* q, const bf16* k, const bf16* v, const int64_t* pos, const int64_t* index, bf16* out, float* mass,
                           int64_t B, int64_t K, int64_t G, int64_t T, int64_t M, int64_t S, int64_t q_b, int64_t q_n,
                           int64_t q_t, int64_t kv_b, int64_t kv_k, float scale, int threads) {
    attend<HEAD_DIM>(q, k, v, pos, index, out, mass, B, K, G, T, M, S, q_b, q_n, q_t, kv_b, kv_k, scale, threads);
}
