// Attention of a few query rows over keys of any dtype and head dim, on any CPU: see cpu_attention.cpp for the method,
// and for what both do alike. There the products are those of one instruction set; here they are fp32, of keys and
// values that are widened a tile at a time, so the dtype of the cache costs loading it and no body of its own.
//
// Scores have a dim in every lane until LANES keys are summed together; outputs have a dim in every lane throughout.
// Neither asks how many rows there are.
//
// Names: B batch, K kv heads, G query heads a kv head, T queries a head, R = G * T rows of one kv head, H head dim,
// S capacity, M keys in view or entries listed.
namespace {
constexpr int H = HEAD_DIM, VECTORS = H / LANES;
static_assert(H % 16 == 0 && H <= 256);
constexpr int TILE = H > 128 ? 32 : 64, PAGE = 16, PAGES = TILE / PAGE, SPLIT = 2048;
constexpr float LOWEST = -0x1p126f; // finite, so that the difference of two is no NaN; scaled it stays exact
constexpr float LEAST = -100.f; // of a weight's logarithm; less counts as 0: what it is multiplied by may be small, too
constexpr int32_t NOWHERE = std::numeric_limits<int32_t>::max();
constexpr int part(int n, int most) { // the largest divisor of n that is not above most
    while (n % most) most--;
    return most;
}
constexpr int MANY = 8; // rows that take so long that the next tile is better asked for; few only read, in order
constexpr int AT_ONCE = REGISTERS == 32 ? 16 : 8; // sums that stay in registers

struct Query { // while a split is read
    alignas(64) float q[H], weight[TILE];
};
struct Row { // one query of a split
    alignas(64) float out[H], sum[LANES];
    float max, to_log2; // to_log2: times a score, whose exp2 is its weight
    int32_t limit; // last position it may see
};

struct Tile {
    const float *key, *value; // [TILE, H]
    alignas(64) float key_scale[TILE], value_scale[TILE];
    alignas(64) int32_t position[TILE]; // NOWHERE: does not exist
    int n; // entries from n on do not exist
    const char *next_key, *next_value; // what the next tile reads, so many bytes of each: 0 if it is not in one piece
    int64_t next;
};

template <class T, F (*WIDE)(const T*)> static inline void widen_all(const void* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store(to + i, WIDE((const T*)from + i));
}
static inline void widen(Dtype dtype, const void* from, float* to, int64_t n) {
    if (dtype == BF16) widen_all<bf16, widened>(from, to, n);
    else if (dtype == FP16) widen_all<fp16, of_halves>(from, to, n);
    else if (dtype == INT8) widen_all<int8_t, of_bytes>(from, to, n);
    else memcpy(to, from, 4 * n);
}

// An entry of two planes, see planes.py: a byte of the upper one has the upper nibbles of dims i and i + H / 2. Without
// the lower plane its nibble counts as 7.5, in the middle of what it may be.
static void join(const uint8_t* upper, const uint8_t* lower, float* to) {
    int i = 0;
    for (; i + LANES <= H / 2; i += LANES) {
        const I up = whole_bytes((const int8_t*)upper + i), low = lower ? whole_bytes((const int8_t*)lower + i) : I{};
        store(to + i, floats(16 * (up & 15) - 128) + (lower ? floats(low & 15) : all(7.5f)));
        store(to + i + H / 2, floats(16 * (up >> 4 & 15) - 128) + (lower ? floats(low >> 4 & 15) : all(7.5f)));
    }
    for (; i < H / 2; i++) {
        const uint8_t low = lower ? lower[i] : 0;
        to[i] = (float)(16 * (upper[i] & 15) - 128) + (lower ? (float)(low & 15) : 7.5f);
        to[i + H / 2] = (float)(16 * (upper[i] >> 4) - 128) + (lower ? (float)(low >> 4) : 7.5f);
    }
}

// N rows' scores over a tile.
template <int N> static inline void score(const Tile& tile, Query* queries) {
    for (int j = 0; j < TILE; j += LANES) { // past tile.n the tile holds zeros
        if (j >= tile.n) break;
        F sum[N][LANES] = {};
        const float* key = tile.key + j * H;
        for (int c = 0; c < H; c += LANES) {
            F q[N];
#pragma GCC unroll 4
            for (int r = 0; r < N; r++) q[r] = load<F>(queries[r].q + c);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const F k = load<F>(key + i * H + c);
#pragma GCC unroll 4
                for (int r = 0; r < N; r++) sum[r][i] = more(sum[r][i], q[r], k);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) store(queries[r].weight + j, sums_of<LANES / 2>(sum[r]) * load<F>(tile.key_scale + j));
    }
}

// A row's scores -> what the values are multiplied by. Where its softmax stands moves on; returns by what has been
// summed so far shrinks.
static inline float soften(const Tile& tile, Row& row, float* weights, float* page_sum, float* page_max) {
    F best = all(LOWEST);
    for (int j = 0; j < TILE; j += LANES) {
        const I seen = load<I>(tile.position + j) <= row.limit;
        const F score = seen ? load<F>(weights + j) : all(LOWEST);
        store(weights + j, score);
        best = larger(score, best);
    }
    const float top = largest(best);
    float shrink = 1.f;
    if (top > row.max) shrink = exp2f((row.max - top) * row.to_log2), row.max = top;
    const F scale = all(row.to_log2), max = all(row.max);
    F sum = load<F>(row.sum) * shrink;
    for (int j = 0; j < TILE; j += LANES) {
        const I seen = load<I>(tile.position + j) <= row.limit;
        const F power = (load<F>(weights + j) - max) * scale;
        const F weight = seen & ~(power < LEAST) ? exp2_of(power) : F{};
        sum += weight;
        if (page_sum) page_sum[j / PAGE] += sum_of(weight);
        store(weights + j, seen ? weight * load<F>(tile.value_scale + j) : F{}); // a scale may be NaN
    }
    if (page_sum) *page_max = row.max;
    store(row.sum, sum);
    return shrink;
}

// N rows' outputs take in the values of a tile.
template <int N> static inline void mix(const Tile& tile, Row* rows, const Query* queries, const float* shrink) {
    constexpr int C = part(VECTORS, AT_ONCE / N);
    for (int c = 0; c < H; c += C * LANES) {
        F out[N][C];
#pragma GCC unroll 4
        for (int r = 0; r < N; r++)
#pragma GCC unroll 16
            for (int i = 0; i < C; i++) out[r][i] = load<F>(rows[r].out + c + i * LANES) * shrink[r];
        for (int j = 0; j < tile.n; j++) {
            const float* value = tile.value + j * H + c;
            F weight[N];
#pragma GCC unroll 4
            for (int r = 0; r < N; r++) weight[r] = all(queries[r].weight[j]);
#pragma GCC unroll 16
            for (int i = 0; i < C; i++) {
                const F v = load<F>(value + i * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < N; r++) out[r][i] = more(out[r][i], weight[r], v);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < N; r++)
#pragma GCC unroll 16
            for (int i = 0; i < C; i++) store(rows[r].out + c + i * LANES, out[r][i]);
    }
}

// A row's share of the next tile, so that it comes while this one is multiplied.
static inline void ask(const char* next, int64_t bytes, int64_t row, int64_t n_rows) {
    const int64_t lines = (bytes + 63) / 64;
    for (int64_t i = lines * row / n_rows; i < lines * (row + 1) / n_rows; i++) __builtin_prefetch(next + 64 * i);
}

static void read_tile(const Tile& tile, Row* rows, Query* queries, int64_t n_rows, float* page_sum, float* page_max) {
    constexpr int N = AT_ONCE / LANES > 1 ? 2 : 1; // with fewer sums than that, each waits for the one before
    int64_t r = 0;
    for (; N > 1 && r + N <= n_rows; r += N) {
        ask(tile.next_key, tile.next, r, n_rows), ask(tile.next_key, tile.next, r + 1, n_rows);
        score<N>(tile, queries + r);
    }
    for (; r < n_rows; r++) {
        ask(tile.next_key, tile.next, r, n_rows);
        score<1>(tile, queries + r);
    }
    float shrink[2];
    for (r = 0; r < n_rows; r++) {
        ask(tile.next_value, tile.next, r, n_rows);
        shrink[r % 2] = soften(tile, rows[r], queries[r].weight, page_sum ? page_sum + r * PAGES : nullptr, page_sum ? page_max + r : nullptr);
        if (r % 2) mix<2>(tile, rows + r - 1, queries + r - 1, shrink);
        else if (r + 1 == n_rows) mix<1>(tile, rows + r, queries + r, shrink);
    }
}

// What a call is given: see attend_any.
struct Call {
    const void *q, *k, *v;
    const fp16 *k_scale, *v_scale;
    const uint8_t *k_low, *v_low;
    const int64_t *pos, *index;
    void* out;
    float* mass;
    int64_t B, K, G, T, M, S, q_b, q_n, q_t, kv_b, kv_k, scale_b, scale_k, tail;
    Dtype q_dtype, k_dtype;

    int64_t width() const { return q_dtype == FP32 ? 4 : 2; } // bytes of a number of q
    int64_t entry() const { return k_low ? H / 2 : k_dtype == FP32 ? 4 * H : k_dtype == INT8 ? H : 2 * H; } // bytes
};

struct Scratch {
    alignas(64) float key[TILE * H], value[TILE * H];
    Tile tile;
};

// The tile of kv head `head` of batch row b that begins at `start`, n_keys being its entries in all.
static void gather(const Call& a, int64_t b, int64_t head, int64_t start, int64_t n_keys, Scratch& at) {
    const int64_t number = a.k_dtype == INT8 ? 1 : a.k_dtype == FP32 ? 4 : 2, from = (b * a.kv_b + head * a.kv_k) * number;
    const int64_t entry = a.entry(), scales = b * a.scale_b + head * a.scale_k;
    const char *keys = (const char*)a.k + from, *values = (const char*)a.v + from;
    const int64_t* named = a.index ? a.index + (b * a.K + head) * a.M + start : nullptr;
    const int64_t whole_from = a.tail ? a.pos[b * a.T] - a.tail + 1 : 0; // before: read of the upper plane alone
    Tile& tile = at.tile;
    tile.n = (int)std::min<int64_t>(TILE, n_keys - start);
    if (!named) {
        const int32_t last = (int32_t)start + tile.n - 1;
        for (int j = 0; j < TILE; j += LANES) {
            const I position = numbers() + (int32_t)(start + j);
            store(tile.position + j, position > last ? all(NOWHERE) : position);
        }
    } else {
        for (int j = 0; j < TILE; j++) tile.position[j] = j < tile.n && named[j] >= 0 ? (int32_t)named[j] : NOWHERE;
        // the next tile's entries, wherever they are
        for (int64_t j = TILE; j < std::min<int64_t>(2 * TILE, a.M - start); j++) {
            const int64_t place = std::clamp<int64_t>(named[j], 0, a.S - 1) * entry;
            for (int64_t byte = 0; byte < entry; byte += 64) __builtin_prefetch(keys + place + byte), __builtin_prefetch(values + place + byte);
        }
    }
    tile.key = at.key, tile.value = at.value;
    tile.next = named || a.G * a.T < MANY ? 0 : std::max<int64_t>(0, std::min<int64_t>(TILE, n_keys - start - TILE)) * entry;
    tile.next_key = keys + (start + TILE) * entry, tile.next_value = values + (start + TILE) * entry;
    const bool in_place = a.k_dtype == FP32 && !named && tile.n == TILE;
    if (in_place) tile.key = (const float*)(keys + start * entry), tile.value = (const float*)(values + start * entry);
    else if (!named && !a.k_low) {
        widen(a.k_dtype, keys + start * entry, at.key, (int64_t)tile.n * H);
        widen(a.k_dtype, values + start * entry, at.value, (int64_t)tile.n * H);
    }
    const bool together = !a.k_scale || (!named && tile.n == TILE); // scales
    for (int j = 0; j < TILE && together; j += LANES) {
        store(tile.key_scale + j, a.k_scale ? of_halves(a.k_scale + scales + start + j) : all(1.f));
        store(tile.value_scale + j, a.v_scale ? of_halves(a.v_scale + scales + start + j) : all(1.f));
    }
    for (int j = 0; j < tile.n; j++) {
        const int64_t place = named ? std::clamp<int64_t>(named[j], 0, a.S - 1) : start + j;
        if (!together) tile.key_scale[j] = of_half(a.k_scale[scales + place]), tile.value_scale[j] = of_half(a.v_scale[scales + place]);
        const char *key = keys + place * entry, *value = values + place * entry;
        if (named && named[j] < 0) { // counts as 0, whatever lies there
            memset(at.key + j * H, 0, 4 * H), memset(at.value + j * H, 0, 4 * H);
        } else if (a.k_low) {
            const bool whole = place >= whole_from;
            join((const uint8_t*)key, whole ? a.k_low + from + place * entry : nullptr, at.key + j * H);
            join((const uint8_t*)value, whole ? a.v_low + from + place * entry : nullptr, at.value + j * H);
        } else if (named) {
            widen(a.k_dtype, key, at.key + j * H, H), widen(a.k_dtype, value, at.value + j * H, H);
        }
    }
    const int end = (tile.n + LANES - 1) / LANES * LANES; // scores are summed for LANES keys together
    if (!in_place) memset(at.key + tile.n * H, 0, 4 * (end - tile.n) * H);
    for (int j = tile.n; j < TILE; j++) tile.key_scale[j] = tile.value_scale[j] = 1.f; // any number
}

static void attend(const Call& a, float scale, int threads) {
    const int64_t B = a.B, K = a.K, T = a.T, M = a.M, R = a.G * T;
    int64_t longest = a.index ? M : 0; // keys that some query sees, or entries listed
    for (int64_t i = 0; i < B * T && !a.index; i++) longest = std::max(longest, a.pos[i] < M ? a.pos[i] + 1 : 0);
    const int64_t n_splits = std::max<int64_t>(1, (longest + SPLIT - 1) / SPLIT), n_tiles = (longest + TILE - 1) / TILE;
    // kept between calls: fresh pages of memory would cost more than a small call
    static thread_local std::vector<Row> kept_rows;
    static thread_local std::vector<float> kept_sums, kept_maxima;
    if ((int64_t)kept_rows.size() < B * K * n_splits * R) kept_rows.clear(), kept_rows.resize(B * K * n_splits * R);
    if (a.mass) {
        kept_sums.assign(B * K * n_tiles * R * PAGES, 0.f);
        kept_maxima.assign(B * K * n_tiles * R, LOWEST);
    }
    Row* rows_of_all = kept_rows.data(); // by address: each worker has thread_locals of its own
    float *page_sum = a.mass ? kept_sums.data() : nullptr, *page_max = a.mass ? kept_maxima.data() : nullptr;

    auto merge = [&](int64_t bk) { // the splits of one kv head of one row
        const Row* splits = rows_of_all + bk * n_splits * R;
        if (a.mass) memset(a.mass + bk * (M / PAGE), 0, M / PAGE * sizeof(float));
        for (int64_t r = 0; r < R; r++) {
            F merged[VECTORS] = {};
            float top = LOWEST, total = 0.f;
            for (int64_t s = 0; s < n_splits; s++) top = std::max(top, splits[s * R + r].max);
            for (int64_t s = 0; s < n_splits; s++) {
                const Row& row = splits[s * R + r];
                const float sum = sum_of(load<F>(row.sum));
                if (sum == 0.f) continue; // nothing seen here
                const float share = exp2f((row.max - top) * row.to_log2);
                total += sum * share;
                for (int c = 0; c < VECTORS; c++) merged[c] += load<F>(row.out + c * LANES) * share;
            }
            const F by = all(total);
            char* to = (char*)a.out + (bk * R + r) * H * a.width();
            for (int c = 0; c < VECTORS; c++) {
                const F dims = total == 0.f ? F{} : merged[c] / by;
                if (a.q_dtype == FP32) store((float*)to + c * LANES, dims);
                else if (a.q_dtype == FP16) store_fp16((fp16*)to + c * LANES, dims);
                else store_bf16((bf16*)to + c * LANES, dims);
            }
            if (!a.mass) continue;
            float* shares = a.mass + bk * (M / PAGE);
            for (int64_t t = 0; t < n_tiles; t++) {
                const int64_t n = (bk * n_tiles + t) * R + r;
                if (page_max[n] == LOWEST) continue; // nothing seen here
                const float share = exp2f((page_max[n] - top) * splits[r].to_log2) / total;
                for (int p = 0; p < PAGES && t * PAGES + p < M / PAGE; p++) shares[t * PAGES + p] += page_sum[n * PAGES + p] * share;
            }
        }
    };

#pragma omp parallel num_threads(threads)
    {
        Scratch at; // of this thread: one that is thread_local would be looked up in every loop
        std::vector<Query> queries(R);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < B * K * n_splits; task++) {
            const int64_t split = task % n_splits, bk = task / n_splits, head = bk % K, b = bk / K;
            Row* rows = rows_of_all + task * R;
            int64_t n_keys = 0;
            for (int64_t r = 0; r < R; r++) {
                Row& row = rows[r];
                const int64_t place = a.pos[b * T + r % T];
                widen(a.q_dtype, (const char*)a.q + (b * a.q_b + (head * a.G + r / T) * a.q_n + r % T * a.q_t) * a.width(), queries[r].q, H);
                F none{}; // 0 unless some number is not finite
                for (int c = 0; c < H; c += LANES) none += load<F>(queries[r].q + c) - load<F>(queries[r].q + c);
                const bool finite = sum_of(none) == 0.f;
                row.to_log2 = finite ? scale * 1.44269504f : std::numeric_limits<float>::quiet_NaN();
                if (!finite) memset(queries[r].q, 0, sizeof queries[r].q); // its scores must be numbers: what it sees is told by the largest
                memset(row.out, 0, sizeof row.out), memset(row.sum, 0, sizeof row.sum);
                row.max = LOWEST, row.limit = place < M || a.index ? (int32_t)std::min<int64_t>(place, NOWHERE - 1) : -1;
                n_keys = std::max<int64_t>(n_keys, row.limit + 1);
            }
            n_keys = a.index ? M : std::min(n_keys, M);
            const int64_t end = std::min(n_keys, (split + 1) * SPLIT);
            for (int64_t start = split * SPLIT; start < end; start += TILE) {
                gather(a, b, head, start, n_keys, at);
                const int64_t n = (bk * n_tiles + start / TILE) * R;
                read_tile(at.tile, rows, queries.data(), R, page_sum ? page_sum + n * PAGES : nullptr, page_max ? page_max + n : nullptr);
            }
            if (n_splits == 1) merge(bk);
        }
        if (n_splits > 1) {
#pragma omp for
            for (int64_t bk = 0; bk < B * K; bk++) merge(bk);
        }
    }
}
}

// As attend_cpu of cpu_attention.cpp, but of q [B, K * G, T, H] in fp32, fp16 or bf16, and keys and values in any of
// these, or int8 where there are scales. Positions are below 2^31.
extern "C" void attend_any(const void* q, const void* k, const void* v, const fp16* k_scale, const fp16* v_scale, const uint8_t* k_low, const uint8_t* v_low,
                           const int64_t* pos, const int64_t* index, void* out, float* mass, int64_t B, int64_t K, int64_t G, int64_t T, int64_t M, int64_t S, int64_t q_b, int64_t q_n,
                           int64_t q_t, int64_t kv_b, int64_t kv_k, int64_t scale_b, int64_t scale_k, int64_t tail, int64_t q_dtype, int64_t k_dtype, float scale, int threads) {
    attend({q, k, v, k_scale, v_scale, k_low, v_low, pos, index, out, mass, B, K, G, T, M, S, q_b, q_n, q_t, kv_b, kv_k, scale_b, scale_k, tail, (Dtype)q_dtype, (Dtype)k_dtype}, scale, threads);
}
