// y = x W' (+ bias) in bf16 with fp32 sums, for any number of rows of x, on a CPU with AMX tiles or AVX-512 bf16 dot
// products. W is packed once: tiles of 16 outputs x 32 inputs, an output in every lane, pairs of inputs adjacent.
// If outputs are pairs of gate and up, SwiGLU may be applied to the sums before they are rounded.
//
// A row's result never depends on the number of rows or threads, down to the last bit: one thread sums each output over
// all inputs in order. Up to 32 rows read each weight once; the tiles do the operations of 16 rows in the time of one.
// With more rows the weights of 32 outputs stay in a cache while the rows pass by, and the next ones are prefetched, a
// few lines per step.
//
// Names: M rows, I inputs, O outputs. I and O are multiples of 32.
#include <immintrin.h>
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

typedef uint16_t bf16;
namespace { // a process may load two builds of this, whose names must not clash
#ifndef AHEAD
#define AHEAD 8192
#endif
constexpr int TILE = 16 * 32; // elements: 16 outputs x 32 inputs of W, or 16 rows x 32 inputs of x

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

static inline __m512 wide(const bf16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

// The operands, and where the results go.
struct Product {
    const bf16 *x, *w, *bias; // bias null or [O]
    bf16* y; // [M, O], gated [M, O / 2]
    int64_t M, I, O, x_row;
    bool gated; // outputs 2 j and 2 j + 1 are gate and up
    bf16* tiles; // rows of x from `apart` on, by 16 and then by 32 inputs; zeros follow the last one
    int64_t apart;

    // n_rows of sums [n_rows, 32] from row m and output o on
    void store(const float* sums, int64_t m, int64_t n_rows, int64_t o) const {
        const __m512 none = _mm512_setzero_ps(), low = bias ? wide(bias + o) : none, high = bias ? wide(bias + o + 16) : none;
        const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        for (int64_t r = 0; r < n_rows; r++) {
            const __m512 a = _mm512_add_ps(_mm512_loadu_ps(sums + 32 * r), low), b = _mm512_add_ps(_mm512_loadu_ps(sums + 32 * r + 16), high);
            if (gated) {
                const __m512 gate = _mm512_permutex2var_ps(a, even, b), up = _mm512_permutex2var_ps(a, odd, b);
                _mm256_storeu_si256((__m256i*)(y + ((m + r) * O + o) / 2), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(silu(gate), up)));
            } else _mm512_storeu_si512(y + (m + r) * O + o, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
    }
};

#ifdef __AMX_BF16__
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 16 rows of x: their address, the stride of a row, and that of 32 inputs.
struct Sixteen {
    const bf16* at;
    int64_t bytes, step;
};

// 16 * A rows x 32 outputs, w being the tiles of those outputs; `lines` of what `ahead` points to are fetched per step.
template <int A> static inline void block(const Sixteen* x, const bf16* w, int64_t n, float* sums, const char* ahead, int lines) {
    _tile_zero(0); _tile_zero(1);
    if (A == 2) { _tile_zero(2); _tile_zero(3); }
    for (int64_t i = 0; i < n; i++) {
        if (lines == 32)
#pragma GCC unroll 32
            for (int line = 0; line < 32; line++) _mm_prefetch(ahead + 64 * (32 * i + line), _MM_HINT_T0);
        else
            for (int line = 0; line < lines; line++) _mm_prefetch(ahead + 64 * (lines * i + line), _MM_HINT_T1);
        _tile_loadd(6, w + 2 * i * TILE, 64);
        _tile_loadd(7, w + (2 * i + 1) * TILE, 64);
        _tile_loadd(4, x[0].at + i * x[0].step, x[0].bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (A == 2) {
            _tile_loadd(5, x[1].at + i * x[1].step, x[1].bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128); _tile_stored(1, sums + 16, 128);
    if (A == 2) { _tile_stored(2, sums + 16 * 32, 128); _tile_stored(3, sums + 16 * 32 + 16, 128); }
}
constexpr int ROWS = 32; // taken at once

static void rows_of(const Product& p, int64_t m, int64_t o, float* sums) {
    const int64_t n_rows = std::min<int64_t>(ROWS, p.M - m), turns = (p.M + ROWS - 1) / ROWS, n = p.I / 32;
    Sixteen x[2];
    for (int64_t b = 0; b < 2; b++) {
        const int64_t first = m + 16 * b;
        if (first < p.apart) x[b] = {p.x + first * p.x_row, 2 * p.x_row, 32};
        else x[b] = {p.tiles + (first - p.apart) * p.I, 64, TILE};
    }
    const bf16* w = p.w + o * p.I;
    // if these weights are read once, each step prefetches those soon needed; if blocks of rows take turns, each
    // prefetches a part of the next outputs' weights
    const int lines = turns == 1 ? 32 : (int)((32 + turns - 1) / turns);
    const char* ahead = turns == 1 ? (const char*)w + AHEAD : (const char*)(w + 32 * p.I) + m / ROWS * 64 * lines * n;
    if (n_rows > 16) block<2>(x, w, n, sums, ahead, lines);
    else block<1>(x, w, n, sums, ahead, lines);
    p.store(sums, m, n_rows, o);
}
// Rows of x that are loaded in place: whole lines, at a stride that does not make them collide in a cache.
static int64_t in_place(const bf16* x, int64_t M, int64_t x_row) { return (uintptr_t)x % 64 || x_row % 32 || !(x_row % 1024) ? 0 : M / 16 * 16; }
static void begin() { static thread_local TileConfig config; _tile_loadconfig(&config); }
static void end() { _tile_release(); }
#else
constexpr int ROWS = 8;
template <int N> static inline void block(const uint32_t* x, const bf16* w, int64_t n, float* sums) {
    __m512 sum[N][2];
#pragma GCC unroll 8
    for (int r = 0; r < N; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i++)
        for (int p = 0; p < 16; p++) {
            const __m512bh a = (__m512bh)_mm512_loadu_si512(w + 2 * i * TILE + 32 * p), b = (__m512bh)_mm512_loadu_si512(w + (2 * i + 1) * TILE + 32 * p);
#pragma GCC unroll 8
            for (int r = 0; r < N; r++) {
                const __m512bh pair = (__m512bh)_mm512_set1_epi32(x[(i * 16 + r) * 16 + p]);
                sum[r][0] = _mm512_dpbf16_ps(sum[r][0], pair, a);
                sum[r][1] = _mm512_dpbf16_ps(sum[r][1], pair, b);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < N; r++) _mm512_storeu_ps(sums + 32 * r, sum[r][0]), _mm512_storeu_ps(sums + 32 * r + 16, sum[r][1]);
}
static void rows_of(const Product& p, int64_t m, int64_t o, float* sums) {
    const int64_t n_rows = std::min<int64_t>(ROWS, p.M - m), n = p.I / 32;
    const uint32_t* pairs = (const uint32_t*)(p.tiles + m / 16 * 16 * p.I) + m % 16 * 16;
    const bf16* w = p.w + o * p.I;
    if (n_rows == 1) block<1>(pairs, w, n, sums);
    else if (n_rows == 2) block<2>(pairs, w, n, sums);
    else if (n_rows <= 4) block<4>(pairs, w, n, sums);
    else block<8>(pairs, w, n, sums);
    p.store(sums, m, n_rows, o);
}
static int64_t in_place(const bf16*, int64_t, int64_t) { return 0; }
static void begin() {}
static void end() {}
#endif
}

// x [M, I] with rows x_row apart; w packed [O / 32, I / 32, 2, 16, 16, 2]; bias null or [O] -> y [M, O], or gated
// [M, O / 2]: silu(outputs 2 j) * outputs 2 j + 1
extern "C" void linear_cpu(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t M, int64_t I, int64_t O, int64_t x_row, int gated, int threads) {
    static thread_local std::vector<bf16> kept;
    const int64_t apart = in_place(x, M, x_row), blocks = (M - apart + 15) / 16, n = I / 32;
    if ((int64_t)kept.size() < blocks * 16 * I + 32) kept.resize(blocks * 16 * I + 32);
    // by address: each worker has its own vector
    const Product p{x, w, bias, y, M, I, O, x_row, gated != 0, (bf16*)(((uintptr_t)kept.data() + 63) & ~(uintptr_t)63), apart};
    auto pack = [&](int64_t b) { // 16 rows
        for (int64_t r = 0; r < 16; r++)
            for (int64_t i = 0; i < n; i++) {
                const int64_t m = apart + 16 * b + r;
                _mm512_store_si512(p.tiles + b * 16 * I + i * TILE + r * 32, m < M ? _mm512_loadu_si512(x + m * x_row + 32 * i) : _mm512_setzero_si512());
            }
    };
    const bool together = blocks >= 4; // packed by all threads
    for (int64_t b = 0; b < blocks && !together; b++) pack(b);
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float sums[32 * 32];
        if (together) {
#pragma omp for
            for (int64_t b = 0; b < blocks; b++) pack(b);
        }
        begin();
        asm volatile("" ::: "memory"); // packing must be complete: the compiler does not see that tiles are loaded
#pragma omp for schedule(static) nowait
        for (int64_t o = 0; o < O; o += 32)
            for (int64_t m = 0; m < M; m += ROWS) rows_of(p, m, o, sums);
        end();
    }
}
