// y = x W' (+ bias) for any number of rows of a bf16 x, on a CPU with AMX tiles or AVX-512 dot products. W is bf16, and
// sums are fp32; or W is int8 with a scale for each output, each row of x is quantized to 15 bits first, which are two
// planes of int8, and sums of integers are exact; or W is int4, blocks of 32 inputs of an output with a scale and a
// minimum, and becomes bf16 on the way in: the products are then those of the bf16 W that it stands for, bit for bit.
// For few rows that takes longer than to read W, so there is another way: rows of x as 15 bits, integer sums of blocks.
// W is packed once: tiles of 16 outputs x 64 bytes, an output in every lane, 4 bytes of inputs adjacent (int4: see
// `expand`). If outputs are pairs of gate and up, SwiGLU may be applied to the sums before they are rounded.
//
// A row's result never depends on the number of rows or threads, down to the last bit: one thread sums each output over
// all inputs in order. Up to 32 rows read each weight once; the tiles do the operations of 16 rows in the time of one.
// With more rows the weights of 32 outputs stay in a cache while the rows pass by, and the next ones are prefetched, a
// few lines per step.
//
// Names: M rows, I inputs, O outputs, n lines: 64 bytes of inputs (int4: as bf16; by sums: as int8). O is a multiple of
// 32, I of 32, and of 64 where x is quantized.
#include "simd.hpp"

enum class Kind { BF16, INT8, INT4, SUMS }; // of weights; SUMS: int4, by integer sums of blocks
namespace {
constexpr int AHEAD = 8192; // bytes, for prefetches
constexpr int LINE = 64, TILE = 16 * LINE; // bytes: a tile is 16 outputs x a line of W, or 16 rows x a line of x
constexpr int NIBBLES = TILE / 4; // bytes: 16 outputs x 32 inputs of int4; a line holds their scales and minima

// x / (1 + e^-x), relative error of the exponential below 3e-6; NaN and the infinities as they are elsewhere
static inline __m512 silu(__m512 x) {
    __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
    power = _mm512_max_ps(_mm512_set1_ps(-150.f), _mm512_min_ps(_mm512_set1_ps(150.f), power)); // NaN: the second one
    const __m512 whole = _mm512_roundscale_ps(power, 0), f = _mm512_sub_ps(power, whole); // -0.5 .. 0.5
    __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(9.6725e-3f), _mm512_set1_ps(5.5504e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022152e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314719e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.f));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.f), _mm512_scalef_ps(y, whole)));
}

static inline __m512 widen(const bf16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

// 128 times the integer sums of the upper plane plus those of the lower one.
static inline __m512 join_sums(const float* sums) {
    const __m512 upper = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums));
    const __m512 lower = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + 16 * 32));
    return _mm512_fmadd_ps(upper, _mm512_set1_ps(128.f), lower);
}

// Expand 16 outputs x 32 inputs of int4 to bf16 [16, 32]. 16 bits hold one input of outputs 4 a to 4 a + 3: [4, 32];
// blocks: fp16 scales [16] and minima [16]. An output's 16 possible values are a table; the bits of a word above
// the lowest five do not select.
static inline void expand(const char* int4, const char* blocks, char* to) {
    alignas(64) float scale[16], minimum[16];
    _mm512_store_ps(scale, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)blocks)));
    _mm512_store_ps(minimum, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(blocks + 32))));
    asm volatile("" ::"r"(scale), "r"(minimum) : "memory"); // broadcast from memory: ports that permute are busy
    const __m512 steps = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
    for (int a = 0; a < 4; a++) {
        const __m512i four = _mm512_loadu_si512(int4 + LINE * a);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const __m512 of_output = _mm512_set1_ps(scale[4 * a + j]), lowest = _mm512_set1_ps(minimum[4 * a + j]);
            const __m512 values = _mm512_fmadd_ps(steps, of_output, lowest);
            const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(values, values);
            const __m512i expanded = _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 4 * j), table);
            _mm512_store_si512(to + LINE * (4 * a + j), expanded);
        }
    }
}

// The operands, and where the results go.
struct Product {
    const char *x, *w; // x: the rows that are loaded in place, `apart` of them
    const char* blocks; // int4: scales and minima
    const float* w_scale; // int8 and int4: [O]
    const bf16* bias; // null or [O]
    bf16* y; // [M, O], gated [M, O / 2]
    int64_t M, n, O, x_row; // x_row: bytes
    bool gated; // outputs 2 j and 2 j + 1 are gate and up
    int64_t apart;
    char* tiles; // rows of x from `apart` on, by 16, by planes and then by lines; zeros follow the last one
    float* x_scale; // int8: [M]
    int32_t* offset; // int8 without tiles: [M, 2], the initial values of a row's sums in both planes
    float* totals; // int4 by sums: [M, I / 32], the sums of x in each block

    // n_rows of sums [n_rows, 32] from row m and output o on; int8: the lower plane's follow the upper one's 16 rows
    template <Kind K> void store_outputs(const float* sums, int64_t m, int64_t n_rows, int64_t o) const {
        const __m512 zero = _mm512_setzero_ps();
        const __m512 low = bias ? widen(bias + o) : zero, high = bias ? widen(bias + o + 16) : zero;
        const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        for (int64_t r = 0; r < n_rows; r++) {
            __m512 a = _mm512_loadu_ps(sums + 32 * r), b = _mm512_loadu_ps(sums + 32 * r + 16);
            if (K == Kind::INT4) {
                a = _mm512_mul_ps(a, _mm512_loadu_ps(w_scale + o));
                b = _mm512_mul_ps(b, _mm512_loadu_ps(w_scale + o + 16));
            }
            if (K == Kind::INT8) a = join_sums(sums + 32 * r), b = join_sums(sums + 32 * r + 16);
            if (K == Kind::INT8 || K == Kind::SUMS) {
                const __m512 scale = _mm512_set1_ps(x_scale[m + r]);
                a = _mm512_mul_ps(a, _mm512_mul_ps(scale, _mm512_loadu_ps(w_scale + o)));
                b = _mm512_mul_ps(b, _mm512_mul_ps(scale, _mm512_loadu_ps(w_scale + o + 16)));
            }
            a = _mm512_add_ps(a, low), b = _mm512_add_ps(b, high);
            if (gated) {
                const __m512 gate = _mm512_permutex2var_ps(a, even, b), up = _mm512_permutex2var_ps(a, odd, b);
                const __m256bh out = _mm512_cvtneps_pbh(_mm512_mul_ps(silu(gate), up));
                _mm256_storeu_si256((__m256i*)(y + ((m + r) * O + o) / 2), (__m256i)out);
            } else _mm512_storeu_si512(y + (m + r) * O + o, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
    }
};

// int4 weights of 32 outputs, and a buffer for them as bf16: some lines, whose number is a power of two, or all n.
struct Expanded {
    const char *w, *blocks;
    char* buffer;
    int64_t mask; // of the number of a line

    char* line(int64_t i) const { return buffer + 2 * (i & mask) * TILE; }
    void fill(int64_t i) const {
        const char *from = w + 2 * i * NIBBLES, *scales = blocks + 2 * i * LINE;
#pragma GCC unroll 8
        for (int64_t part = 0; part < 2 * NIBBLES; part += LINE) _mm_prefetch(from + AHEAD + part, _MM_HINT_T0);
        _mm_prefetch(scales + AHEAD / 4, _MM_HINT_T0), _mm_prefetch(scales + AHEAD / 4 + LINE, _MM_HINT_T0);
        expand(from, scales, line(i));
        expand(from + NIBBLES, scales + LINE, line(i) + TILE);
        asm volatile("" ::: "memory"); // the compiler does not see that tiles are loaded
    }
};

// Multiply N rows with 16 outputs by sums. x: rows of 64 bytes, the planes `plane` words apart. An output's lane has
// the numbers of four inputs, and of the four that are 16 further on, in each of a block's four lines.
template <int N>
static inline void multiply_by_sums(const int* x, int64_t plane, const float* totals, int64_t n_blocks, const char* w,
                                    const char* blocks, float* sums) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512 out[N];
#pragma GCC unroll 8
    for (int r = 0; r < N; r++) out[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < n_blocks; g++, w += NIBBLES, blocks += LINE) {
        __m512i sum[N][2];
#pragma GCC unroll 8
        for (int r = 0; r < N; r++) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
        const int* x_block = x + g / 2 * TILE / 4 + g % 2 * 8;
        _mm_prefetch(blocks + AHEAD / 4, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            _mm_prefetch(w + AHEAD + LINE * c, _MM_HINT_T0);
            const __m512i nibbles = _mm512_loadu_si512(w + LINE * c);
            const __m512i first = _mm512_and_si512(nibbles, low);
            const __m512i second = _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), low);
#pragma GCC unroll 8
            for (int r = 0; r < N; r++)
                for (int k = 0; k < 2; k++) {
                    const int* four = x_block + k * plane + 16 * r + c;
                    sum[r][k] = _mm512_dpbusd_epi32(sum[r][k], first, _mm512_set1_epi32(four[0]));
                    sum[r][k] = _mm512_dpbusd_epi32(sum[r][k], second, _mm512_set1_epi32(four[4]));
                }
        }
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)blocks));
        const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(blocks + 32)));
#pragma GCC unroll 8
        for (int r = 0; r < N; r++) {
            const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(sum[r][0], 7), sum[r][1]); // below 2^23
            const __m512 scaled = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, out[r]);
            out[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(totals[r * n_blocks + g]), scaled);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < N; r++) _mm512_storeu_ps(sums + 32 * r, out[r]);
}

constexpr int ROWS_BY_SUMS = 8;
static void rows_by_sums(const Product& p, int64_t m, int64_t o, float* sums) {
    const int64_t n_rows = std::min<int64_t>(ROWS_BY_SUMS, p.M - m), n_blocks = 2 * p.n;
    const int* x = (const int*)(p.tiles + m / 16 * 2 * p.n * TILE) + m % 16 * 16;
    for (int64_t half = 0; half < 2; half++) { // of 32 outputs
        const char* w = p.w + (o / 16 + half) * n_blocks * NIBBLES;
        const char* blocks = p.blocks + (o / 16 + half) * n_blocks * LINE;
        const auto multiply = n_rows == 1 ? multiply_by_sums<1> : n_rows == 2 ? multiply_by_sums<2>
                            : n_rows <= 4 ? multiply_by_sums<4> : multiply_by_sums<8>;
        multiply(x, p.n * TILE / 4, p.totals + m * n_blocks, n_blocks, w, blocks, sums + 16 * half);
    }
    p.store_outputs<Kind::SUMS>(sums, m, n_rows, o);
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 16 rows of x: their address, the stride of a row, and that of a line.
struct Sixteen {
    const char* at;
    int64_t bytes, step;
};

// int4: outputs are the rows of tiles, and rows of x the lanes
#define MULTIPLY(sum, x, w) \
    if (K == Kind::INT8) _tile_dpbssd(sum, x, w); \
    else if (K == Kind::INT4) _tile_dpbf16ps(sum, w, x); \
    else _tile_dpbf16ps(sum, x, w)
// Multiply 16 * A rows with 32 outputs, whose tiles w are; `lines` of what `ahead` points to are prefetched per step.
// int4: weights are in `int4`, of which lines are expanded here if `fills`.
template <Kind K, int A>
static inline void multiply_block(const Sixteen* x, const char* w, int64_t n, float* sums, const char* ahead, int lines,
                                  const Expanded& int4, bool fills) {
    constexpr int SOON = 2; // steps from expanding a line to multiplying it, while it reaches the cache
    _tile_zero(0); _tile_zero(1);
    if (A == 2) { _tile_zero(2); _tile_zero(3); }
    if (K == Kind::INT4 && fills)
        for (int64_t i = 0; i < std::min<int64_t>(SOON, n); i++) int4.fill(i);
    for (int64_t i = 0; i < n; i++) {
        if (K == Kind::INT4) {
            if (fills && i + SOON < n) int4.fill(i + SOON);
        } else if (lines == 32)
#pragma GCC unroll 32
            for (int line = 0; line < 32; line++) _mm_prefetch(ahead + LINE * (32 * i + line), _MM_HINT_T0);
        else
            for (int line = 0; line < lines; line++) _mm_prefetch(ahead + LINE * (lines * i + line), _MM_HINT_T1);
        const char* tiles = K == Kind::INT4 ? int4.line(i) : w + 2 * i * TILE;
        _tile_loadd(6, tiles, LINE);
        _tile_loadd(7, tiles + TILE, LINE);
        _tile_loadd(4, x[0].at + i * x[0].step, x[0].bytes);
        MULTIPLY(0, 4, 6);
        MULTIPLY(1, 4, 7);
        if (A == 2) {
            _tile_loadd(5, x[1].at + i * x[1].step, x[1].bytes);
            MULTIPLY(2, 5, 6);
            MULTIPLY(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128); _tile_stored(1, sums + 16, 128);
    if (A == 2) { _tile_stored(2, sums + 16 * 32, 128); _tile_stored(3, sums + 16 * 32 + 16, 128); }
    asm volatile("" ::: "memory"); // the compiler does not see that tiles are stored
    for (int tile = 0; K == Kind::INT4 && tile < 2 * A; tile++) {
        char* at = (char*)(sums + tile / 2 * 16 * 32 + tile % 2 * 16);
        transpose_16x16(at, 128, at, 128);
    }
}
#undef MULTIPLY
constexpr int rows_at_once(Kind K) { return K == Kind::SUMS ? ROWS_BY_SUMS : K == Kind::INT8 ? 16 : 32; }
constexpr bool TILES = true;

template <Kind K> static void rows_of(const Product& p, int64_t m, int64_t o, float* sums, const Expanded& int4) {
    constexpr int64_t ROWS = rows_at_once(K);
    constexpr bool INT8 = K == Kind::INT8;
    const int64_t n_rows = std::min<int64_t>(ROWS, p.M - m), turns = (p.M + ROWS - 1) / ROWS, n = p.n;
    Sixteen x[2];
    for (int64_t b = 0; b < 2; b++) {
        const int64_t first = m + 16 * b;
        if (INT8) x[b] = {p.tiles + (2 * m + 16 * b) * n * LINE, LINE, TILE}; // its planes
        else if (first < p.apart) x[b] = {p.x + first * p.x_row, p.x_row, LINE};
        else x[b] = {p.tiles + (first - p.apart) * n * LINE, LINE, TILE};
    }
    const char* w = p.w + o * n * LINE;
    // weights that are read once are prefetched soon before; if blocks of rows take turns, each prefetches a part of
    // the next outputs' weights
    const int lines = turns == 1 ? 32 : (int)((32 + turns - 1) / turns);
    const char* ahead = turns == 1 ? w + AHEAD : w + 32 * n * LINE + m / ROWS * LINE * lines * n;
    if (INT8 || n_rows > 16) multiply_block<K, 2>(x, w, n, sums, ahead, lines, int4, m == 0);
    else multiply_block<K, 1>(x, w, n, sums, ahead, lines, int4, m == 0);
    p.store_outputs<K>(sums, m, n_rows, o);
}
// Rows of x that are loaded in place: whole lines, at a stride that does not make them collide in a cache.
static int64_t in_place(const bf16* x, int64_t M, int64_t x_row) {
    return (uintptr_t)x % 64 || x_row % 32 || !(x_row % 1024) ? 0 : M / 16 * 16;
}
static void begin_tiles() { static thread_local TileConfig config; _tile_loadconfig(&config); }
static void end_tiles() { _tile_release(); }
#else
constexpr int rows_at_once(Kind K) { return K == Kind::INT8 ? 4 : 8; }
constexpr bool TILES = false;
// unsigned bytes of weights, 128 above what they are, times signed ones of x: the initial sums correct for it
template <bool INT8> static inline __m512 multiply(__m512 sum, int x, __m512i w) {
    if (INT8) return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum), w, _mm512_set1_epi32(x)));
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
}
template <Kind K, int N>
static inline void multiply_block(const int* x, const int* offset, const char* w, int64_t n, float* sums) {
    constexpr bool INT8 = K == Kind::INT8;
    constexpr int PLANES = INT8 ? 2 : 1;
    const __m512i above = _mm512_set1_epi8(INT8 ? -128 : 0);
    const int64_t plane = n * TILE / 4;
    __m512 sum[N * PLANES][2];
#pragma GCC unroll 8
    for (int r = 0; r < N * PLANES; r++)
        sum[r][0] = sum[r][1] = INT8 ? _mm512_castsi512_ps(_mm512_set1_epi32(offset[r])) : _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i++)
        for (int p = 0; p < 16; p++) {
            // In the order of addresses. Loads come from two places, where no hardware prefetcher sees a stream. Those
            // of a single row follow soon, and had better find them in L1.
            if (K != Kind::INT4) {
                constexpr auto NEAR = N == 1 ? _MM_HINT_T0 : _MM_HINT_T1;
                const char* soon = w + 2 * (i * TILE + LINE * p) + AHEAD;
                _mm_prefetch(soon, NEAR), _mm_prefetch(soon + LINE, NEAR);
            }
            const __m512i a = _mm512_xor_si512(_mm512_loadu_si512(w + 2 * i * TILE + LINE * p), above);
            const __m512i b = _mm512_xor_si512(_mm512_loadu_si512(w + (2 * i + 1) * TILE + LINE * p), above);
#pragma GCC unroll 8
            for (int r = 0; r < N * PLANES; r++) {
                const int inputs = x[r % PLANES * plane + (i * 16 + r / PLANES) * 16 + p];
                sum[r][0] = multiply<INT8>(sum[r][0], inputs, a);
                sum[r][1] = multiply<INT8>(sum[r][1], inputs, b);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < N * PLANES; r++) {
        float* to = sums + 32 * (r / PLANES + r % PLANES * 16);
        _mm512_storeu_ps(to, sum[r][0]), _mm512_storeu_ps(to + 16, sum[r][1]);
    }
}
template <Kind K> static void rows_of(const Product& p, int64_t m, int64_t o, float* sums, const Expanded& int4) {
    constexpr int64_t ROWS = rows_at_once(K);
    const int64_t n_rows = std::min<int64_t>(ROWS, p.M - m), n = p.n;
    for (int64_t i = 0; K == Kind::INT4 && m == 0 && i < n; i++) {
        int4.fill(i);
        for (char* tile : {int4.line(i), int4.line(i) + TILE}) transpose_16x16(tile, LINE, tile, LINE);
    }
    const int* x = (const int*)(p.tiles + m / 16 * (K == Kind::INT8 ? 2 : 1) * n * TILE) + m % 16 * 16;
    const int* offset = p.offset + 2 * m;
    const char* w = K == Kind::INT4 ? int4.buffer : p.w + o * n * LINE;
    if (n_rows == 1) multiply_block<K, 1>(x, offset, w, n, sums);
    else if (n_rows == 2) multiply_block<K, 2>(x, offset, w, n, sums);
    else if (n_rows <= 4) multiply_block<K, 4>(x, offset, w, n, sums);
    else if constexpr (K != Kind::INT8) multiply_block<K, 8>(x, offset, w, n, sums);
    p.store_outputs<K>(sums, m, n_rows, o);
}
static int64_t in_place(const bf16*, int64_t, int64_t) { return 0; }
static void begin_tiles() {}
static void end_tiles() {}
#endif

// Copy row m of x, bf16, into its lines, TILE apart.
static void copy_row(const Product& p, const bf16* x, int64_t m, char* lines) {
    for (int64_t i = 0; i < p.n; i++) _mm512_store_si512(lines + i * TILE, _mm512_loadu_si512(x + 32 * i));
}

// Quantize row m of x into its lines: x = x_scale * q, q from -127 * 128 to 127 * 128, ties to even, and
// q = 128 * upper + lower, both int8. The scale of a row with infinities or NaN is not finite, and so are its results.
static void quantize_row(const Product& p, const bf16* x, int64_t m, char* lines) {
    __m512i max_abs = _mm512_setzero_si512();
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    for (int64_t i = 0; i < 2 * p.n; i++)
        max_abs = _mm512_max_epu16(max_abs, _mm512_and_si512(_mm512_loadu_si512(x + 32 * i), magnitude));
    alignas(64) uint16_t each[32];
    _mm512_store_si512(each, max_abs);
    const uint32_t bits = (uint32_t)*std::max_element(each, each + 32) << 16; // NaN is above all others
    float largest;
    memcpy(&largest, &bits, 4);
    largest = largest < 1e-30f ? 1e-30f : largest;
    p.x_scale[m] = largest / (127.f * 128.f);
    const __m512 inverse = _mm512_set1_ps(1.f / p.x_scale[m]);
    __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}, first = sum[0];
    for (int64_t i = 0; i < p.n; i++)
        for (int part = 0; part < 4; part++) {
            const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(widen(x + 64 * i + 16 * part), inverse));
            if (p.totals && part % 2)
                p.totals[m * 2 * p.n + 2 * i + part / 2] = _mm512_reduce_add_epi32(_mm512_add_epi32(first, q));
            first = q;
            const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
            const __m512i plane[2] = {upper, _mm512_sub_epi32(q, _mm512_slli_epi32(upper, 7))};
            for (int k = 0; k < 2; k++) {
                if (!TILES) sum[k] = _mm512_add_epi32(sum[k], plane[k]);
                _mm_store_si128((__m128i*)(lines + (k * p.n + i) * TILE + 16 * part), _mm512_cvtsepi32_epi8(plane[k]));
            }
        }
    for (int k = 0; k < 2 && !TILES; k++) p.offset[2 * m + k] = -128 * _mm512_reduce_add_epi32(sum[k]);
}

// A buffer of this thread.
static char* buffer_of(std::vector<char>& kept, int64_t bytes) {
    if ((int64_t)kept.size() < bytes + LINE) kept.resize(bytes + LINE);
    return (char*)(((uintptr_t)kept.data() + LINE - 1) & ~(uintptr_t)(LINE - 1));
}

template <Kind K>
static void multiply_all(const bf16* x, const char* w, const char* blocks, const float* scale, const bf16* bias,
                         bf16* y, int64_t M, int64_t I, int64_t O, int64_t x_row, int gated, int threads, bool planes) {
    constexpr bool QUANTIZED = K == Kind::INT8 || K == Kind::SUMS; // x
    static thread_local std::vector<char> of_x, of_w;
    const int64_t apart = K == Kind::BF16 ? in_place(x, M, x_row) : 0, rows = (M - apart + 15) / 16; // rows: by 16
    const int64_t n = QUANTIZED ? I / 64 : I / 32, lines_of_row = QUANTIZED ? 2 * n : n;
    const int64_t tiles = rows * TILE * lines_of_row, each = QUANTIZED ? 4 * ((M + 7) / 8 * 8) : 0; // bytes
    // by address: each worker has its own vector
    char* buffer = buffer_of(of_x, tiles + each * (3 + (K == Kind::SUMS ? I / 32 : 0)));
    float* totals = K == Kind::SUMS ? (float*)(buffer + tiles + 3 * each) : nullptr;
    const Product p{(const char*)x, w, blocks, scale, bias, y, M, n, O, 2 * x_row, gated != 0, apart, buffer,
                    (float*)(buffer + tiles), (int32_t*)(buffer + tiles + each), totals};
    auto pack = [&](int64_t b) { // 16 rows
        for (int64_t r = 0; r < 16; r++) {
            const int64_t m = apart + 16 * b + r;
            char* lines = p.tiles + b * TILE * lines_of_row + r * LINE;
            if (m >= M)
                for (int64_t i = 0; i < lines_of_row; i++) _mm512_store_si512(lines + i * TILE, _mm512_setzero_si512());
            else if (QUANTIZED) quantize_row(p, x + m * x_row, m, lines);
            else copy_row(p, x + m * x_row, m, lines);
        }
        for (int64_t i = 0; K == Kind::INT4 && TILES && i < n; i++) {
            char* tile = p.tiles + (b * n + i) * TILE;
            transpose_16x16(tile, LINE, tile, LINE);
        }
    };
    const bool in_parallel = rows >= 4; // packed by all threads
    for (int64_t b = 0; b < rows && !in_parallel; b++) pack(b);
    const bool once = TILES && M <= rows_at_once(K); // of weights that are expanded only the next lines are kept
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float sums[32 * 32];
        const int64_t kept = K == Kind::INT4 ? 2 * TILE * (once ? 4 : n) : planes ? 2 * TILE * n : 0; // bytes
        char* expanded = kept ? buffer_of(of_w, kept) : nullptr;
        if (in_parallel) {
#pragma omp for
            for (int64_t b = 0; b < rows; b++) pack(b);
        }
        begin_tiles();
        asm volatile("" ::: "memory"); // packing must be complete: the compiler does not see that tiles are loaded
#pragma omp for schedule(static) nowait
        for (int64_t o = 0; o < O; o += 32) {
            const Expanded int4{w + o / 16 * n * NIBBLES, blocks + o / 16 * n * LINE, expanded, once ? 3 : -1};
            Product own = p;
            if (K == Kind::BF16 && planes) {
                join_planes(w + o * I, blocks ? blocks + o * I : nullptr, scale + o, n, expanded);
                asm volatile("" ::: "memory"); // the compiler does not see that tiles are loaded
                own.w = expanded - o * n * LINE;
            }
            for (int64_t m = 0; m < M; m += rows_at_once(K))
                if constexpr (K == Kind::SUMS) rows_by_sums(own, m, o, sums);
                else rows_of<K>(own, m, o, sums, int4);
        }
        end_tiles();
    }
}
}

// x bf16 [M, I] with rows x_row apart; w packed [O / 32, n, 2, 16, 64 bytes], bf16, or int8 with a scale [O]; or int4
// [O / 32, I / 32, 2, 4, 32, 2 bytes] with a scale [O] and blocks fp16 [O / 32, I / 32, 2, 2, 16]; by_sums these are
// [O / 16, I / 32, 4, 16, 4 bytes] and [O / 16, I / 32, 2, 16]; bias null or [O] -> bf16 y [M, O], or gated [M, O / 2]:
// silu(outputs 2 j) * outputs 2 j + 1. by_sums IN_PLANES: bf16 weights, of ops/planes.py's scale, whose upper plane is
// w [O / 32, I / 32, 2, 8, 16, 4 bytes], and whose lower one blocks, null for drafts
extern "C" void linear(const bf16* x, const void* w, const void* blocks, const float* scale, const bf16* bias, bf16* y,
                       int64_t M, int64_t I, int64_t O, int64_t x_row, int gated, int by_sums, int threads) {
    const auto int4 = by_sums ? multiply_all<Kind::SUMS> : multiply_all<Kind::INT4>;
    const bool planes = by_sums == IN_PLANES, whole = scale && !planes;
    const auto multiply = !whole ? multiply_all<Kind::BF16> : blocks ? int4 : multiply_all<Kind::INT8>;
    multiply(x, (const char*)w, (const char*)blocks, scale, bias, y, M, I, O, x_row, gated, threads, planes);
}
