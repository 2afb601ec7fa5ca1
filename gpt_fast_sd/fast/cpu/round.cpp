// What a round chooses, keeps and commits, on any CPU: verify_greedy, verify_sampled, draw, uniform and
// acceptance.commit, in one pass over each row. The layers of a step of one small row take as long as the fifty small
// operators that do this otherwise.
//
// Names: R rows (slots), V vocabulary, G drafts of a row (gamma).
#include "simd.hpp"

namespace {
constexpr int SET = 256; // tokens whose best one, or whose sum, is found together
constexpr int HALF = LANES / 2;

// argmax: the first place of the largest of x [V]; a NaN is the largest of all.
static int64_t best_token(const float* x, int64_t V) {
    float best = -std::numeric_limits<float>::infinity();
    int64_t set = 0, place;
    for (int64_t i = 0; i < V; i += SET) {
        const int64_t end = std::min(i + SET, V);
        F largest = broadcast(best);
        I nan{};
        for (place = i; place + LANES <= end; place += LANES) {
            const F s = load<F>(x + place);
            largest = larger(s, largest);
            nan |= (I)(s != s);
        }
        float here = reduce_max(largest);
        int32_t any = 0;
        for (int l = 0; l < LANES; l++) any |= nan[l];
        for (; place < end; place++) {
            here = x[place] > here ? x[place] : here;
            any |= x[place] != x[place];
        }
        if (any) {
            for (place = i; x[place] == x[place]; place++);
            return place;
        }
        if (here > best) best = here, set = i;
    }
    for (place = set; place < V && x[place] != best; place++);
    return place;
}

// sampling.uniform: a number in [0, 1) for a seed, a position and a stream; words wrap at 32 bits
static float uniform_number(uint64_t seed, uint64_t position, uint64_t stream) {
    uint32_t h = 0x9E3779B9u;
    for (uint32_t word : {(uint32_t)seed, (uint32_t)(seed >> 32 ^ stream * 0x9E3779B9u), (uint32_t)position, 0u}) {
        h ^= word;
        h ^= h >> 16, h *= 0x7FEB352Du;
        h ^= h >> 15, h *= 0x846CA68Bu;
        h ^= h >> 16;
    }
    return (float)(h >> 8) * 0x1p-24f;
}

// sampling.draw: the first token where the running sum of p [V] exceeds u of the whole
static int64_t draw_token(const float* p, float u, int64_t V) {
    static thread_local std::vector<double> ends; // running sums at the ends of sets
    ends.assign(1, 0.0);
    for (int64_t i = 0; i < V; i += SET) {
        D sums{};
        int64_t j = i;
        for (; j + HALF <= std::min(i + SET, V); j += HALF) sums += load_double(p + j);
        double sum = sum_in_order(sums);
        for (; j < std::min(i + SET, V); j++) sum += p[j];
        ends.push_back(ends.back() + sum);
    }
    const double target = (double)u * ends.back();
    if (!(target >= 0)) return 0; // NaN
    if (ends.back() == 0) return V - 1; // as if it were possible: no token is
    const int64_t above = std::upper_bound(ends.begin(), ends.end(), target) - ends.begin();
    const int64_t set = std::min<int64_t>(above, ends.size() - 1) - 1;
    double sum = ends[set];
    int64_t token = set * SET;
    for (int64_t i = set * SET; i < std::min((set + 1) * SET, V); i++) // a possible one, whatever the rounding
        if (p[i] > 0) {
            token = i, sum += p[i];
            if (sum > target) break;
        }
    return token;
}

// The residual distribution (p - q)+ [V] of p, q [V]; q null: all of it is the drafted token's. Returns whether any is
// above 0.
static bool residual(const float* p, const float* q, int64_t drafted, int64_t V, float* rest) {
    int any = 0;
    for (int64_t i = 0; i < V; i++) {
        const float x = p[i] - (q ? q[i] : (float)(i == drafted));
        rest[i] = x < 0 ? 0 : x; // NaN stays
        any |= x > 0;
    }
    return any;
}
}

// Numbers in [0, 1) for each seed [R] and position [R, T] -> [R, T]
extern "C" void uniform_any(const int64_t* seeds, const int64_t* positions, float* numbers, int64_t R, int64_t T,
                            int64_t stream) {
    for (int64_t i = 0; i < R * T; i++) numbers[i] = uniform_number(seeds[i / T], positions[i], stream);
}

// p [R, V], u [R] -> tokens [R]
extern "C" void draw_any(const float* p, const float* u, int64_t* tokens, int64_t R, int64_t V, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (R > 1)
    for (int64_t r = 0; r < R; r++) tokens[r] = draw_token(p + r * V, u[r], V);
}

// logits [R, G + 1, V], drafted [R, G], max_accept [R] -> n_accepted, next_token [R]
extern "C" void judge_greedy_any(const float* logits, const int64_t* drafted, const int64_t* max_accept,
                                 int64_t* n_accepted, int64_t* next_token, int64_t R, int64_t G, int64_t V,
                                 int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (R > 1)
    for (int64_t r = 0; r < R; r++) {
        int64_t n = 0, best;
        for (;; n++) {
            best = best_token(logits + (r * (G + 1) + n) * V, V);
            if (n >= std::min(G, max_accept[r]) || best != drafted[r * G + n]) break;
        }
        n_accepted[r] = n, next_token[r] = best;
    }
}

// p [R, G + 1, V], q [R, G, V] or null, seeds [R], seq_len [R] the position of the first; the streams that accept and
// draw -> as above
extern "C" void judge_sampled_any(const float* p, const float* q, const int64_t* drafted, const int64_t* max_accept,
                                  const int64_t* seeds, const int64_t* seq_len, int64_t* n_accepted,
                                  int64_t* next_token, int64_t accept, int64_t draw, int64_t R, int64_t G, int64_t V,
                                  int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (R > 1)
    for (int64_t r = 0; r < R; r++) {
        const int64_t limit = std::min(G, max_accept[r]), *tokens = drafted + r * G;
        const float *p_row = p + r * (G + 1) * V, *q_row = q ? q + r * G * V : nullptr;
        int64_t n = 0;
        for (; n < limit; n++) {
            const float u = uniform_number(seeds[r], seq_len[r] + n, accept);
            const float q_token = q_row ? q_row[n * V + tokens[n]] : 1.0f;
            if (!(u * q_token < p_row[n * V + tokens[n]])) break;
        }
        const float* weight = p_row + n * V;
        static thread_local std::vector<float> rest;
        if (n < limit) {
            if ((int64_t)rest.size() < V) rest.resize(V);
            if (residual(weight, q_row ? q_row + n * V : nullptr, tokens[n], V, rest.data())) weight = rest.data();
        }
        n_accepted[r] = n, next_token[r] = draw_token(weight, uniform_number(seeds[r], seq_len[r] + n, draw), V);
    }
}

// acceptance.commit: S places of history, E tokens that end a text, who [R, G] proposed them or null
// -> rows [R, 2 * G + 5]. Returns the number of rows that do not fit; if there are any, nothing is written.
extern "C" int64_t commit_any(const int64_t* drafted, const int64_t* max_accept, const int64_t* n_accepted,
                              const int64_t* next_token, const int64_t* who, const int64_t* eos_ids,
                              const bool* stop_on_eos, int64_t* seq_len, int64_t* pending, int64_t* history,
                              int64_t* remaining, bool* active, int64_t* rows, int64_t R, int64_t G, int64_t S,
                              int64_t E) {
    int64_t wrong = 0;
    for (int64_t r = 0; r < R; r++)
        wrong += n_accepted[r] < 0 || n_accepted[r] > G || seq_len[r] < 0 || seq_len[r] + G + 2 > S;
    if (wrong) return wrong;
    for (int64_t r = 0; r < R; r++) {
        const int64_t n = n_accepted[r], *from = drafted + r * G;
        int64_t *row = rows + r * (2 * G + 5), *tokens = row + 3;
        std::copy(from, from + G, tokens);
        tokens[G] = 0;
        row[2 * G + 4] = tokens[n]; // the first refused draft
        tokens[n] = next_token[r];
        for (int64_t i = 0; i < G; i++) tokens[G + 1 + i] = who ? who[r * G + i] : 0;
        int64_t emitted = 0;
        bool ended = false;
        for (; active[r] && !ended && emitted < std::min(n + 1, remaining[r]); emitted++)
            ended = stop_on_eos[r] && std::find(eos_ids, eos_ids + E, tokens[emitted]) != eos_ids + E;
        row[0] = emitted;
        row[1] = !active[r] ? 0 : emitted <= n ? emitted : max_accept[r];
        row[2] = std::min(n, emitted);
        std::copy(tokens, tokens + emitted, history + r * S + seq_len[r] + 1);
        seq_len[r] += emitted, remaining[r] -= emitted;
        if (emitted) pending[r] = tokens[emitted - 1];
        active[r] = active[r] && !ended && remaining[r] > 0;
    }
    return 0;
}
