// All layers of a Llama in one call: what model/llama.py says, for models whose weights are packed and whose attention
// is that of the kernels beside this file, which it calls. What lies between them are loops over few numbers, for which
// leaving and entering Python takes longer than computing.
//
// Numbers are rounded to bf16 where the model's own tensors are, so a row's results depend on that row alone.
//
// Names: L layers, B batch, T tokens a row, M = B * T, D width, N query heads, K kv heads, G = N / K, H head dim, F
// feed-forward width, S positions of the cache, C entries listed, W entries of the window.
#include "simd.hpp"
#include "attention.hpp"

// These four are laid out by layers.py, too.
struct Linear {
    LinearKernel* multiply;
    const void *packed, *blocks;
    const float* scale;
    const bf16* bias;
    int64_t I, O, by_sums;
};
struct Layer {
    const bf16 *attention_norm, *ffn_norm, *q_norm, *k_norm;
    Linear wqkv, wo, w_in, w_out;
};
struct Cached {
    void *k, *v;
    fp16 *k_scale, *v_scale;
    uint8_t *k_low, *v_low;
    const int64_t* listed; // [B, K, C]
    int64_t window; // see AttentionCall
};
struct LayersCall {
    int64_t L, B, T, D, N, K, H, V, S;
    int64_t kv_b, kv_k, scale_b, scale_k, tail, fine; // of every layer's cache
    Dtype k_dtype;
    int64_t n_keys, is_listed, C, W; // in view, or listed and of the window
    const int64_t *tokens, *pos, *window_start;
    const bf16 *embedding, *norm;
    const float* freqs;
    AttentionKernel* attend;
    const Layer* layers;
    const Cached* caches;
    bf16* out; // [M, D]
    float* mass; // [L, B, K, n_keys / 16]
    int64_t* spent; // nanoseconds in products, in attention, in all; or null
    int64_t embedding_is_packed, threads;
    double eps, rope_length;
};
static_assert(sizeof(void*) == 8 && sizeof(Layer) == 36 * 8 && sizeof(Cached) == 8 * 8 && sizeof(LayersCall) == 36 * 8);

namespace {
// n is a multiple of 16, and so of LANES.
static inline void widen(const bf16* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store(to + i, load_bf16(from + i));
}
static inline void narrow(const float* from, bf16* to, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store_bf16(to + i, load<F>(from + i));
}

// RMSNorm: x / rms(x), rounded, times the weight, rounded. x is fp32.
static void norm(const float* x, const bf16* weight, int64_t n, double eps, bf16* to) {
    F squares{};
    for (int64_t i = 0; i < n; i += LANES) squares = fmadd(squares, load<F>(x + i), load<F>(x + i));
    const float by = 1.f / std::sqrt(reduce_sum(squares) / (float)n + (float)eps);
    for (int64_t i = 0; i < n; i += LANES) store_bf16(to + i, load<F>(x + i) * by);
    for (int64_t i = 0; i < n; i += LANES) store_bf16(to + i, load_bf16(to + i) * load_bf16(weight + i));
}

// Rotate each pair (i, i + H / 2) of a head by its angle.
static void rotate(float* x, const float* cos, const float* sin, int64_t H) {
    int64_t i = 0;
    auto rotated = [&]<class V>(V) {
        for (; i + (int64_t)(sizeof(V) / sizeof *x) <= H / 2; i += sizeof(V) / sizeof *x) {
            const V a = load<V>(x + i), b = load<V>(x + i + H / 2), c = load<V>(cos + i), s = load<V>(sin + i);
            store(x + i, a * c - b * s), store(x + i + H / 2, b * c + a * s);
        }
    };
    rotated(F{}), rotated(0.f);
}

// Store a key or value x into the cache, rounded as by as_int8 and as_planes of model/cache.py.
static void store_to_cache(const LayersCall& a, const bf16* x, void* to, fp16* scales, uint8_t* lower, int64_t place,
                           int64_t scale_place) {
    const int64_t H = a.H;
    if (!scales) {
        memcpy((bf16*)to + place * H, x, 2 * H);
        return;
    }
    float largest = 0.f, n_nan = 0.f;
    for (int64_t i = 0; i < H; i++) {
        const float y = bf16_to_float(x[i]);
        largest = std::max(largest, std::fabs(y)), n_nan += y == y ? 0.f : 1.f;
    }
    float scale = std::min(std::max(largest, 1e-5f), 127 * 65504.f) / 127;
    if (scale < 0x1p-14f) scale = std::ceil(scale / 0x1p-24f) * 0x1p-24f;
    alignas(64) float lanes[LANES] = {n_nan > 0.f ? std::numeric_limits<float>::quiet_NaN() : scale};
    fp16 halves[LANES];
    store_fp16(halves, load<F>(lanes));
    scales[scale_place] = halves[0];
    const float by = n_nan > 0.f ? 1.f : fp16_to_float(halves[0]);
    auto number = [&](int64_t i) {
        const float y = bf16_to_float(x[i]) / by;
        return (int8_t)(y == y ? std::min(std::max(std::nearbyint(y), -127.f), 127.f) : 0.f);
    };
    if (!lower) {
        for (int64_t i = 0; i < H; i++) ((int8_t*)to)[place * H + i] = number(i);
        return;
    }
    for (int64_t i = 0; i < H / 2; i++) {
        const uint8_t first = (uint8_t)number(i) ^ 0x80, second = (uint8_t)number(i + H / 2) ^ 0x80;
        ((uint8_t*)to)[place * (H / 2) + i] = (uint8_t)(first >> 4 | (second & 0xf0));
        lower[place * (H / 2) + i] = (uint8_t)((first & 15) | second << 4);
    }
}

// Element i of row o of the embedding, packed by linear.py's `pack` or not.
static inline bf16 embedding_at(const LayersCall& a, int64_t o, int64_t i) {
    if (!a.embedding_is_packed) return a.embedding[o * a.D + i];
    const int64_t block = (o / 32 * (a.D / 32) + i / 32) * 2 + o % 32 / 16;
    return a.embedding[((block * 16 + i % 32 / 2) * 16 + o % 16) * 2 + i % 2];
}

struct Step {
    const LayersCall& a;
    const int64_t M = a.B * a.T, G = a.N / a.K, n_listed = a.C + a.W;
    float *cos = nullptr, *sin = nullptr; // [M, H / 2]
    int64_t *index = nullptr, *limit = nullptr; // [B, K, C + W], [B, T]
    bf16 *h = nullptr, *qkv = nullptr, *q = nullptr; // of all rows, as are the next
    bf16 *attended = nullptr, *by_token = nullptr, *gated = nullptr, *y = nullptr;
    std::unique_ptr<char[]> memory; // of all these
    const bool in_parallel = M >= 16;

    explicit Step(const LayersCall& call) : a(call) {
        const Layer& first = a.layers[0];
        size_t bytes = 64;
        for (int pass = 0; pass < 2; pass++) { // the size, then the addresses
            char* next = pass ? (char*)(((uintptr_t)memory.get() + 63) / 64 * 64) : nullptr;
            auto allocate = [&](auto*& part, int64_t n) {
                const size_t size = (n * sizeof *part + 63) / 64 * 64;
                if (pass) part = (std::decay_t<decltype(part)>)next, next += size;
                else bytes += size;
            };
            allocate(cos, M * (a.H / 2)), allocate(sin, M * (a.H / 2));
            allocate(h, M * a.D), allocate(qkv, M * first.wqkv.O), allocate(q, M * a.N * a.H);
            allocate(attended, M * a.N * a.H), allocate(by_token, M * a.N * a.H);
            allocate(gated, M * first.w_out.I), allocate(y, M * a.D);
            if (a.is_listed) allocate(index, a.B * a.K * n_listed), allocate(limit, M);
            if (!pass) memory.reset(new (std::nothrow) char[bytes]);
            if (!memory) return;
        }
    }

    template <class Body> void timed(int what, const Body& body) const {
        using namespace std::chrono;
        if (!a.spent) return body();
        const auto begun = steady_clock::now();
        body();
        a.spent[what] += duration_cast<nanoseconds>(steady_clock::now() - begun).count();
    }
    template <class Body> void for_rows(const Body& body) const {
#pragma omp parallel for num_threads(a.threads) if (in_parallel)
        for (int64_t m = 0; m < M; m++) body(m);
    }
    void multiply(const Linear& by, const bf16* x, bf16* to, bool gate = false) const {
        timed(0, [&] {
            by.multiply(x, by.packed, by.blocks, by.scale, by.bias, to, M, by.I, by.O, by.I, gate, (int)by.by_sums,
                        (int)a.threads);
        });
    }

    // Embed the tokens and compute their angles. Returns 1 for a token and 2 for a position that does not exist, 3 for
    // want of memory; then nothing is read or written.
    int begin() {
        if (!memory) return 3;
        for (int64_t m = 0; m < M; m++) {
            if (a.tokens[m] < 0 || a.tokens[m] >= a.V) return 1;
            if (a.pos[m] < 0 || a.pos[m] >= a.S) return 2;
        }
        for_rows([&](int64_t m) {
            for (int64_t i = 0; i < a.D; i++) a.out[m * a.D + i] = embedding_at(a, a.tokens[m], i);
            for (int64_t i = 0; i < a.H / 2; i++) {
                const float angle = (float)a.pos[m] * a.freqs[i];
                cos[m * (a.H / 2) + i] = std::cos(angle) * (float)a.rope_length;
                sin[m * (a.H / 2) + i] = std::sin(angle) * (float)a.rope_length;
            }
            if (a.is_listed) limit[m] = a.pos[m] < a.n_keys ? a.pos[m] : -1;
        });
        for (int64_t bk = 0; bk < (a.is_listed ? a.B * a.K : 0); bk++)
            for (int64_t w = 0; w < a.W; w++) index[bk * n_listed + a.C + w] = a.window_start[bk / a.K] + w;
        return 0;
    }

    // Norm of the residual stream, which is in a.out.
    void norm_residual(const bf16* weight, bf16* to) const {
        for_rows([&](int64_t m) {
            std::vector<float>& x = row();
            widen(a.out + m * a.D, x.data(), a.D);
            norm(x.data(), weight, a.D, a.eps, to + m * a.D);
        });
    }
    void add_to_residual() const {
        for_rows([&](int64_t m) {
            bf16* to = a.out + m * a.D;
            for (int64_t i = 0; i < a.D; i += LANES)
                store_bf16(to + i, load_bf16(to + i) + load_bf16(y + m * a.D + i));
        });
    }
    std::vector<float>& row() const { // of this thread
        static thread_local std::vector<float> kept;
        if ((int64_t)kept.size() < std::max(a.D, a.H)) kept.resize(std::max(a.D, a.H));
        return kept;
    }

    void layer(int64_t l) {
        const Layer& by = a.layers[l];
        const Cached& cache = a.caches[l];
        norm_residual(by.attention_norm, h);
        multiply(by.wqkv, h, qkv);
        for_rows([&](int64_t m) { // [K, G + 2, H]: rotate queries and key, store key and value
            float* x = row().data();
            const float *cos_m = cos + m * (a.H / 2), *sin_m = sin + m * (a.H / 2);
            const int64_t b = m / a.T, place = a.pos[m];
            for (int64_t head = 0; head < a.K * (G + 2); head++) {
                const int64_t k = head / (G + 2), g = head % (G + 2);
                bf16* from = qkv + (m * a.K * (G + 2) + head) * a.H;
                bf16* to = g < G ? q + (m * a.N + k * G + g) * a.H : from;
                if (g <= G) {
                    const bf16* weight = g < G ? by.q_norm : by.k_norm;
                    widen(from, x, a.H);
                    if (weight) norm(x, weight, a.H, a.eps, from), widen(from, x, a.H);
                    rotate(x, cos_m, sin_m, a.H);
                    narrow(x, to, a.H);
                }
                if (g < G) continue;
                const int64_t entry = cache.k_low ? a.H / 2 : a.H, at = (b * a.kv_b + k * a.kv_k) / entry + place;
                const int64_t scale_at = b * a.scale_b + k * a.scale_k + place;
                if (g == G) store_to_cache(a, to, cache.k, cache.k_scale, cache.k_low, at, scale_at);
                else store_to_cache(a, to, cache.v, cache.v_scale, cache.v_low, at, scale_at);
            }
        });
        timed(1, [&] { attend(cache, a.mass ? a.mass + l * a.B * a.K * (a.n_keys / 16) : nullptr); });
        if (a.T > 1) // [B, N, T, H] -> [B, T, N, H]
            for_rows([&](int64_t m) {
                for (int64_t n = 0; n < a.N; n++) {
                    const bf16* from = attended + ((m / a.T * a.N + n) * a.T + m % a.T) * a.H;
                    memcpy(by_token + (m * a.N + n) * a.H, from, 2 * a.H);
                }
            });
        multiply(by.wo, a.T > 1 ? by_token : attended, y);
        add_to_residual();
        norm_residual(by.ffn_norm, h);
        multiply(by.w_in, h, gated, true);
        multiply(by.w_out, gated, y);
        add_to_residual();
    }

    void attend(const Cached& cache, float* mass) {
        for (int64_t bk = 0; bk < (a.is_listed ? a.B * a.K : 0); bk++)
            for (int64_t c = 0; c < a.C; c++) {
                const int64_t entry = cache.listed[bk * a.C + c];
                index[bk * n_listed + c] = entry < a.window_start[bk / a.K] ? entry : -1;
            }
        AttentionCall call{};
        call.q = q, call.out = attended, call.mass = mass;
        call.k = cache.k, call.k_scale = cache.k_scale, call.k_low = cache.k_low;
        call.v = cache.v, call.v_scale = cache.v_scale, call.v_low = cache.v_low;
        call.pos = a.is_listed ? limit : a.pos, call.index = a.is_listed ? index : nullptr;
        call.B = a.B, call.K = a.K, call.G = G, call.T = a.T, call.M = a.is_listed ? n_listed : a.n_keys, call.S = a.S;
        call.q_b = a.T * a.N * a.H, call.q_n = a.H, call.q_t = a.N * a.H, call.kv_b = a.kv_b, call.kv_k = a.kv_k;
        call.scale_b = a.scale_b, call.scale_k = a.scale_k, call.tail = a.tail, call.window = cache.window;
        call.q_dtype = BF16, call.k_dtype = a.k_dtype, call.fine = a.fine;
        call.scale = (float)std::pow((double)a.H, -0.5), call.threads = (int)a.threads;
        a.attend(&call);
    }
};
}

// Tokens [B, T] at pos [B, T] -> normed final states [M, D] in call->out. 1 for a token, 2 for a position that does not
// exist, 3 for want of memory: then nothing was done.
extern "C" int layers_any(const LayersCall* call) {
    Step step(*call);
    int wrong = 0;
    step.timed(2, [&] {
        if ((wrong = step.begin())) return;
        for (int64_t l = 0; l < call->L; l++) step.layer(l);
        step.norm_residual(call->norm, call->out);
    });
    return wrong;
}
