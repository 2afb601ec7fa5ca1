// Logits to distributions, and distributions to tokens, on a CPU with AVX-512: a row stays in a core's cache.
//
// It keeps what `likeliest` keeps, except for the last bit of an exp: weights are exp in fp64 in whole units of 2**-44
// of the best token's, so their sums are exact in any order. A row's last bits depend neither on other rows nor on
// threads.
//
// Names: R rows, V vocabulary; the key of a score is the bits of -score, the better a token the smaller its key.
#include <immintrin.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

constexpr double UNIT = 17592186044416.0; // 2**44
constexpr int SET = 256;                  // tokens whose best ones, or whose sum, are recorded

struct Token { uint32_t key, place; };
static inline bool operator<(const Token& a, const Token& b) { return a.key != b.key ? a.key < b.key : a.place < b.place; }

struct Workspace { std::vector<Token> tokens; std::vector<float> best; };

// exp of 8 numbers at or below 0, to within a rounding or two of fp64; 0 below 2**-1021, NaN for NaN
static inline __m512d exp8(__m512d x) {
    const __m512d n = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(1.4426950408889634)), 8);
    __m512d r = _mm512_fnmadd_pd(n, _mm512_set1_pd(6.93147180369123816490e-01), x); // ln 2 in two parts
    r = _mm512_fnmadd_pd(n, _mm512_set1_pd(1.90821492927058770002e-10), r);
    __m512d p = _mm512_set1_pd(1.0 / 6227020800.0); // Taylor's: |r| <= 0.35, the next term is below 2**-57
    for (double c : {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0})
        p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(c));
    const __mmask8 none = _mm512_cmp_pd_mask(x, _mm512_set1_pd(-700.0), _CMP_LT_OQ);
    return _mm512_mask_mov_pd(_mm512_scalef_pd(p, n), none, _mm512_setzero_pd());
}
static inline __m512d low(__m512 x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
static inline __m512d high(__m512 x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
static inline __m512 narrow(__m512d a, __m512d b) { return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(a)), _mm512_cvtpd_ps(b), 1); }
static inline __m512i units(__m512d e) { // truncated after adding a half, as the reference rounds
    const __mmask8 number = _mm512_cmp_pd_mask(e, e, _CMP_ORD_Q);
    return _mm512_maskz_cvttpd_epi64(number, _mm512_fmadd_pd(e, _mm512_set1_pd(UNIT), _mm512_set1_pd(0.5)));
}
static inline __mmask16 upto(int64_t n) { return n >= 16 ? 0xFFFF : (__mmask16)((1u << n) - 1); }
static const __m512 NONE = _mm512_set1_ps(-std::numeric_limits<float>::infinity());

// The tokens of scores [V] at or above a bound, in the order of their places.
static int64_t list(const float* scores, int64_t V, float bound, std::vector<Token>& tokens) {
    if ((int64_t)tokens.size() < V + 16) tokens.resize(V + 16);
    const __m512i steps = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0), then = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    int64_t n = 0;
    for (int64_t i = 0; i < V; i += 16) {
        const __m512 s = _mm512_mask_loadu_ps(NONE, upto(V - i), scores + i);
        const __mmask16 here = _mm512_cmp_ps_mask(s, _mm512_set1_ps(bound), _CMP_GE_OQ) & upto(V - i);
        if (!here) continue;
        const __m512i keys = _mm512_maskz_compress_epi32(here, _mm512_and_epi32(_mm512_castps_si512(s), _mm512_set1_epi32(0x7FFFFFFF)));
        const __m512i places = _mm512_maskz_compress_epi32(here, _mm512_add_epi32(steps, _mm512_set1_epi32((int)i)));
        _mm512_storeu_si512(&tokens[n], _mm512_permutex2var_epi32(keys, first, places)); // Tokens past those that count are scratch
        _mm512_storeu_si512(&tokens[n] + 8, _mm512_permutex2var_epi32(keys, then, places));
        n += __builtin_popcount(here);
    }
    return n;
}

// The k-th best key: at or above the k-th best of many tokens' scores there are at least k tokens.
static uint32_t cut_by_count(const float* scores, int64_t V, int64_t k, Workspace& room) {
    float bound = -std::numeric_limits<float>::infinity();
    const int64_t n_best = V / SET * 16;
    if (k <= n_best) {
        room.best.resize(n_best);
        for (int64_t i = 0; i < V / SET; i++) {
            __m512 most = NONE;
            for (int j = 0; j < SET; j += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i * SET + j));
            _mm512_storeu_ps(&room.best[i * 16], most);
        }
        std::nth_element(room.best.begin(), room.best.begin() + k - 1, room.best.begin() + n_best, [](float a, float b) { return a > b; });
        bound = room.best[k - 1];
    }
    const int64_t n = list(scores, V, bound, room.tokens);
    if (n < k) return 0x7F800000; // a row with a NaN
    std::nth_element(room.tokens.begin(), room.tokens.begin() + k - 1, room.tokens.begin() + n);
    return room.tokens[k - 1].key;
}

// The weight of n tokens.
static int64_t weigh(const Token* tokens, int64_t n) {
    __m512i sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 8) {
        const __mmask8 here = (__mmask8)upto(std::min<int64_t>(n - i, 8));
        const __m256i keys = _mm512_cvtepi64_epi32(_mm512_maskz_loadu_epi64(here, tokens + i)); // a key is the low half
        const __m512d scores = _mm512_sub_pd(_mm512_setzero_pd(), _mm512_cvtps_pd(_mm256_castsi256_ps(keys)));
        sums = _mm512_mask_add_epi64(sums, here, sums, units(exp8(scores)));
    }
    return _mm512_reduce_add_epi64(sums);
}

// The last token of the smallest set that weighs top_p of those whose key is at most `most`.
static Token cut_by_weight(const float* scores, int64_t V, double top_p, uint32_t most, Workspace& room) {
    float least;
    std::memcpy(&least, &most, 4);
    least = -least;
    __m512i sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < V; i += 16) {
        const __m512 s = _mm512_mask_loadu_ps(NONE, upto(V - i), scores + i);
        const __mmask16 heavy = _mm512_cmp_ps_mask(s, _mm512_set1_ps(-32.0f), _CMP_GT_OQ); // the others weigh less than half a unit
        const __mmask16 here = _mm512_mask_cmp_ps_mask(heavy, s, _mm512_set1_ps(least), _CMP_GE_OQ);
        if (!here) continue;
        sums = _mm512_mask_add_epi64(sums, here & 255, sums, units(exp8(low(s))));
        sums = _mm512_mask_add_epi64(sums, here >> 8, sums, units(exp8(high(s))));
    }
    const int64_t total = _mm512_reduce_add_epi64(sums);
    if (total <= 0) return {most, (uint32_t)(V - 1)}; // a row with a NaN
    int64_t wanted = std::max<int64_t>((int64_t)((double)total * top_p), 1);
    int64_t n = 0;
    for (float bound = -3.0f;; bound *= 2) { // as a rule, few tokens have most of the weight
        n = list(scores, V, std::max(bound, least), room.tokens);
        if (bound <= least || weigh(room.tokens.data(), n) >= wanted) break;
    }
    Token *from = room.tokens.data(), *to = from + n;
    while (to - from > 32) {
        Token* middle = from + (to - from) / 8; // few have most of the weight
        std::nth_element(from, middle, to);
        const int64_t better = weigh(from, middle - from);
        if (better >= wanted) to = middle;
        else from = middle, wanted -= better;
    }
    std::sort(from, to);
    while (from + 1 < to && (wanted -= weigh(from, 1)) > 0) from++;
    return *from;
}

// x [V] -> scores [V]: (x - best) / temperature; returns the first place of the best one.
static int64_t score(const float* x, int64_t V, float temperature, float* scores) {
    __m512 most = NONE;
    for (int64_t i = 0; i < V; i += 16) most = _mm512_max_ps(_mm512_mask_loadu_ps(NONE, upto(V - i), x + i), most);
    const __m512 best = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    int64_t first = 0;
    for (int64_t i = V - 1 - (V - 1) % 16; i >= 0; i -= 16)
        if (const __mmask16 equal = _mm512_cmp_ps_mask(_mm512_mask_loadu_ps(NONE, upto(V - i), x + i), best, _CMP_EQ_OQ) & upto(V - i)) first = i + __builtin_ctz(equal);
    if (temperature > 0)
        for (int64_t i = 0; i < V; i += 16) {
            const __m512 s = _mm512_div_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(upto(V - i), x + i), best), _mm512_set1_ps(temperature));
            _mm512_mask_storeu_ps(scores + i, upto(V - i), s);
        }
    return first;
}

static void distribution(const float* x, int64_t V, float temperature, int64_t top_k, double top_p, double log_min_p, float* p, Workspace& room) {
    const int64_t best = score(x, V, temperature, p);
    if (!(temperature > 0)) {
        std::memset(p, 0, V * 4);
        p[best] = 1.0f;
        return;
    }
    Token cut = {0x7F800000, (uint32_t)(V - 1)};
    if (top_k < V) cut.key = cut_by_count(p, V, top_k, room);
    if (top_p < 1.0) cut = cut_by_weight(p, V, top_p, cut.key, room);
    float last, least = (float)log_min_p;
    std::memcpy(&last, &cut.key, 4);
    if ((double)least < log_min_p) least = std::nextafterf(least, 1.0f);
    const __m512 at = _mm512_set1_ps(-last), low_end = _mm512_set1_ps(least);
    const bool by_place = cut.place < V - 1;
    __m512d sums = _mm512_setzero_pd();
    for (int64_t i = 0; i < V; i += 16) {
        const __m512 s = _mm512_mask_loadu_ps(NONE, upto(V - i), p + i);
        __mmask16 gone = _mm512_cmp_ps_mask(s, at, _CMP_LT_OQ) | _mm512_cmp_ps_mask(s, low_end, _CMP_LT_OQ); // NaN stays
        if (by_place && i + 15 > cut.place) gone |= _mm512_cmp_ps_mask(s, at, _CMP_EQ_OQ) & ~upto(std::max<int64_t>((int64_t)cut.place + 1 - i, 0));
        __m512 e = _mm512_setzero_ps();
        if (gone != 0xFFFF) {
            const __m512d a = _mm512_maskz_mov_pd(~gone & 255, exp8(low(s))), b = _mm512_maskz_mov_pd((~gone >> 8) & 255, exp8(high(s)));
            sums = _mm512_add_pd(sums, _mm512_add_pd(a, b));
            e = narrow(a, b);
        }
        _mm512_mask_storeu_ps(p + i, upto(V - i), e);
    }
    const __m512 share = _mm512_set1_ps((float)(1.0 / _mm512_reduce_add_pd(sums)));
    for (int64_t i = 0; i < V; i += 16) _mm512_mask_storeu_ps(p + i, upto(V - i), _mm512_mul_ps(_mm512_maskz_loadu_ps(upto(V - i), p + i), share));
}

// logits, p [R, V]; temperature, top_k, top_p, log_min_p [R]
extern "C" void distributions_cpu(const float* logits, const float* temperature, const int64_t* top_k, const double* top_p, const double* log_min_p, float* p, int64_t R, int64_t V, int threads) {
#pragma omp parallel num_threads(threads)
    {
        static thread_local Workspace room;
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < R; r++) distribution(logits + r * V, V, temperature[r], top_k[r], top_p[r], log_min_p[r], p + r * V, room);
    }
}

// The first token where the running sum of p [R, V] exceeds u [R] of the whole -> tokens [R]
extern "C" void draw_cpu(const float* p, const float* u, int64_t* tokens, int64_t R, int64_t V, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t r = 0; r < R; r++) {
        const float* row = p + r * V;
        static thread_local std::vector<double> ends; // running sums at the ends of sets
        ends.assign(1, 0.0);
        for (int64_t i = 0; i < V; i += SET) {
            __m512d sums = _mm512_setzero_pd();
            for (int64_t j = i; j < std::min(i + SET, V); j += 16) {
                const __m512 s = _mm512_maskz_loadu_ps(upto(V - j), row + j);
                sums = _mm512_add_pd(sums, _mm512_add_pd(low(s), high(s)));
            }
            ends.push_back(ends.back() + _mm512_reduce_add_pd(sums));
        }
        const double target = (double)u[r] * ends.back();
        const int64_t set = std::min<int64_t>(std::upper_bound(ends.begin(), ends.end(), target) - ends.begin(), ends.size() - 1) - 1;
        double sum = ends[set];
        int64_t token = set * SET;
        for (int64_t i = set * SET; i < std::min((set + 1) * SET, V); i++) // a possible one, whatever the rounding
            if (row[i] > 0) {
                token = i, sum += row[i];
                if (sum > target) break;
            }
        tokens[r] = token;
    }
}
