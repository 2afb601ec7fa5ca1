// y = x W' (+ bias) in bf16 with fp32 sums, for any number of rows of x, on a CPU with AMX tiles or AVX-512 bf16 dot
// products. W is packed once: tiles of 16 outputs x 32 inputs, an output in every lane, pairs of inputs side by side.
//
// A row's bits never depend on how many rows there are nor on the number of threads: the sum of an output runs over all
// inputs in order, in one place. Up to 32 rows read each weight once; the tiles do the operations of 16 rows in the time
// of one.
//
// Names: M rows, I inputs, O outputs. I and O are multiples of 32.
#include <immintrin.h>
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

typedef uint16_t bf16;
#ifndef AHEAD
#define AHEAD 8192
#endif
constexpr int TILE = 16 * 32; // elements: 16 outputs x 32 inputs of W, or 16 rows x 32 inputs of x

static inline void store(const float* sums, int stride, int n_rows, const bf16* bias, bf16* y, int64_t y_row) {
    const __m512 plus = bias ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)bias)), 16)) : _mm512_setzero_ps();
    for (int r = 0; r < n_rows; r++) {
        const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(sums + r * stride), plus);
        _mm256_storeu_si256((__m256i*)(y + r * y_row), (__m256i)_mm512_cvtneps_pbh(sum));
    }
}

#ifdef __AMX_BF16__
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 16 * A rows x 32 outputs: w is the tiles of those outputs, x those of the rows, both with all inputs in order.
template <int A> static inline void block(const bf16* x, int64_t x_tiles, const bf16* w, int64_t n, float* sums, bool ahead) {
    _tile_zero(0); _tile_zero(1);
    if (A == 2) { _tile_zero(2); _tile_zero(3); }
    for (int64_t i = 0; i < n; i++) {
        if (ahead)
#pragma GCC unroll 32
            for (int line = 0; line < 32; line++) _mm_prefetch((const char*)(w + 2 * i * TILE) + AHEAD + 64 * line, _MM_HINT_T0);
        _tile_loadd(6, w + 2 * i * TILE, 64);
        _tile_loadd(7, w + (2 * i + 1) * TILE, 64);
        _tile_loadd(4, x + i * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (A == 2) {
            _tile_loadd(5, x + x_tiles + i * TILE, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128); _tile_stored(1, sums + 16, 128);
    if (A == 2) { _tile_stored(2, sums + 16 * 32, 128); _tile_stored(3, sums + 16 * 32 + 16, 128); }
}
constexpr int ROWS = 32; // taken at once

static void rows_of(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t m, int64_t M, int64_t I, int64_t O, float* sums) {
    const int n_rows = std::min<int64_t>(ROWS, M - m);
    if (n_rows > 16) block<2>(x + m * I, 16 * I, w, I / 32, sums, m == 0);
    else block<1>(x + m * I, 16 * I, w, I / 32, sums, m == 0);
    for (int half = 0; half < 2; half++) store(sums + 16 * half, 32, n_rows, bias ? bias + 16 * half : nullptr, y + m * O + 16 * half, O);
}
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
static void rows_of(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t m, int64_t M, int64_t I, int64_t O, float* sums) {
    const int n_rows = std::min<int64_t>(ROWS, M - m);
    const uint32_t* pairs = (const uint32_t*)(x + m / 16 * 16 * I) + m % 16 * 16;
    if (n_rows == 1) block<1>(pairs, w, I / 32, sums);
    else if (n_rows == 2) block<2>(pairs, w, I / 32, sums);
    else if (n_rows <= 4) block<4>(pairs, w, I / 32, sums);
    else block<8>(pairs, w, I / 32, sums);
    for (int half = 0; half < 2; half++) store(sums + 16 * half, 32, n_rows, bias ? bias + 16 * half : nullptr, y + m * O + 16 * half, O);
}
static void begin() {}
static void end() {}
#endif

// x [M, I] with rows x_row apart; w packed [O / 32, I / 32, 2, 16, 16, 2]; bias null or [O] -> y [M, O]
extern "C" void linear_cpu(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t M, int64_t I, int64_t O, int64_t x_row, int threads) {
    static thread_local std::vector<bf16> kept;
    const int64_t blocks = (M + 15) / 16, n = I / 32;
    if ((int64_t)kept.size() < blocks * 16 * I + 32) kept.resize(blocks * 16 * I + 32);
    bf16* tiles = (bf16*)(((uintptr_t)kept.data() + 63) & ~(uintptr_t)63); // by address: workers have a vector of their own
    auto pack = [&](int64_t b) { // 16 rows, those past M zeros
        for (int r = 0; r < 16; r++)
            for (int64_t i = 0; i < n; i++) {
                bf16* to = tiles + b * 16 * I + i * TILE + r * 32;
                _mm512_store_si512(to, 16 * b + r < M ? _mm512_loadu_si512(x + (16 * b + r) * x_row + 32 * i) : _mm512_setzero_si512());
            }
    };
    if (blocks < 4)
        for (int64_t b = 0; b < blocks; b++) pack(b);
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float sums[32 * 32];
        if (blocks >= 4) {
#pragma omp for
            for (int64_t b = 0; b < blocks; b++) pack(b);
        }
        begin();
        asm volatile("" ::: "memory"); // what was packed is there: compilers do not see that tiles are loaded
#pragma omp for schedule(static) nowait
        for (int64_t o = 0; o < O / 32; o++)
            for (int64_t m = 0; m < M; m += ROWS) rows_of(tiles, w + o * 32 * I, bias ? bias + 32 * o : nullptr, y + 32 * o, m, M, I, O, sums);
        end();
    }
}
