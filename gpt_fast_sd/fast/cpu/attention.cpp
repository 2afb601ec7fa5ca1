// Attention of a few query rows over keys of any dtype and head dim, on any CPU: see attention_avx512.cpp for the method,
// and for what both do alike. There the products are those of one instruction set; here they are fp32, of keys and
// values that are widened a tile at a time, so the dtype of the cache costs loading it and no body of its own.
//
// A tile's keys are transposed as they are widened, so scores have a key in every lane and no sum goes across lanes; outputs
// have a dim in every lane. Both take as many rows together as fit the registers; what a row gets does not depend on them.
//
// Names: B batch, K kv heads, G query heads a kv head, T queries a head, R = G * T rows of one kv head, H head dim,
// S capacity, M keys in view or entries listed.
namespace {
constexpr int H = HEAD_DIM, VECTORS = H / LANES;
static_assert(H % 16 == 0 && H <= 256);
constexpr int TILE = 32, PAGE = 16, PAGES = TILE / PAGE, SPLIT = 1024; // a tile of up to 64 dims stays in L1, widened
constexpr int BLOCK = 64, TASKS = 8; // rows that read a split together, at least; parts of the work for each thread, as far as there are rows
constexpr int64_t MOST_HELD = 64 << 20; // bytes of all rows of all splits that are kept at once
constexpr float LOWEST = -0x1p126f; // finite, so that the difference of two is no NaN; scaled it stays exact
constexpr float LEAST = -100.f; // of a weight's logarithm; less counts as 0: what it is multiplied by may be small, too
constexpr int32_t NOWHERE = std::numeric_limits<int32_t>::max();
constexpr int NEAR = LANES == 16 ? 3 : 2; // where the next tile waits: in L1, or in L2, as L1 is no larger than a tile and the next on older CPUs
constexpr int ROWS = REGISTERS == 32 ? 6 : 3, WIDE = 4; // rows together, and vectors of each, whose sums fit the registers

struct Query { // while a split is read
    alignas(64) float q[H], weight[TILE];
};
struct Row { // one query of a split
    alignas(64) float out[H], sum[LANES];
    float max, to_log2; // to_log2: times a score, whose exp2 is its weight
    int32_t limit; // last position it may see
};

// The lines of the next tile, where keys are read in order: asked for a few at a time all through this one, so that they come
// meanwhile. A core waits for no more than some at once, and asked for together they would hold up what is read.
struct Ahead {
    const char *key, *value;
    int64_t keys, values; // lines that are left of each
    int64_t each, owed; // 1,024ths of a line: for a product of vectors, and so far

    Ahead() = default;
    Ahead(const char* key, const char* value, int64_t bytes, int64_t products) : key(key), value(value), keys((bytes + 63) / 64), values(keys) {
        each = 1024 * 2 * keys / products + 1, owed = 0;
    }
    void ask(int64_t products) { // that are done meanwhile
        owed += each * products;
        for (; owed >= 1024 && keys; owed -= 1024, keys--, key += 64) __builtin_prefetch(key, 0, NEAR);
        for (; owed >= 1024 && values; owed -= 1024, values--, value += 64) __builtin_prefetch(value, 0, NEAR);
    }
};

struct Tile {
    const float *key, *value; // [H, TILE], [TILE, H]
    alignas(64) float key_scale[TILE], value_scale[TILE];
    alignas(64) int32_t position[TILE]; // NOWHERE: does not exist
    int32_t last; // the largest of these
    int n; // entries from n on do not exist
    mutable Ahead ahead;
};

// LANES numbers of a dtype, from number i on.
template <Dtype D> static inline F wide(const void* from, int64_t i) {
    if constexpr (D == BF16) return widened((const bf16*)from + i);
    else if constexpr (D == FP16) return of_halves((const fp16*)from + i);
    else if constexpr (D == INT8) return of_bytes((const int8_t*)from + i);
    else return load<F>((const float*)from + i);
}
template <class Do> static inline void of(Dtype dtype, Do with) {
    if (dtype == BF16) with(std::integral_constant<Dtype, BF16>{});
    else if (dtype == FP16) with(std::integral_constant<Dtype, FP16>{});
    else if (dtype == INT8) with(std::integral_constant<Dtype, INT8>{});
    else with(std::integral_constant<Dtype, FP32>{});
}
static inline void widen(Dtype dtype, const void* from, float* to, int64_t n) {
    of(dtype, [&](auto d) {
        for (int64_t i = 0; i < n; i += LANES) store(to + i, wide<decltype(d)::value>(from, i));
    });
}

// N * LANES dims of LANES keys, wherever each lies, widened and by dims: to columns of [H, TILE]. N dims share a lane until
// they are transposed.
template <Dtype D, int N> static inline void turn_dims(const char* const* from, int64_t h, float* to) {
    F x[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) x[i] = N == 1 ? wide<D>(from[i], h) : load<F>(from[i] + 4 / N * h);
    turn(x);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const I bits = (I)x[i];
            store(to + (h + N * i + n) * TILE, N == 1 ? x[i] : N == 2 ? (F)(n ? bits & -0x10000 : bits << 16) : floats(bits << (24 - 8 * n) >> 24));
        }
}
template <Dtype D> static inline void turn_keys(const char* const* from, float* to) {
    constexpr int N = D == BF16 ? 2 : D == INT8 ? 4 : 1;
    int64_t h = 0;
    for (; h + N * LANES <= H; h += N * LANES) turn_dims<D, N>(from, h, to);
    for (; h < H; h += LANES) turn_dims<D, 1>(from, h, to);
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
    constexpr int C = std::min(WIDE, TILE / LANES);
    for (int j = 0; j < TILE && j < tile.n; j += C * LANES) {
        F sum[N][C] = {};
        for (int h = 0; h < H; h++) {
            if (h % 8 == 0) tile.ahead.ask(8 * N * C);
            F key[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) key[c] = load<F>(tile.key + h * TILE + j + c * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < N; r++) {
                const F q = all(queries[r].q[h]);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) sum[r][c] = more(sum[r][c], q, key[c]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < N; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) store(queries[r].weight + j + c * LANES, sum[r][c] * load<F>(tile.key_scale + j + c * LANES));
    }
}

// A row's scores -> what the values are multiplied by. Where its softmax stands moves on; returns by what has been
// summed so far shrinks. WHOLE: it sees the whole tile.
template <bool WHOLE> static inline float soften(const Tile& tile, Row& row, float* weights, float* page_sum, float* page_max) {
    constexpr int V = TILE / LANES;
    F score[V], best = all(LOWEST);
#pragma GCC unroll 16
    for (int c = 0; c < V; c++) {
        score[c] = load<F>(weights + c * LANES);
        if (!WHOLE) score[c] = load<I>(tile.position + c * LANES) <= row.limit ? score[c] : all(LOWEST);
        best = larger(score[c], best);
    }
    const float top = largest(best);
    float shrink = 1.f;
    if (top > row.max) shrink = exp2f((row.max - top) * row.to_log2), row.max = top;
    const F scale = all(row.to_log2), max = all(row.max);
    F sum = load<F>(row.sum) * shrink;
#pragma GCC unroll 16
    for (int c = 0; c < V; c++) {
        const F power = (score[c] - max) * scale, little = power < LEAST ? F{} : exp2_within(power);
        const I seen = load<I>(tile.position + c * LANES) <= row.limit;
        const F weight = WHOLE ? little : seen ? little : F{};
        sum += weight;
        if (page_sum) page_sum[c * LANES / PAGE] += sum_of(weight);
        const F worth = weight * load<F>(tile.value_scale + c * LANES);
        store(weights + c * LANES, WHOLE ? worth : seen ? worth : F{}); // a scale may be NaN
    }
    if (page_sum) *page_max = row.max;
    store(row.sum, sum);
    return shrink;
}

// C vectors of N rows' outputs take in the values of a tile.
template <int N, int C> static inline void mix(const Tile& tile, int from, Row* rows, const Query* queries, const float* shrink) {
    F out[N][C];
#pragma GCC unroll 6
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) out[r][c] = load<F>(rows[r].out + from + c * LANES) * shrink[r];
    for (int j = 0; j < tile.n; j++) {
        if (j % 8 == 0) tile.ahead.ask(8 * N * C);
        F value[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) value[c] = load<F>(tile.value + j * H + from + c * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < N; r++) {
            const F weight = all(queries[r].weight[j]);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) out[r][c] = more(out[r][c], weight, value[c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(rows[r].out + from + c * LANES, out[r][c]);
}

template <int N> static void read_rows(const Tile& tile, Row* rows, Query* queries, float* page_sum, float* page_max) {
    constexpr int REST = VECTORS % WIDE;
    score<N>(tile, queries);
    float shrink[N];
    for (int r = 0; r < N; r++) {
        const auto of_row = tile.last <= rows[r].limit ? soften<true> : soften<false>;
        shrink[r] = of_row(tile, rows[r], queries[r].weight, page_sum ? page_sum + r * PAGES : nullptr, page_sum ? page_max + r : nullptr);
    }
    for (int c = 0; c < VECTORS - REST; c += WIDE) mix<N, WIDE>(tile, c * LANES, rows, queries, shrink);
    if constexpr (REST) mix<N, REST>(tile, (VECTORS - REST) * LANES, rows, queries, shrink);
}

static void read_tile(const Tile& tile, Row* rows, Query* queries, int64_t n_rows, float* page_sum, float* page_max) {
    in_parts<ROWS>(0, n_rows, [&](auto n, int64_t r) {
        read_rows<n()>(tile, rows + r, queries + r, page_sum ? page_sum + r * PAGES : nullptr, page_sum ? page_max + r : nullptr);
    });
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
    alignas(64) float key[TILE * H], value[TILE * H], joined[LANES * H];
    Tile tile;
};

// The tile of kv head `head` of batch row b that begins at `start`, of a reading that ends at `end`, for n_rows of its rows; most: the
// last position that they see.
static void gather(const Call& a, int64_t b, int64_t head, int64_t start, int64_t end, int64_t most, int64_t n_rows, Scratch& at) {
    const int64_t number = a.k_dtype == INT8 ? 1 : a.k_dtype == FP32 ? 4 : 2, of_head = (b * a.kv_b + head * a.kv_k) * number;
    const int64_t entry = a.entry(), scales = b * a.scale_b + head * a.scale_k;
    const char *keys = (const char*)a.k + of_head, *values = (const char*)a.v + of_head;
    const int64_t* named = a.index ? a.index + (b * a.K + head) * a.M + start : nullptr;
    const int64_t whole_from = a.tail ? a.pos[b * a.T] - a.tail + 1 : 0; // before: read of the upper plane alone
    Tile& tile = at.tile;
    tile.n = (int)std::min<int64_t>(TILE, end - start);
    if (!named) {
        const int32_t last = (int32_t)start + tile.n - 1;
        for (int j = 0; j < TILE; j += LANES) {
            const I position = numbers() + (int32_t)(start + j);
            store(tile.position + j, position > last ? all(NOWHERE) : position);
        }
        tile.last = tile.n == TILE ? last : NOWHERE;
    } else {
        tile.last = 0;
        for (int j = 0; j < TILE; j++) {
            tile.position[j] = j < tile.n && named[j] >= 0 ? (int32_t)named[j] : NOWHERE;
            tile.last = std::max(tile.last, tile.position[j]);
        }
        // the next tile's entries, wherever they are
        for (int64_t j = TILE; j < std::min<int64_t>(2 * TILE, a.M - start); j++) {
            const int64_t place = std::clamp<int64_t>(named[j], 0, a.S - 1) * entry;
            for (int64_t byte = 0; byte < entry; byte += 64) __builtin_prefetch(keys + place + byte), __builtin_prefetch(values + place + byte);
        }
    }
    tile.key = at.key, tile.value = at.value;
    const int64_t n_next = named ? 0 : std::clamp<int64_t>(end - start - TILE, 0, TILE), next = n_next ? (start + TILE) * entry : 0;
    constexpr int64_t OF_ROW = 2 * TILE * VECTORS, OF_KEY = 4 * OF_ROW / TILE; // to gather a tile takes as long as four rows
    tile.ahead = Ahead(keys + next, values + next, n_next * entry, (n_rows + 4) * OF_ROW);
    const bool in_order = !named && !a.k_low;
    if (in_order && a.k_dtype == FP32) tile.value = (const float*)(values + start * entry);
    for (int j = 0; j < tile.n && in_order && a.k_dtype != FP32; j++) {
        tile.ahead.ask(OF_KEY / 2);
        widen(a.k_dtype, values + (start + j) * entry, at.value + j * H, H);
    }
    const bool together = !a.k_scale || (!named && tile.n == TILE); // scales
    for (int j = 0; j < TILE && together; j += LANES) {
        store(tile.key_scale + j, a.k_scale ? of_halves(a.k_scale + scales + start + j) : all(1.f));
        store(tile.value_scale + j, a.v_scale ? of_halves(a.v_scale + scales + start + j) : all(1.f));
    }
    static const char zeros[4 * H] = {}; // what no query sees counts as 0, whatever lies there
    for (int from = 0; from < tile.n; from += LANES) {
        const char* key[LANES];
        for (int i = 0; i < LANES; i++) key[i] = !named && from + i < tile.n ? keys + (start + from + i) * entry : zeros;
        for (int j = from; j < std::min(from + LANES, tile.n) && !(in_order && together); j++) {
            const bool exists = !named || (named[j] >= 0 && named[j] <= most);
            const int64_t place = named ? std::clamp<int64_t>(named[j], 0, a.S - 1) : start + j;
            if (!together) tile.key_scale[j] = of_half(a.k_scale[scales + place]), tile.value_scale[j] = of_half(a.v_scale[scales + place]);
            if (in_order) continue;
            tile.ahead.ask(OF_KEY / 2);
            const char* value = exists ? values + place * entry : zeros;
            float* to = at.value + j * H;
            key[j - from] = exists ? keys + place * entry : zeros;
            if (a.k_low) {
                const bool whole = exists && place >= whole_from;
                float* joined = at.joined + (j - from) * H;
                join((const uint8_t*)key[j - from], whole ? a.k_low + of_head + place * entry : nullptr, joined);
                join((const uint8_t*)value, whole ? a.v_low + of_head + place * entry : nullptr, to);
                key[j - from] = exists ? (const char*)joined : zeros;
                if (!exists) memset(to, 0, 4 * H);
            } else {
                widen(a.k_dtype, value, to, H);
            }
        }
        of(a.k_low ? FP32 : a.k_dtype, [&](auto d) { turn_keys<decltype(d)::value>(key, at.key + from); });
        tile.ahead.ask(OF_KEY / 2 * LANES);
    }
    for (int j = tile.n; j < TILE; j++) tile.key_scale[j] = tile.value_scale[j] = 1.f; // any number
}

// What the splits of a row have come to so far.
struct Total {
    alignas(64) float out[H] = {};
    float max = LOWEST, sum = 0.f;
};
static inline void add_split(Total& total, const Row& row) {
    const float sum = sum_of(load<F>(row.sum));
    if (sum == 0.f) return; // nothing seen here
    const float top = std::max(total.max, row.max), before = exp2f((total.max - top) * row.to_log2), share = exp2f((row.max - top) * row.to_log2);
    for (int c = 0; c < H; c += LANES) store(total.out + c, load<F>(total.out + c) * before + load<F>(row.out + c) * share);
    total.sum = total.sum * before + sum * share;
    total.max = top;
}

static void attend(const Call& a, float scale, int threads) {
    const int64_t B = a.B, K = a.K, T = a.T, M = a.M, R = a.G * T;
    if (!B) return;
    int64_t longest = 0; // keys that some query sees, or entries listed
    std::vector<int64_t> starts(B + 1, 0), first_task(B + 1, 0); // the splits before row b's, of one kv head each; its first task
    for (int64_t b = 0; b < B; b++) {
        int64_t own = a.index ? M : 0;
        for (int64_t t = 0; t < T && !a.index; t++) own = std::max(own, a.pos[b * T + t] < M ? a.pos[b * T + t] + 1 : 0);
        longest = std::max(longest, own);
        starts[b + 1] = starts[b] + std::max<int64_t>(1, (own + SPLIT - 1) / SPLIT);
    }
    const int64_t n_splits = std::max<int64_t>(1, (longest + SPLIT - 1) / SPLIT), n_tiles = (longest + TILE - 1) / TILE;
    const int64_t tasks = TASKS * threads, wanted = a.mass ? 1 : (tasks + B * K - 1) / (B * K); // mass is summed over all rows
    const int64_t n_rows = std::clamp<int64_t>((R + wanted - 1) / wanted, std::min<int64_t>(BLOCK, R), R), n_blocks = R ? (R + n_rows - 1) / n_rows : 1;
    // whether the splits of a row are different tasks': there are fewer rows as long as the longest one than tasks, and all fit some memory
    const int64_t work = K * n_blocks * starts[B];
    const bool shared = n_splits > 1 && work < tasks * n_splits && K * starts[B] * R * (int64_t)sizeof(Row) <= MOST_HELD;
    const int64_t each = shared ? std::max<int64_t>(1, work / tasks) : n_splits;
    const int64_t held = shared ? K * starts[B] : B * K; // splits whose rows are kept
    auto row_of = [&](int64_t b, int64_t head, int64_t split) { return (shared ? K * starts[b] + head * (starts[b + 1] - starts[b]) + split : b * K + head) * R; };
    for (int64_t b = 0; b < B; b++) first_task[b + 1] = first_task[b] + K * n_blocks * ((starts[b + 1] - starts[b] + each - 1) / each);
    // kept between calls: fresh pages of memory would cost more than a small call
    static thread_local std::vector<Row> kept_rows;
    static thread_local std::vector<Total> kept_totals;
    static thread_local std::vector<float> kept_sums, kept_maxima;
    if ((int64_t)kept_rows.size() < held * R) kept_rows.clear(), kept_rows.resize(held * R);
    if ((int64_t)kept_totals.size() < B * K * R) kept_totals.clear(), kept_totals.resize(B * K * R);
    if (a.mass) {
        kept_sums.assign(B * K * n_tiles * R * PAGES, 0.f);
        kept_maxima.assign(B * K * n_tiles * R, LOWEST);
    }
    Row* rows_of_all = kept_rows.data(); // by address: each worker has thread_locals of its own
    Total* totals = kept_totals.data();
    float *page_sum = a.mass ? kept_sums.data() : nullptr, *page_max = a.mass ? kept_maxima.data() : nullptr;

    auto give = [&](int64_t bk, int64_t from, int64_t here) { // the outputs of these rows of a kv head, and the mass
        if (a.mass) memset(a.mass + bk * (M / PAGE), 0, M / PAGE * sizeof(float));
        for (int64_t r = from; r < from + here; r++) {
            const Total& total = totals[bk * R + r];
            char* to = (char*)a.out + (bk * R + r) * H * a.width();
            for (int c = 0; c < VECTORS; c++) {
                const F dims = total.sum == 0.f ? F{} : load<F>(total.out + c * LANES) / all(total.sum);
                if (a.q_dtype == FP32) store((float*)to + c * LANES, dims);
                else if (a.q_dtype == FP16) store_fp16((fp16*)to + c * LANES, dims);
                else store_bf16((bf16*)to + c * LANES, dims);
            }
            if (!a.mass) continue;
            float* shares = a.mass + bk * (M / PAGE);
            for (int64_t t = 0; t < n_tiles; t++) {
                const int64_t n = (bk * n_tiles + t) * R + r;
                if (page_max[n] == LOWEST) continue; // nothing seen here
                const float share = exp2f((page_max[n] - total.max) * rows_of_all[row_of(bk / K, bk % K, 0) + r].to_log2) / total.sum;
                for (int p = 0; p < PAGES && t * PAGES + p < M / PAGE; p++) shares[t * PAGES + p] += page_sum[n * PAGES + p] * share;
            }
        }
    };

#pragma omp parallel num_threads(threads)
    {
        Scratch at; // of this thread: one that is thread_local would be looked up in every loop
        std::vector<Query> queries(n_rows);
        std::vector<char> finite(n_rows);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < first_task[B]; task++) {
            const int64_t b = std::upper_bound(first_task.begin(), first_task.begin() + B, task) - first_task.begin() - 1, own = starts[b + 1] - starts[b], n_parts = (own + each - 1) / each;
            const int64_t number = task - first_task[b], block = number % n_blocks, part = number / n_blocks % n_parts, head = number / n_blocks / n_parts, bk = b * K + head;
            const int64_t from = block * n_rows, here = std::min(n_rows, R - from), end_of_part = std::min(own, (part + 1) * each);
            auto limit = [&](int64_t r) { // of a row: the last position it may see
                const int64_t place = a.pos[b * T + r % T];
                return place < M || a.index ? (int32_t)std::clamp<int64_t>(place, -1, NOWHERE - 1) : -1;
            };
            int64_t most = -1; // that any query sees
            for (int64_t r = 0; r < here; r++) {
                const int64_t g = (from + r) / T, t = (from + r) % T;
                widen(a.q_dtype, (const char*)a.q + (b * a.q_b + (head * a.G + g) * a.q_n + t * a.q_t) * a.width(), queries[r].q, H);
                F none{}; // 0 unless some number is not finite
                for (int c = 0; c < H; c += LANES) none += load<F>(queries[r].q + c) - load<F>(queries[r].q + c);
                finite[r] = sum_of(none) == 0.f;
                if (!finite[r]) memset(queries[r].q, 0, sizeof queries[r].q); // its scores must be numbers: what it sees is told by the largest
                most = std::max<int64_t>(most, limit(from + r));
                if (!shared) totals[bk * R + from + r] = {};
            }
            const int64_t n_keys = a.index ? M : std::min(most + 1, M);
            for (int64_t split = part * each; split < end_of_part; split++) {
                Row* rows = rows_of_all + row_of(b, head, split) + from;
                for (int64_t r = 0; r < here; r++) {
                    Row& row = rows[r];
                    memset(row.out, 0, sizeof row.out), memset(row.sum, 0, sizeof row.sum);
                    row.to_log2 = finite[r] ? scale * 1.44269504f : std::numeric_limits<float>::quiet_NaN();
                    row.max = LOWEST, row.limit = limit(from + r);
                }
                const int64_t end = std::min(n_keys, (split + 1) * SPLIT), end_of_reading = std::min(n_keys, end_of_part * SPLIT);
                for (int64_t start = split * SPLIT; start < end; start += TILE) {
                    gather(a, b, head, start, end_of_reading, most, here, at);
                    const int64_t n = (bk * n_tiles + start / TILE) * R;
                    read_tile(at.tile, rows, queries.data(), here, page_sum ? page_sum + n * PAGES : nullptr, page_max ? page_max + n : nullptr);
                }
                for (int64_t r = 0; r < here && !shared; r++) add_split(totals[bk * R + from + r], rows[r]);
            }
            if (!shared) give(bk, from, here);
        }
        if (shared) {
#pragma omp for
            for (int64_t n = 0; n < B * K * n_blocks; n++) {
                const int64_t bk = n / n_blocks, b = bk / K, from = n % n_blocks * n_rows, here = std::min(n_rows, R - from);
                for (int64_t r = from; r < from + here; r++) {
                    totals[bk * R + r] = {};
                    for (int64_t split = 0; split < starts[b + 1] - starts[b]; split++) add_split(totals[bk * R + r], rows_of_all[row_of(b, bk % K, split) + r]);
                }
                give(bk, from, here);
            }
        }
    }
}
}

// As attend_cpu of attention_avx512.cpp, but of q [B, K * G, T, H] in fp32, fp16 or bf16, and keys and values in any of
// these, or int8 where there are scales. Positions are below 2^31.
extern "C" void attend_any(const void* q, const void* k, const void* v, const fp16* k_scale, const fp16* v_scale, const uint8_t* k_low, const uint8_t* v_low,
                           const int64_t* pos, const int64_t* index, void* out, float* mass, int64_t B, int64_t K, int64_t G, int64_t T, int64_t M, int64_t S, int64_t q_b, int64_t q_n,
                           int64_t q_t, int64_t kv_b, int64_t kv_k, int64_t scale_b, int64_t scale_k, int64_t tail, int64_t q_dtype, int64_t k_dtype, float scale, int threads) {
    attend({q, k, v, k_scale, v_scale, k_low, v_low, pos, index, out, mass, B, K, G, T, M, S, q_b, q_n, q_t, kv_b, kv_k, scale_b, scale_k, tail, (Dtype)q_dtype, (Dtype)k_dtype}, scale, threads);
}
