// What a round chooses, keeps and commits, on any CPU: verify_greedy, verify_sampled, draw, uniform and
// BatchState.commit, in one pass over each row. The layers of a step of one small row take as long as the fifty small
// operators that do this otherwise.
//
// Names: R rows (slots), V vocabulary, G drafts of a row (gamma).
namespace {
constexpr int SET = 256; // tokens whose best one, or whose sum, is found together
constexpr int HALF = LANES / 2;

// argmax: the first place of the largest of x [V]; a NaN is the largest of all.
static int64_t best_token(const float* x, int64_t V) {
    float most = -std::numeric_limits<float>::infinity();
    int64_t set = 0, place;
    for (int64_t i = 0; i < V; i += SET) {
        const int64_t end = std::min(i + SET, V);
        F best = all(most);
        I strange{};
        for (place = i; place + LANES <= end; place += LANES) {
            const F s = load<F>(x + place);
            best = larger(s, best);
            strange |= (I)(s != s);
        }
        float here = largest(best);
        int32_t any = 0;
        for (int l = 0; l < LANES; l++) any |= strange[l];
        for (; place < end; place++) {
            here = x[place] > here ? x[place] : here;
            any |= x[place] != x[place];
        }
        if (any) {
            for (place = i; x[place] == x[place]; place++);
            return place;
        }
        if (here > most) most = here, set = i;
    }
    for (place = set; place < V && x[place] != most; place++);
    return place;
}

// sampling.uniform: a number in [0, 1) for a seed, a position and a stream; words wrap at 32 bits
static float number_of(uint64_t seed, uint64_t position, uint64_t stream) {
    uint32_t h = 0x9E3779B9u;
    for (uint32_t word : {(uint32_t)seed, (uint32_t)(seed >> 32), (uint32_t)position, (uint32_t)stream}) {
        h ^= word;
        h ^= h >> 16, h *= 0x7FEB352Du;
        h ^= h >> 15, h *= 0x846CA68Bu;
        h ^= h >> 16;
    }
    return (float)(h >> 8) * 0x1p-24f;
}

// sampling.draw: the first token where the running sum of p [V] exceeds u of the whole
static int64_t drawn(const float* p, float u, int64_t V) {
    static thread_local std::vector<double> ends; // running sums at the ends of sets
    ends.assign(1, 0.0);
    for (int64_t i = 0; i < V; i += SET) {
        D sums{};
        int64_t j = i;
        for (; j + HALF <= std::min(i + SET, V); j += HALF) sums += doubles(p + j);
        double sum = total(sums);
        for (; j < std::min(i + SET, V); j++) sum += p[j];
        ends.push_back(ends.back() + sum);
    }
    const double target = (double)u * ends.back();
    if (!(target >= 0)) return 0; // NaN
    if (ends.back() == 0) return V - 1; // as if it were possible: no token is
    const int64_t set = std::min<int64_t>(std::upper_bound(ends.begin(), ends.end(), target) - ends.begin(), ends.size() - 1) - 1;
    double sum = ends[set];
    int64_t token = set * SET;
    for (int64_t i = set * SET; i < std::min((set + 1) * SET, V); i++) // a possible one, whatever the rounding
        if (p[i] > 0) {
            token = i, sum += p[i];
            if (sum > target) break;
        }
    return token;
}

// What a token drawn from p [V] has over what it was drafted with: (p - q)+ [V] of q [V], or of a q that is one token's
// alone (q null). Whether it has anything.
static bool residual(const float* p, const float* q, int64_t drafted, int64_t V, float* left) {
    int any = 0;
    for (int64_t i = 0; i < V; i++) {
        const float x = p[i] - (q ? q[i] : (float)(i == drafted));
        left[i] = x < 0 ? 0 : x; // NaN stays
        any |= x > 0;
    }
    return any;
}
}

// Numbers in [0, 1) for each seed [R] and position [R, T] -> [R, T]
extern "C" void uniform_any(const int64_t* seeds, const int64_t* positions, float* numbers, int64_t R, int64_t T, int64_t stream) {
    for (int64_t i = 0; i < R * T; i++) numbers[i] = number_of(seeds[i / T], positions[i], stream);
}

// p [R, V], u [R] -> tokens [R]
extern "C" void draw_any(const float* p, const float* u, int64_t* tokens, int64_t R, int64_t V, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (R > 1)
    for (int64_t r = 0; r < R; r++) tokens[r] = drawn(p + r * V, u[r], V);
}

// logits [R, G + 1, V], drafted [R, G], max_accept [R] -> n_accepted, next_token [R]
extern "C" void judge_greedy_any(const float* logits, const int64_t* drafted, const int64_t* max_accept, int64_t* n_accepted, int64_t* next_token, int64_t R, int64_t G, int64_t V, int threads) {
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

// p [R, G + 1, V], q [R, G, V] or null, seeds [R], seq_len [R] the position of the first -> the same
extern "C" void judge_sampled_any(const float* p, const float* q, const int64_t* drafted, const int64_t* max_accept, const int64_t* seeds, const int64_t* seq_len, int64_t* n_accepted, int64_t* next_token, int64_t accept, int64_t own, int64_t R, int64_t G, int64_t V,
                                  int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (R > 1)
    for (int64_t r = 0; r < R; r++) {
        const int64_t most = std::min(G, max_accept[r]), *tokens = drafted + r * G;
        const float *of = p + r * (G + 1) * V, *by = q ? q + r * G * V : nullptr;
        int64_t n = 0;
        for (; n < most; n++)
            if (!(number_of(seeds[r], seq_len[r] + n, accept) * (by ? by[n * V + tokens[n]] : 1.0f) < of[n * V + tokens[n]])) break;
        const float* weight = of + n * V;
        static thread_local std::vector<float> left;
        if (n < most) {
            if ((int64_t)left.size() < V) left.resize(V);
            if (residual(weight, by ? by + n * V : nullptr, tokens[n], V, left.data())) weight = left.data();
        }
        n_accepted[r] = n, next_token[r] = drawn(weight, number_of(seeds[r], seq_len[r] + n, own), V);
    }
}

// BatchState.commit: S places of history, E tokens that end a text, who [R, G] proposed them or null
// -> rows [R, 2 * G + 5]. The number of rows that do not fit; if there are any, nothing is written.
extern "C" int64_t commit_any(const int64_t* drafted, const int64_t* max_accept, const int64_t* n_accepted, const int64_t* next_token, const int64_t* who, const int64_t* eos_ids, const bool* stop_on_eos, int64_t* seq_len, int64_t* pending, int64_t* history, int64_t* remaining,
                           bool* active, int64_t* rows, int64_t R, int64_t G, int64_t S, int64_t E) {
    int64_t wrong = 0;
    for (int64_t r = 0; r < R; r++) wrong += n_accepted[r] < 0 || n_accepted[r] > G || seq_len[r] < 0 || seq_len[r] + G + 2 > S;
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
