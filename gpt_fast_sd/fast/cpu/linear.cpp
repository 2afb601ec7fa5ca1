// y = x W' (+ bias) for any number of rows of a bf16 x, on any CPU. linear_avx512.cpp describes the kinds of weights,
// how they are packed, and what both promise alike. Products with bf16 and int4 weights are fp32 here, those with int8
// ones and by sums integers of 16 bits, or bytes.
//
// Each output of each row is one sum over all inputs in order, so it has the same bits whatever is computed beside it.
// Weights are multiplied as they are read, except int4 that are not summed: those of a block's outputs and WIDENED
// inputs are widened, and stay in L1 while ROWS rows are multiplied with them.
//
// Names: M rows, I inputs, O outputs; a word is 4 bytes of inputs of one output, a half is 16 of a block's 32 outputs.
#include "simd.hpp"

enum class Kind { BF16, INT8, INT4, SUMS }; // of weights; SUMS: int4, by integer sums of blocks
namespace {
constexpr int HALF = 16, LINE = 64, WORDS = 16; // outputs; bytes of their words, which are as many
constexpr int V = HALF / LANES; // vectors of a half
constexpr int TOGETHER = V == 1 ? 2 : 1; // halves of widened weights that share what is read of x
constexpr int WIDENED = 192; // inputs whose weights are widened at a time, and stay in L1
constexpr int64_t ROWS = 48; // that are multiplied with all weights before the next, and stay in L2
constexpr int SUMS = REGISTERS == 32 ? 24 : 12; // vectors of sums that fit the registers
constexpr int AHEAD = 8192; // bytes, for prefetches
constexpr int OF_FOUR = HAS_DOT4 || HAS_BYTES ? 1 : 2; // words that hold four integer inputs
constexpr int32_t ONES = 0x00010001; // dot2 with them adds both int16 of a lane

static inline F silu(F x) { // NaN and the infinities as they are elsewhere
    const F root = exp2_clamped(x * -.72134752f);
    return x / (1.f + root * root);
}
static inline F round_to_bf16(F x) {
    const I bits = (I)x;
    return (F)((x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000) & -65536);
}

// The operands, and rows of x as they are multiplied.
struct Product {
    const bf16* x;
    const char *w, *blocks; // blocks: of int4, fp16 scales and minima; of planes, the lower one
    const float* scale; // int8, int4 and planes: [O]
    const bf16* bias; // null or [O]
    bf16* y; // [M, O], gated [M, O / 2]
    int64_t M, I, O, x_row;
    bool gated; // outputs 2 j and 2 j + 1 are gate and up
    float* wide; // [M, I]
    // [M, 2 planes, I / 4, OF_FOUR]: of four inputs the first and third, then the others, as int16; or all as int8
    int32_t* quantized;
    float* x_scale; // [M]
    float* totals; // by sums: [M, I / 32]
    bool planes; // bf16 weights lie so

    int64_t plane() const { return I / 4 * OF_FOUR; } // words
    Product rows(int64_t m, int64_t n) const {
        Product part = *this;
        part.M = n, part.y += m * (gated ? O / 2 : O);
        part.wide += m * I, part.quantized += m * 2 * plane(), part.x_scale += m;
        if (totals) part.totals += m * (I / 32);
        return part;
    }

    // Widen or quantize row m of x.
    void prepare_row(Kind kind, int64_t m) const {
        const bf16* row = x + m * x_row;
        if (kind == Kind::BF16 || kind == Kind::INT4) {
            for (int64_t i = 0; i < I; i += LANES) store(wide + m * I + i, load_bf16(row + i));
            return;
        }
        uint16_t magnitude = 0; // the largest; NaN is above all others
        for (int64_t i = 0; i < I; i++) magnitude = std::max<uint16_t>(magnitude, row[i] & 0x7fff);
        const float largest = bf16_to_float(magnitude);
        x_scale[m] = (largest < 1e-30f ? 1e-30f : largest) / (127.f * 128.f);
        const float inverse = 1.f / x_scale[m], magic = 12582912.f; // adding it rounds to whole numbers, ties to even
        const bool finite = magnitude < 0x7f80; // else all are 0, and zeros times the scale are NaN
        int32_t* to = quantized + m * 2 * plane();
        int32_t total = 0;
        for (int64_t i = 0; i < I; i += 4) {
            int32_t part[2][4];
            for (int j = 0; j < 4; j++) {
                const float scaled = bf16_to_float(row[i + j]) * inverse;
                const int32_t n = finite ? (int32_t)((scaled + magic) - magic) : 0, upper = (n + 64) >> 7;
                part[0][j] = upper, part[1][j] = n - 128 * upper, total += n;
            }
            for (int k = 0; k < 2 && OF_FOUR == 1; k++) {
                uint32_t word = 0;
                for (int j = 0; j < 4; j++) word |= (uint32_t)(part[k][j] & 0xff) << 8 * j;
                to[k * plane() + i / 4] = (int32_t)word;
            }
            for (int k = 0; k < 2 && OF_FOUR == 2; k++) {
                to[k * plane() + i / 2] = (part[k][0] & 0xffff) | (int32_t)((uint32_t)part[k][2] << 16);
                to[k * plane() + i / 2 + 1] = (part[k][1] & 0xffff) | (int32_t)((uint32_t)part[k][3] << 16);
            }
            if (totals && i % 32 == 28) totals[m * (I / 32) + i / 32] = (float)total, total = 0;
        }
    }

    // Scale, bias, activate, round and store the sums [32] of row m from output o on.
    void store_outputs(Kind kind, const float* sums, int64_t m, int64_t o) const {
        alignas(64) float out[2 * HALF];
        for (int j = 0; j < 2 * HALF; j += LANES) {
            F a = load<F>(sums + j);
            if (kind == Kind::INT4) a *= load<F>(scale + o + j);
            else if (kind != Kind::BF16) a *= x_scale[m] * load<F>(scale + o + j);
            if (bias) a += load_bf16(bias + o + j);
            if (gated) store(out + j, a);
            else store_bf16(y + m * O + o + j, a);
        }
        if (!gated) return;
        alignas(64) float gate[HALF], up[HALF];
        for (int j = 0; j < HALF; j++) gate[j] = out[2 * j], up[j] = out[2 * j + 1];
        for (int j = 0; j < HALF; j += LANES)
            store_bf16(y + (m * O + o) / 2 + j, silu(load<F>(gate + j)) * load<F>(up + j));
    }
};

// The words of a half of a block's outputs: for each line, 64 bytes of inputs, a block has 16 words of each half.
static inline const char* words(const char* w, int64_t line, int half) { return w + (2 * line + half) * WORDS * LINE; }

// Prefetch into L2 what both halves need at one word of a block, in the order of addresses: loads jump from one half's
// line to the next, where no hardware prefetcher sees a stream.
static inline void prefetch(const char* soon, int64_t line, int word) {
    const char* at = words(soon, line, 0) + 2 * word * LINE;
    __builtin_prefetch(at, 0, 2), __builtin_prefetch(at + LINE, 0, 2);
}

// What pass `number` over a block's weights prefetches. The first one waits for memory, which the others would leave
// idle, so the second one has the whole next block brought.
static inline const char* soon(const char* w, const char* following, int64_t number) {
    return number == 0 ? w + AHEAD : number == 1 ? following : nullptr;
}

// Multiply N rows with the outputs of C vectors of bf16 weights as they lie, from vector `from` of the block on.
// sums [N, 32]
template <int N, int C, bool FETCHES>
static __attribute__((noinline)) void multiply_packed(const Product& p, const char* w, int from, const char* soon,
                                                      int64_t m, float* sums) {
    F sum[N][C] = {};
    const int64_t row = p.I;
    const float* x = p.wide + m * row;
    for (int64_t line = 0; line < row / 32; line++) {
        for (int word = 0; word < WORDS; word++, x += 2) {
            if (FETCHES) prefetch(soon, line, word);
            auto two = [&](int v) {
                return load<I>(words(w, line, (from + v) / V) + word * LINE + (from + v) % V * 4 * LANES);
            };
            if constexpr (1 < N && N < C) { // fewer numbers than vectors are held
#pragma GCC unroll 8
                for (int v = 0; v < C; v++) {
                    const F first = (F)(two(v) << 16), second = (F)(two(v) & -65536);
#pragma GCC unroll 8
                    for (int r = 0; r < N; r++) {
                        sum[r][v] = fmadd(sum[r][v], broadcast(x[r * row]), first);
                        sum[r][v] = fmadd(sum[r][v], broadcast(x[r * row + 1]), second);
                    }
                }
                continue;
            }
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                F weight[C];
#pragma GCC unroll 8
                for (int v = 0; v < C; v++) weight[v] = (F)(i ? two(v) & -65536 : two(v) << 16);
#pragma GCC unroll 8
                for (int r = 0; r < N; r++) {
                    const F one = broadcast(x[r * row + i]);
#pragma GCC unroll 8
                    for (int v = 0; v < C; v++) sum[r][v] = fmadd(sum[r][v], one, weight[v]);
                }
                asm volatile("" ::: "memory"); // else the words stay in registers, and drive out sums
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < N; r++)
#pragma GCC unroll 8
        for (int v = 0; v < C; v++) store(sums + r * 2 * HALF + (from + v) * LANES, sum[r][v]);
}

// The same in a pass that prefetches what comes soon, if anything.
template <int N, int C>
static void pass_over(const Product& p, const char* w, int from, const char* soon, int64_t m, float* sums) {
    (soon ? multiply_packed<N, C, true> : multiply_packed<N, C, false>)(p, w, from, soon, m, sums);
}

// Multiply N rows with 16 outputs of each of TOGETHER halves, whose n weights from input `from` on are widened: w
// [TOGETHER, WIDENED, 16]. Adds to some of sums [N, 32].
template <int N>
static __attribute__((noinline)) void multiply_wide(const Product& p, const float* w, int64_t from, int64_t n,
                                                    int64_t m, float* sums) {
    constexpr int OF = TOGETHER * V;
    F sum[N][OF];
    for (int r = 0; r < N; r++)
        for (int v = 0; v < OF; v++) sum[r][v] = load<F>(sums + r * 2 * HALF + v * LANES);
    const float* x = p.wide + m * p.I + from;
    for (int64_t i = 0; i < n; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < OF; v++) {
            const F weight = load<F>(w + (v / V * WIDENED + i) * HALF + v % V * LANES);
#pragma GCC unroll 12
            for (int r = 0; r < N; r++) sum[r][v] = fmadd(sum[r][v], broadcast(x[r * p.I + i]), weight);
        }
    }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < OF; v++) store(sums + r * 2 * HALF + v * LANES, sum[r][v]);
}

// Widen int4: of a block of 32 inputs, 16 bits hold an input of outputs 4 a to 4 a + 3: [2 halves, 4, 32].
static void widen_int4(const char* w, const char* blocks, int64_t from, int64_t n, int half, float* to) {
    I shift;
    for (int i = 0; i < LANES; i++) shift[i] = 4 * (i % 8);
    for (int64_t g = from / 32; g < (from + n) / 32; g++) {
        const uint16_t* four = (const uint16_t*)(w + (2 * g + half) * 4 * LINE);
        const fp16* of = (const fp16*)(blocks + (2 * g + half) * LINE);
        F scale[V], minimum[V];
        for (int v = 0; v < V; v++) scale[v] = load_fp16(of + v * LANES), minimum[v] = load_fp16(of + HALF + v * LANES);
        for (int i = 0; i < 32; i++, to += HALF)
            for (int v = 0; v < V; v++) {
                const int a = v * LANES / 4;
                auto eight = [&](int a) { // outputs
                    return broadcast((int32_t)(four[32 * a + i] | (uint32_t)four[32 * (a + 1) + i] << 16));
                };
                I bits = broadcast((int32_t)four[32 * a + i]);
                if constexpr (LANES >= 8) bits = eight(a);
                if constexpr (LANES == 16) bits = iota() < 8 ? bits : eight(2);
                store(to + v * LANES, round_to_bf16(fmadd(minimum[v], to_float(bits >> shift & 15), scale[v])));
            }
    }
}

// Multiply N rows with the outputs of H halves of int8 weights, from `half` on. sums [N, 32]. A sum has CHAINS parts,
// as few sums would wait for each other; the widest vectors wait for memory anyway.
template <int N, int H>
static __attribute__((noinline)) void multiply_int8(const Product& p, const char* w, int half, const char* soon,
                                                    int64_t m, float* sums) {
    constexpr int C = H * V, CHAINS = LANES == 16 || HAS_BYTES ? 1 : 8 * N * C <= SUMS ? 4 : 4 * N * C <= SUMS ? 2 : 1;
    I sum[N][2][C][CHAINS] = {};
    const int32_t* x = p.quantized + m * 2 * p.plane();
    for (int64_t line = 0; line < p.I / 64; line++)
#pragma GCC unroll 2
        for (int word = 0; word < WORDS; word++, x += OF_FOUR) {
            if (soon) prefetch(soon, line, word);
            const int first = CHAINS == 4 ? word % 2 * 2 : 0, second = CHAINS == 1 ? 0 : first + 1;
#pragma GCC unroll 8
            for (int v = 0; v < C; v++) {
                const I four = load<I>(words(w, line, half + v / V) + word * LINE + v % V * 4 * LANES);
                const I even = (I)((Shorts)four << 8 >> 8), odd = (I)((Shorts)four >> 8);
#pragma GCC unroll 12
                for (int plane = 0; plane < 2 * N; plane++) { // two of each row
                    I* to = sum[plane / 2][plane % 2][v];
                    const int32_t* x_of = x + plane * p.plane();
                    if constexpr (HAS_DOT4) {
                        to[word % CHAINS] = dot4(to[word % CHAINS], four, broadcast(x_of[0]));
                    } else if (HAS_BYTES) {
                        to[0] = dot2(to[0], bytes_dot2(four, broadcast(x_of[0])), broadcast(ONES));
                    } else if (N == 1 && LANES == 16) {
                        to[0] += dot2(even, broadcast(x_of[0])) + dot2(odd, broadcast(x_of[1]));
                    } else {
                        to[first] = dot2(to[first], even, broadcast(x_of[0]));
                        to[second] = dot2(to[second], odd, broadcast(x_of[1]));
                    }
                }
            }
        }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < C; v++) {
            I whole[2] = {};
            for (int part = 0; part < 2; part++)
                for (int c = 0; c < CHAINS; c++) whole[part] += sum[r][part][v][c];
            store(sums + r * 2 * HALF + v * LANES, fmadd(to_float(whole[1]), to_float(whole[0]), broadcast(128.f)));
        }
}

// Multiply N rows with 16 outputs of int4 weights by sums, whose words have four inputs and those 16 further on.
// sums [N, 32]
template <int N>
static __attribute__((noinline)) void multiply_by_sums(const Product& p, const char* w, const char* blocks, int64_t m,
                                                       float* sums) {
    F out[N][V] = {};
    const int64_t n_blocks = p.I / 32;
    for (int64_t g = 0; g < n_blocks; g++, w += 4 * LINE, blocks += LINE) {
        I sum[N][2][V] = {};
        __builtin_prefetch(blocks + AHEAD / 4);
#pragma GCC unroll 1
        for (int c = 0; c < 4; c++) { // unrolled, its products are all kept until the end
            __builtin_prefetch(w + AHEAD + LINE * c);
            const int32_t* x = p.quantized + m * 2 * p.plane() + OF_FOUR * (8 * g + c);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                const I word = load<I>(w + c * LINE + v * 4 * LANES);
                const I low = broadcast(OF_FOUR == 1 ? 0x0f0f0f0f : 0x000f000f); // then there are no odd ones
                const I even = word & low, odd = word >> 8 & low, even_2 = word >> 4 & low, odd_2 = word >> 12 & low;
#pragma GCC unroll 4
                for (int plane = 0; plane < 2 * N; plane++) { // two of each row
                    const int32_t* x_of = x + plane * p.plane();
                    I& to = sum[plane / 2][plane % 2][v];
                    if constexpr (HAS_DOT4) {
                        to = dot4(dot4(to, even, broadcast(x_of[0])), even_2, broadcast(x_of[4]));
                    } else if (HAS_BYTES) { // a block adds 16 products of at most 15 * 127 to each int16
                        to = (I)add_bytes((Shorts)to, even, broadcast(x_of[0]));
                        to = (I)add_bytes((Shorts)to, even_2, broadcast(x_of[4]));
                    } else {
                        to = dot2(dot2(to, even, broadcast(x_of[0])), odd, broadcast(x_of[1]));
                        to = dot2(dot2(to, even_2, broadcast(x_of[8])), odd_2, broadcast(x_of[9]));
                    }
                }
            }
        }
        for (int v = 0; v < V; v++) {
            const F scale = load_fp16((const fp16*)blocks + v * LANES);
            const F minimum = load_fp16((const fp16*)blocks + HALF + v * LANES);
            for (int r = 0; r < N; r++) {
                const auto of = [&](int k) { return HAS_BYTES ? dot2(sum[r][k][v], broadcast(ONES)) : sum[r][k][v]; };
                const F whole = to_float((of(0) << 7) + of(1)); // below 2^23
                out[r][v] = fmadd(fmadd(out[r][v], whole, scale), minimum, broadcast(p.totals[(m + r) * n_blocks + g]));
            }
        }
    }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < V; v++) store(sums + r * 2 * HALF + v * LANES, out[r][v]);
}

// Rows at once of multiply_packed, all outputs or half of them, multiply_wide, multiply_int8 and multiply_by_sums.
constexpr int FLAT = std::min(8, SUMS / (2 * V)), TALL = std::min(8, SUMS / (TOGETHER * V)), WIDE = TALL;
constexpr int WHOLE = std::min(6, SUMS / (2 * V)), SUMMED = std::max(HAS_BYTES ? 2 : 1, WHOLE / 2);
constexpr int FLATS = HAS_BYTES ? 3 : 2; // blocks of few rows, before tall ones are faster: measured on Zen 3

// Outputs o .. o + 31 of at most ROWS rows; those up to `end` are next. wide: scratch [TOGETHER, WIDENED, 16] of int4
template <Kind K> static void multiply_block(const Product& p, int64_t o, int64_t end, float* wide) {
    const int64_t M = p.M, I = p.I, bytes = 2 * HALF * (K == Kind::BF16 ? 2 * I : K == Kind::INT8 ? I : I / 2);
    const char *w = p.w + o / (2 * HALF) * bytes, *following = o + 2 * HALF < end ? w + bytes : nullptr;
    const char* blocks = K == Kind::INT4 || K == Kind::SUMS ? p.blocks + o * (I / 32) * 4 : nullptr;
    alignas(64) float sums[ROWS][2 * HALF];
    auto at = [&](int64_t m, int half) { return sums[m] + HALF * half; };
    int64_t number = 0; // of a pass
    if constexpr (K == Kind::BF16) {
        static thread_local std::vector<char> joined;
        if (p.planes) { // of a block of outputs, which stays in L2
            joined.resize(bytes);
            join_planes(p.w + o * I, p.blocks ? p.blocks + o * I : nullptr, p.scale + o, I / 32, joined.data());
            w = joined.data(), following = nullptr;
        }
        if (M > FLATS * FLAT)
            for_row_blocks<TALL>(0, M, [&](auto n, int64_t m) {
                for (int half = 0; half < 2; half += TOGETHER)
                    pass_over<n(), TOGETHER * V>(p, w, half * V, soon(w, following, number++), m, sums[m]);
            });
        else
            for_row_blocks<FLAT>(0, M, [&](auto n, int64_t m) {
                pass_over<n(), 2 * V>(p, w, 0, soon(w, following, number++), m, sums[m]);
            });
    } else if constexpr (K == Kind::INT8) {
        if (HAS_BYTES && M == 1) multiply_int8<1, 2>(p, w, 0, soon(w, following, 0), 0, sums[0]);
        for (int half = 0; half < 2 && !(HAS_BYTES && M == 1); half++)
            for_row_blocks<WHOLE>(0, M, [&](auto n, int64_t m) {
                multiply_int8<n(), 1>(p, w, half, soon(w, following, number++), m, at(m, half));
            });
    } else if constexpr (K == Kind::SUMS) {
        for (int half = 0; half < 2; half++) {
            const int64_t n_blocks = HALF * (I / 32);
            for_row_blocks<SUMMED>(0, M, [&](auto n, int64_t m) {
                multiply_by_sums<n()>(p, w + half * HALF * I / 2, blocks + half * n_blocks * 4, m, at(m, half));
            });
        }
    } else {
        memset(sums, 0, sizeof sums);
        for (int64_t i = 0; i < I; i += WIDENED)
            for (int half = 0; half < 2; half += TOGETHER) {
                const int64_t n_in = std::min<int64_t>(WIDENED, I - i);
                for (int h = 0; h < TOGETHER; h++)
                    widen_int4(w, blocks, i, n_in, half + h, wide + h * HALF * WIDENED);
                for_row_blocks<WIDE>(0, M, [&](auto n, int64_t m) {
                    multiply_wide<n()>(p, wide, i, n_in, m, at(m, half));
                });
            }
    }
    for (int64_t m = 0; m < M; m++) p.store_outputs(K, sums[m], m, o);
}

template <Kind K> static void multiply_all(Product p, int threads) {
    // kept between calls, by address: each worker has vectors of its own
    static thread_local std::vector<float> of_x;
    constexpr bool WHOLE_NUMBERS = K == Kind::INT8 || K == Kind::SUMS;
    const int64_t row = p.I + (WHOLE_NUMBERS ? 1 + (K == Kind::SUMS ? p.I / 32 : 0) : 0);
    if ((int64_t)of_x.size() < p.M * row + LANES) of_x.resize(p.M * row + LANES);
    p.wide = of_x.data(), p.quantized = (int32_t*)of_x.data(), p.x_scale = of_x.data() + p.M * p.I;
    p.totals = K == Kind::SUMS ? p.x_scale + p.M : nullptr;
    const bool together = p.M >= 32;
    for (int64_t m = 0; m < p.M && !together; m++) p.prepare_row(K, m);
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float wide[TOGETHER * WIDENED * HALF];
        if (together) {
#pragma omp for
            for (int64_t m = 0; m < p.M; m++) p.prepare_row(K, m);
        }
#pragma omp for schedule(static) nowait
        for (int64_t thread = 0; thread < threads; thread++) {
            const int64_t n = p.O / (2 * HALF), end = (thread + 1) * n / threads * 2 * HALF;
            for (int64_t m = 0; m < p.M; m += ROWS) {
                const Product rows = p.rows(m, std::min(ROWS, p.M - m));
                for (int64_t o = thread * n / threads * 2 * HALF; o < end; o += 2 * HALF)
                    multiply_block<K>(rows, o, end, wide);
            }
        }
    }
}
}

// See linear_avx512.cpp.
extern "C" void linear(const bf16* x, const void* w, const void* blocks, const float* scale, const bf16* bias, bf16* y,
                       int64_t M, int64_t I, int64_t O, int64_t x_row, int gated, int by_sums, int threads) {
    const auto int4 = by_sums ? multiply_all<Kind::SUMS> : multiply_all<Kind::INT4>;
    const bool planes = by_sums == IN_PLANES, whole = scale && !planes;
    const auto multiply = !whole ? multiply_all<Kind::BF16> : blocks ? int4 : multiply_all<Kind::INT8>;
    const char *weights = (const char*)w, *of_blocks = (const char*)blocks;
    multiply({x, weights, of_blocks, scale, bias, y, M, I, O, x_row, gated != 0, nullptr, nullptr, nullptr, nullptr,
              planes}, threads);
}
