// Logits to distributions on any CPU: a row stays in a core's cache.
//
// It keeps what `likeliest` keeps, except for the last bit of an exp: weights are exp in fp64, in multiples of 2**-44
// of the best token's, so their sums are exact in any order. A row's last bits depend neither on other rows nor on
// threads.
//
// Names: R rows, V vocabulary; the key of a score is the bits of -score, the better a token the smaller its key.
#include "simd.hpp"

namespace {
constexpr double UNIT = 17592186044416.0; // 2**44
constexpr int SET = 256; // tokens whose best ones, or whose sum, are recorded
constexpr int SOME = 64; // tokens that are skipped together if none matters
constexpr int HALF = LANES / 2;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

typedef int64_t L __attribute__((vector_size(4 * LANES)));
typedef int32_t FewI __attribute__((vector_size(2 * LANES)));

struct Token { uint32_t key, place; };
static inline bool operator<(const Token& a, const Token& b) {
    return a.key != b.key ? a.key < b.key : a.place < b.place;
}

struct Workspace { std::vector<Token> tokens; std::vector<float> scores, best; };

static inline D broadcast(double x) { return x - D{}; }
// exp of x at or below 0, to within a rounding or two of fp64; 0 below 2**-1009, NaN for NaN
static inline D exp_double(D x) {
    const D magic = broadcast(6755399441055744.0); // 1.5 * 2**52: adding it rounds to whole numbers, in the lowest bits
    const D shifted = fmadd(magic, x, broadcast(1.4426950408889634)), n = shifted - magic;
    D r = fmadd(x, n, broadcast(-6.93147180369123816490e-01)); // ln 2 in two parts
    r = fmadd(r, n, broadcast(-1.90821492927058770002e-10));
    D p = broadcast(1.0 / 6227020800.0); // Taylor's: |r| <= 0.35, the next term is below 2**-57
    for (double c : {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0,
                     1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0})
        p = fmadd(broadcast(c), p, r);
    return x < -700.0 ? D{} : p * (D)(((L)shifted + 1023) << 52);
}
// In multiples of 1 / UNIT, truncated after adding a half, as the reference rounds; 0 for NaN.
static inline L to_units(D e) {
    const D magic = broadcast(4503599627370496.0); // 2**52
    const D x = fmadd(broadcast(0.5), e, broadcast(UNIT)), near = x + magic;
    return ((L)near - (L)magic + (L)(near - magic > x)) & (L)(e == e); // a comparison's true is -1
}

// The largest of n scores, of which NaN is none; n is a multiple of LANES.
static inline float max_of(const float* scores, int n) {
    F best = broadcast(LOWEST);
    for (int i = 0; i < n; i += LANES) best = larger(load<F>(scores + i), best);
    return reduce_max(best);
}

// The tokens of scores [V] at or above a bound, in the order of their places.
static int64_t list_tokens(const float* scores, int64_t V, float bound, std::vector<Token>& tokens) {
    if ((int64_t)tokens.size() < V + 1) tokens.resize(V + 1);
    int64_t n = 0;
    for (int64_t i = 0; i < V; i += SOME) {
        if (bound > LOWEST && max_of(scores + i, SOME) < bound) continue;
        for (int64_t j = i; j < std::min(i + SOME, V); j++) {
            tokens[n] = {load<uint32_t>(scores + j) & 0x7FFFFFFF, (uint32_t)j}; // the one past the last is scratch
            n += scores[j] >= bound;
        }
    }
    return n;
}

// The k-th best key: at or above the k-th best of many tokens' scores there are at least k tokens.
static uint32_t cut_by_count(const float* scores, int64_t V, int64_t k, Workspace& scratch) {
    float bound = LOWEST;
    const int64_t n_best = V / SET * LANES;
    if (k <= n_best) {
        scratch.best.resize(n_best);
        for (int64_t i = 0; i < V / SET; i++) {
            F best = broadcast(LOWEST);
            for (int j = 0; j < SET; j += LANES) best = larger(load<F>(scores + i * SET + j), best);
            store(&scratch.best[i * LANES], best);
        }
        const auto first = scratch.best.begin();
        std::nth_element(first, first + k - 1, first + n_best, [](float a, float b) { return a > b; });
        bound = scratch.best[k - 1];
    }
    const int64_t n = list_tokens(scores, V, bound, scratch.tokens);
    std::nth_element(scratch.tokens.begin(), scratch.tokens.begin() + k - 1, scratch.tokens.begin() + n);
    return scratch.tokens[k - 1].key;
}

// The weight of n tokens.
static int64_t weight_of(const Token* tokens, int64_t n) {
    L sums{};
    const auto add = [&](const Token* from) {
        const FewI keys = __builtin_convertvector(load<L>(from), FewI); // a key is the low half
        sums += to_units(exp_double(-__builtin_convertvector((HalfF)keys, D)));
    };
    int64_t i = 0;
    for (; i + HALF <= n; i += HALF) add(tokens + i);
    if (i < n) {
        Token last[HALF];
        std::fill(std::copy(tokens + i, tokens + n, last), last + HALF, Token{0x7F800000, 0}); // of no weight
        add(last);
    }
    return sum_in_order(sums);
}

// The last token of the smallest set that weighs top_p of those whose key is at most max_key.
static Token cut_by_weight(const float* scores, int64_t V, double top_p, uint32_t max_key, Workspace& scratch) {
    const float least = -load<float>(&max_key); // the lowest of their scores
    const float light = std::max(least, -32.0f); // what is below weighs less than half a unit
    L sums{};
    for (int64_t i = 0; i < V; i += SOME) {
        if (max_of(scores + i, SOME) < light) continue;
        for (int j = 0; j < SOME; j += HALF) {
            const D s = load_double(scores + i + j);
            sums += to_units(exp_double(s)) & (L)(s >= (double)light);
        }
    }
    const int64_t whole = sum_in_order(sums);
    int64_t wanted = std::max<int64_t>((int64_t)((double)whole * top_p), 1);
    int64_t n = 0;
    for (float bound = -3.0f;; bound *= 2) { // as a rule, few tokens have most of the weight
        n = list_tokens(scores, V, std::max(bound, least), scratch.tokens);
        if (bound <= least || weight_of(scratch.tokens.data(), n) >= wanted) break;
    }
    Token *from = scratch.tokens.data(), *to = from + n;
    while (to - from > 32) {
        Token* middle = from + (to - from) / 8; // few have most of the weight
        std::nth_element(from, middle, to);
        const int64_t better = weight_of(from, middle - from);
        if (better >= wanted) to = middle;
        else from = middle, wanted -= better;
    }
    std::sort(from, to);
    while (from + 1 < to && (wanted -= weight_of(from, 1)) > 0) from++;
    return *from;
}

// The first place of the best of logits [V], of which NaN is none.
static int64_t first_best(const float* x, int64_t V) {
    float best = LOWEST;
    int64_t set = 0, place = 0;
    for (int64_t i = 0; i < V; i += SET) {
        float here = i + SET <= V ? max_of(x + i, SET) : LOWEST;
        if (i + SET > V)
            for (int64_t j = i; j < V; j++) here = x[j] > here ? x[j] : here;
        if (here > best) best = here, set = i;
    }
    for (place = set; place < V && x[place] != best; place++);
    return place < V ? place : 0;
}

// x [V] -> scores [V], (x - best) / temperature, and -inf up to whole sets of SOME; whether all are numbers.
static bool score(const float* x, int64_t V, float best, float temperature, float* scores) {
    I nan{};
    for (int64_t i = 0; i < V; i += LANES) {
        F s = broadcast(LOWEST);
        if (i + LANES <= V) s = load<F>(x + i);
        else memcpy(&s, x + i, (V - i) * 4);
        s = (s - best) / temperature;
        nan |= (I)(s != s);
        store(scores + i, s);
    }
    for (int64_t i = V; i < (V + SOME - 1) / SOME * SOME; i++) scores[i] = LOWEST;
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= nan[i];
    return !any;
}

static void distribution(const float* x, int64_t V, float temperature, int64_t top_k, double top_p, double log_min_p,
                         float* p, Workspace& scratch) {
    const int64_t best = first_best(x, V);
    if (!(temperature > 0)) {
        memset(p, 0, V * 4);
        p[best] = 1.0f;
        return;
    }
    if ((int64_t)scratch.scores.size() < V + SOME) scratch.scores.resize(V + SOME);
    float* scores = scratch.scores.data();
    if (!score(x, V, x[best], temperature, scores)) {
        std::fill(p, p + V, std::numeric_limits<float>::quiet_NaN());
        return;
    }
    Token cut = {0x7F800000, (uint32_t)(V - 1)};
    if (top_k < V) cut.key = cut_by_count(scores, V, top_k, scratch);
    if (top_p < 1.0) cut = cut_by_weight(scores, V, top_p, cut.key, scratch);
    const float at = -load<float>(&cut.key);
    float least = (float)log_min_p;
    if ((double)least < log_min_p) least = std::nextafterf(least, 1.0f);
    for (int64_t i = (int64_t)cut.place + 1; i < V; i++) scores[i] = scores[i] == at ? LOWEST : scores[i];
    least = std::max(least, at);
    D sums{};
    for (int64_t i = 0; i < V; i += SOME) {
        if (max_of(scores + i, SOME) < least) {
            memset(scores + i, 0, SOME * 4);
            continue;
        }
        for (int j = 0; j < SOME; j += HALF) {
            const D s = load_double(scores + i + j), e = s >= (double)least ? exp_double(s) : D{};
            sums += e;
            store(scores + i + j, __builtin_convertvector(e, HalfF));
        }
    }
    const float share = (float)(1.0 / sum_in_order(sums));
    for (int64_t i = 0; i < V; i++) p[i] = scores[i] * share;
}
}

// logits, p [R, V]; temperature, top_k, top_p, log_min_p [R]
extern "C" void distributions_any(const float* logits, const float* temperature, const int64_t* top_k,
                                  const double* top_p, const double* log_min_p, float* p, int64_t R, int64_t V,
                                  int threads) {
#pragma omp parallel num_threads(threads)
    {
        static thread_local Workspace scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < R; r++)
            distribution(logits + r * V, V, temperature[r], top_k[r], top_p[r], log_min_p[r], p + r * V, scratch);
    }
}
