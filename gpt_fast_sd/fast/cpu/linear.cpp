// y = x W' (+ bias) for any number of rows of a bf16 x, on any CPU: see linear_avx512.cpp for the kinds of weights, how they
// are packed, and what both promise alike. Products with bf16 and int4 weights are fp32 here, those with int8 ones and by
// sums whole numbers of 16 bits.
//
// Each output of each row is one sum over all inputs in order, so it has the same bits whatever is computed beside it.
// Few rows multiply weights as they are read; for more, those of a block's outputs and WIDENED inputs are widened, and
// stay in the first cache while up to 48 rows are multiplied with them.
//
// Names: M rows, I inputs, O outputs; a word is 4 bytes of inputs of one output, a half is 16 of a block's 32 outputs.
enum class Kind { BF16, INT8, INT4, SUMS }; // of weights; SUMS: int4, by sums of whole numbers
namespace {
constexpr int HALF = 16, LINE = 64, WORDS = 16; // outputs; bytes of their words, which are as many
constexpr int V = HALF / LANES; // vectors of a half
constexpr int TOGETHER = V == 1 ? 2 : 1; // halves of widened weights that share what is read of x
constexpr int WIDENED = 192; // inputs whose weights are widened at a time, and stay in the first cache
constexpr int SUMS = REGISTERS == 32 ? 24 : 12; // of those in registers
constexpr int UNREAD = 8192; // bytes ahead that are asked for
constexpr int OF_FOUR = FOURS ? 1 : 2; // words that hold four inputs of whole numbers
typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));

static inline F silu(F x) { // NaN and the infinities as they are elsewhere
    const F root = exp2_of(x * -.72134752f);
    return x / (1.f + root * root);
}
static inline F rounded(F x) { // to bf16
    const I bits = (I)x;
    return (F)((x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000) & -65536);
}

// A product, and rows of x as they are multiplied.
struct Product {
    const bf16* x;
    const char *w, *blocks; // blocks: of int4, fp16 scales and minima
    const float* scale; // int8 and int4: [O]
    const bf16* bias; // null or [O]
    bf16* y; // [M, O], gated [M, O / 2]
    int64_t M, I, O, x_row;
    bool gated; // outputs 2 j and 2 j + 1 are gate and up
    float* wide; // [M, I]
    int32_t* whole; // [M, 2 planes, I / 4, OF_FOUR]: of four inputs the first and third, then the others, as 16 bits each; or all as bytes
    float* x_scale; // [M]
    float* totals; // by sums: [M, I / 32]

    int64_t plane() const { return I / 4 * OF_FOUR; } // words

    // Row m, made ready.
    void take(Kind kind, int64_t m) const {
        const bf16* row = x + m * x_row;
        if (kind == Kind::BF16 || kind == Kind::INT4) {
            for (int64_t i = 0; i < I; i += LANES) store(wide + m * I + i, widened(row + i));
            return;
        }
        uint16_t most = 0; // NaN is above all others
        for (int64_t i = 0; i < I; i++) most = std::max<uint16_t>(most, row[i] & 0x7fff);
        const float largest = widened_one(most);
        x_scale[m] = (largest < 1e-30f ? 1e-30f : largest) / (127.f * 128.f);
        const float inverse = 1.f / x_scale[m], magic = 12582912.f; // adding it rounds to whole numbers, ties to even
        const bool finite = most < 0x7f80; // else there are no whole numbers, and zeros times the scale are NaN
        int32_t* to = whole + m * 2 * plane();
        int32_t total = 0;
        for (int64_t i = 0; i < I; i += 4) {
            int32_t part[2][4];
            for (int j = 0; j < 4; j++) {
                const int32_t n = finite ? (int32_t)((widened_one(row[i + j]) * inverse + magic) - magic) : 0, upper = (n + 64) >> 7;
                part[0][j] = upper, part[1][j] = n - 128 * upper, total += n;
            }
            for (int k = 0; k < 2 && FOURS; k++) {
                uint32_t word = 0;
                for (int j = 0; j < 4; j++) word |= (uint32_t)(part[k][j] & 0xff) << 8 * j;
                to[k * plane() + i / 4] = (int32_t)word;
            }
            for (int k = 0; k < 2 && !FOURS; k++) {
                to[k * plane() + i / 2] = (part[k][0] & 0xffff) | (int32_t)((uint32_t)part[k][2] << 16);
                to[k * plane() + i / 2 + 1] = (part[k][1] & 0xffff) | (int32_t)((uint32_t)part[k][3] << 16);
            }
            if (totals && i % 32 == 28) totals[m * (I / 32) + i / 32] = (float)total, total = 0;
        }
    }

    // Sums [32] of row m from output o on, with whatever follows them.
    void put(Kind kind, const float* sums, int64_t m, int64_t o) const {
        alignas(64) float out[2 * HALF];
        for (int j = 0; j < 2 * HALF; j += LANES) {
            F a = load<F>(sums + j);
            if (kind == Kind::INT4) a *= load<F>(scale + o + j);
            else if (kind != Kind::BF16) a *= x_scale[m] * load<F>(scale + o + j);
            if (bias) a += widened(bias + o + j);
            if (gated) store(out + j, a);
            else store_bf16(y + m * O + o + j, a);
        }
        if (!gated) return;
        alignas(64) float gate[HALF], up[HALF];
        for (int j = 0; j < HALF; j++) gate[j] = out[2 * j], up[j] = out[2 * j + 1];
        for (int j = 0; j < HALF; j += LANES) store_bf16(y + (m * O + o) / 2 + j, silu(load<F>(gate + j)) * load<F>(up + j));
    }
};

// The words of half h of a block's outputs; a block has 2 halves of 16 words, one after the other, for each 64 bytes of inputs.
static inline const char* words(const char* w, int64_t line, int half) { return w + (2 * line + half) * WORDS * LINE; }

// What both halves need soon, in the order of addresses, which is not that of loads: those jump from one half's line to the
// next, and no prefetcher sees a stream in that.
static inline void ask(const char* w, int64_t line, int word) {
    const char* soon = words(w, line, 0) + 2 * word * LINE + UNREAD;
    __builtin_prefetch(soon, 0, 2), __builtin_prefetch(soon + LINE, 0, 2); // into the second cache
}

// N rows x 32 outputs of bf16 weights w as they lie. sums [N, 32]
template <int N> static __attribute__((noinline)) void direct(const Product& p, const char* w, int64_t m, float* sums) {
    F sum[N][2 * V] = {};
    const float* x = p.wide + m * p.I;
    for (int64_t line = 0; line < p.I / 32; line++)
        for (int word = 0; word < WORDS; word++, x += 2) {
            ask(w, line, word);
#pragma GCC unroll 8
            for (int v = 0; v < 2 * V; v++) {
                const char* at = words(w, line, v / V) + word * LINE + v % V * 4 * LANES;
                const I two = load<I>(at);
                const F first = (F)(two << 16), second = (F)(two & -65536);
#pragma GCC unroll 8
                for (int r = 0; r < N; r++) {
                    sum[r][v] = more(sum[r][v], all(x[r * p.I]), first);
                    sum[r][v] = more(sum[r][v], all(x[r * p.I + 1]), second);
                }
            }
        }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < 2 * V; v++) store(sums + r * 2 * HALF + v * LANES, sum[r][v]);
}

// N rows x 16 outputs of each of TOGETHER halves, with n weights of each that are widened: w [TOGETHER, WIDENED, 16], of
// inputs from `from` on. sums [N, 32], to some of which they are added. next: what is asked for meanwhile, or null
template <int N> static __attribute__((noinline)) void from_wide(const Product& p, const float* w, int64_t from, int64_t n, const char* next, int64_t m, float* sums) {
    constexpr int OF = TOGETHER * V;
    F sum[N][OF];
    for (int r = 0; r < N; r++)
        for (int v = 0; v < OF; v++) sum[r][v] = load<F>(sums + r * 2 * HALF + v * LANES);
    const float* x = p.wide + m * p.I + from;
    for (int64_t i = 0; i < n; i++) {
        if (next) __builtin_prefetch(next + i * 32 * TOGETHER);
#pragma GCC unroll 4
        for (int v = 0; v < OF; v++) {
            const F weight = load<F>(w + (v / V * WIDENED + i) * HALF + v % V * LANES);
#pragma GCC unroll 12
            for (int r = 0; r < N; r++) sum[r][v] = more(sum[r][v], all(x[r * p.I + i]), weight);
        }
    }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < OF; v++) store(sums + r * 2 * HALF + v * LANES, sum[r][v]);
}

static void widen_bf16(const char* w, int64_t from, int64_t n, int half, float* to) {
    for (int64_t line = from / 32; line < (from + n) / 32; line++)
        for (int word = 0; word < WORDS; word++, to += 2 * HALF)
            for (int v = 0; v < V; v++) {
                const I two = load<I>(words(w, line, half) + word * LINE + v * 4 * LANES);
                store(to + v * LANES, (F)(two << 16));
                store(to + HALF + v * LANES, (F)(two & -65536));
            }
}

// int4: of a block of 32 inputs, 16 bits hold those of outputs 4 a to 4 a + 3 for an input: [2 halves, 4, 32].
static void widen_int4(const char* w, const char* blocks, int64_t from, int64_t n, int half, float* to) {
    I shift;
    for (int i = 0; i < LANES; i++) shift[i] = 4 * (i % 8);
    for (int64_t g = from / 32; g < (from + n) / 32; g++) {
        const uint16_t* four = (const uint16_t*)(w + (2 * g + half) * 4 * LINE);
        const fp16* of = (const fp16*)(blocks + (2 * g + half) * LINE);
        F scale[V], least[V];
        for (int v = 0; v < V; v++) scale[v] = of_halves(of + v * LANES), least[v] = of_halves(of + HALF + v * LANES);
        for (int i = 0; i < 32; i++, to += HALF)
            for (int v = 0; v < V; v++) {
                const int a = v * LANES / 4;
                I bits = all((int32_t)four[32 * a + i]);
                if constexpr (LANES >= 8) bits = all((int32_t)(four[32 * a + i] | (uint32_t)four[32 * (a + 1) + i] << 16));
                if constexpr (LANES == 16) {
                    const I more = all((int32_t)(four[64 + i] | (uint32_t)four[96 + i] << 16));
                    bits = numbers() < 8 ? bits : more;
                }
                store(to + v * LANES, rounded(more(least[v], floats(bits >> shift & 15), scale[v])));
            }
    }
}

// N rows x 16 outputs of int8 weights, in CHAINS parts of each sum, since few sums would wait for each other. sums [N, 32]
template <int N> static inline void int8_half(const Product& p, const char* w, int half, int64_t m, float* sums) {
    constexpr int CHAINS = LANES == 16 ? 1 : 8 * N * V <= SUMS ? 4 : 4 * N * V <= SUMS ? 2 : 1; // wide vectors wait for memory
    I sum[N][2][V][CHAINS] = {};
    const int32_t* x = p.whole + m * 2 * p.plane();
    for (int64_t line = 0; line < p.I / 64; line++)
#pragma GCC unroll 2
        for (int word = 0; word < WORDS; word++, x += OF_FOUR) {
            const char* at = words(w, line, half) + word * LINE;
            if (half == 0) ask(w, line, word);
            const int first = CHAINS == 4 ? word % 2 * 2 : 0, second = CHAINS == 1 ? 0 : first + 1;
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                const Shorts four = (Shorts)load<I>(at + v * 4 * LANES);
                const I even = (I)(four << 8 >> 8), odd = (I)(four >> 8);
#pragma GCC unroll 12
                for (int part = 0; part < 2 * N; part++) {
                    I* own = sum[part / 2][part % 2][v];
                    if constexpr (FOURS) {
                        I& to = own[word % CHAINS];
                        to = fours(to, (I)four, all(x[part * p.plane()]));
                    } else if (N == 1 && LANES == 16) {
                        own[0] += pairs(even, all(x[part * p.plane()])) + pairs(odd, all(x[part * p.plane() + 1]));
                    } else {
                        own[first] = pairs(own[first], even, all(x[part * p.plane()]));
                        own[second] = pairs(own[second], odd, all(x[part * p.plane() + 1]));
                    }
                }
            }
        }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < V; v++) {
            I whole[2] = {};
            for (int part = 0; part < 2; part++)
                for (int c = 0; c < CHAINS; c++) whole[part] += sum[r][part][v][c];
            store(sums + r * 2 * HALF + v * LANES, more(floats(whole[1]), floats(whole[0]), all(128.f)));
        }
}

// N rows x 16 outputs of int4 weights by sums, whose words have four inputs and those 16 further. sums [N, 32]
template <int N> static inline void by_sums(const Product& p, const char* w, const char* blocks, int64_t m, float* sums) {
    F out[N][V] = {};
    const int64_t n_blocks = p.I / 32;
    for (int64_t g = 0; g < n_blocks; g++, w += 4 * LINE, blocks += LINE) {
        I sum[N][2][V] = {};
        __builtin_prefetch(blocks + UNREAD / 4);
        for (int c = 0; c < 4; c++) {
            __builtin_prefetch(w + UNREAD + LINE * c);
            const int32_t* x = p.whole + m * 2 * p.plane() + OF_FOUR * (8 * g + c);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                const I word = load<I>(w + c * LINE + v * 4 * LANES), low = all(FOURS ? 0x0f0f0f0f : 0x000f000f);
                const I even = word & low, odd = word >> 8 & low, even_2 = word >> 4 & low, odd_2 = word >> 12 & low; // by fours even, even_2 are all
#pragma GCC unroll 4
                for (int part = 0; part < 2 * N; part++) {
                    const int32_t* own = x + part * p.plane();
                    I& to = sum[part / 2][part % 2][v];
                    if constexpr (FOURS) {
                        to = fours(fours(to, even, all(own[0])), even_2, all(own[4]));
                        continue;
                    }
                    to = pairs(pairs(to, even, all(own[0])), odd, all(own[1]));
                    to = pairs(pairs(to, even_2, all(own[8])), odd_2, all(own[9]));
                }
            }
        }
        for (int v = 0; v < V; v++) {
            const F scale = of_halves((const fp16*)blocks + v * LANES), least = of_halves((const fp16*)blocks + HALF + v * LANES);
            for (int r = 0; r < N; r++) {
                const F whole = floats((sum[r][0][v] << 7) + sum[r][1][v]); // below 2^23
                out[r][v] = more(more(out[r][v], whole, scale), least, all(p.totals[(m + r) * n_blocks + g]));
            }
        }
    }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < V; v++) store(sums + r * 2 * HALF + v * LANES, out[r][v]);
}

constexpr int DIRECT = std::min(8, SUMS / (2 * V)), WIDE = std::min(8, SUMS / (TOGETHER * V)), WHOLE = std::min(6, SUMS / (2 * V)), SUMMED = std::max(1, WHOLE / 2);

// Outputs o .. o + 31 of all rows. wide: [TOGETHER, WIDENED, 16]
template <Kind K> static void outputs(const Product& p, int64_t o, float* wide) {
    const int64_t M = p.M, I = p.I;
    const char* w = p.w + o * (K == Kind::BF16 ? 2 * I : K == Kind::INT8 ? I : I / 2);
    const char* blocks = K == Kind::INT4 || K == Kind::SUMS ? p.blocks + o * (I / 32) * 4 : nullptr;
    if (K == Kind::BF16 && M <= 2 * DIRECT) {
        in_parts<DIRECT>(0, M, [&](auto n, int64_t m) {
            alignas(64) float sums[DIRECT][2 * HALF];
            direct<n()>(p, w, m, sums[0]);
            for (int r = 0; r < n(); r++) p.put(K, sums[r], m + r, o);
        });
        return;
    }
    constexpr int64_t ROWS = 48; // whose sums are kept until both halves are there
    alignas(64) float sums[ROWS][2 * HALF];
    for (int64_t from = 0; from < M; from += ROWS) {
        const int64_t end = std::min(M, from + ROWS);
        auto at = [&](int64_t m, int half) { return sums[m - from] + HALF * half; };
        if constexpr (K == Kind::INT8)
            for (int half = 0; half < 2; half++) in_parts<WHOLE>(from, end, [&](auto n, int64_t m) { int8_half<n()>(p, w, half, m, at(m, half)); });
        else if constexpr (K == Kind::SUMS)
            for (int half = 0; half < 2; half++) {
                const int64_t apart = HALF * (I / 32);
                in_parts<SUMMED>(from, end, [&](auto n, int64_t m) { by_sums<n()>(p, w + half * HALF * I / 2, blocks + half * apart * 4, m, at(m, half)); });
            }
        else {
            memset(sums, 0, sizeof sums);
            for (int64_t i = 0; i < I; i += WIDENED)
                for (int half = 0; half < 2; half += TOGETHER) {
                    const int64_t n_in = std::min<int64_t>(WIDENED, I - i);
                    for (int h = 0; h < TOGETHER; h++) {
                        if constexpr (K == Kind::BF16) widen_bf16(w, i, n_in, half + h, wide + h * HALF * WIDENED);
                        else widen_int4(w, blocks, i, n_in, half + h, wide + h * HALF * WIDENED);
                    }
                    const bool asks = K == Kind::BF16 && from == 0;
                    in_parts<WIDE>(from, end, [&](auto n, int64_t m) {
                        from_wide<n()>(p, wide, i, n_in, asks && m == from ? words(w, (i + WIDENED) / 32, 0) + half * WIDENED * 32 : nullptr, m, at(m, half));
                    });
                }
        }
        for (int64_t m = from; m < end; m++) p.put(K, sums[m - from], m, o);
    }
}

template <Kind K> static void multiply_all(Product p, int threads) {
    // kept between calls, by address: each worker has vectors of its own
    static thread_local std::vector<float> of_x;
    constexpr bool WHOLE_NUMBERS = K == Kind::INT8 || K == Kind::SUMS;
    const int64_t row = p.I + (WHOLE_NUMBERS ? 1 + (K == Kind::SUMS ? p.I / 32 : 0) : 0);
    if ((int64_t)of_x.size() < p.M * row + LANES) of_x.resize(p.M * row + LANES);
    p.wide = of_x.data(), p.whole = (int32_t*)of_x.data(), p.x_scale = of_x.data() + p.M * p.I;
    p.totals = K == Kind::SUMS ? p.x_scale + p.M : nullptr;
    const bool together = p.M >= 32;
    for (int64_t m = 0; m < p.M && !together; m++) p.take(K, m);
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float wide[TOGETHER * WIDENED * HALF];
        if (together) {
#pragma omp for
            for (int64_t m = 0; m < p.M; m++) p.take(K, m);
        }
#pragma omp for schedule(static) nowait
        for (int64_t o = 0; o < p.O; o += 2 * HALF) outputs<K>(p, o, wide);
    }
}
}

// As linear_cpu of linear_avx512.cpp.
extern "C" void linear_any(const bf16* x, const void* w, const void* blocks, const float* scale, const bf16* bias, bf16* y, int64_t M, int64_t I, int64_t O, int64_t x_row, int gated, int by_sums, int threads) {
    const auto int4 = by_sums ? multiply_all<Kind::SUMS> : multiply_all<Kind::INT4>;
    const auto multiply = blocks ? int4 : scale ? multiply_all<Kind::INT8> : multiply_all<Kind::BF16>;
    multiply({x, (const char*)w, (const char*)blocks, scale, bias, y, M, I, O, x_row, gated != 0, nullptr, nullptr, nullptr, nullptr}, threads);
}
