// Attention of a few query rows over keys of any dtype and head dim, on any CPU. attention_avx512.cpp has the products
// of one instruction set; here they are fp32, of keys and values that are widened a tile at a time, so the dtype of the
// cache costs loading it and no code of its own.
//
// A tile's keys are transposed as they are widened, so scores have a key in every lane and no sum goes across lanes;
// outputs have a dim in every lane. Both take as many rows together as fit the registers; what a row gets does not
// depend on them.
#include "simd.hpp"
#include "attention.hpp"

namespace {
constexpr int H = HEAD_DIM, VECTORS = H / LANES;
static_assert(H % 16 == 0 && H <= 256);
constexpr int TILE = 32, PAGES = TILE / PAGE; // a tile of up to 64 dims stays in L1, widened
constexpr float LOWEST = -0x1p126f; // finite, so that a difference of two is not NaN; times a scale it stays exact
constexpr float MIN_LOG2 = -100.f; // a weight below 2^-100 counts as 0: what it is multiplied by may be small, too
constexpr int32_t NO_POSITION = std::numeric_limits<int32_t>::max();
// Where the next tile waits: in L1, or in L2 on older CPUs, whose L1 is no larger than this tile and the next.
constexpr int LOCALITY = LANES == 16 ? 3 : 2;
constexpr int ROWS = REGISTERS == 32 ? 6 : 3, WIDE = 4; // rows together and vectors of each, whose sums fit registers

struct Query { // while a split is read
    alignas(64) float q[H], weight[TILE]; // weight: the scores, then the weights of a tile
};
struct Row { // one query of a split
    alignas(64) float out[H], sum[LANES];
    float max, to_log2; // to_log2: times a score, whose exp2 is its weight
    int32_t limit; // the last position it may see
};
struct Total { // what the splits of a row have come to so far
    alignas(64) float out[H] = {};
    float max = LOWEST, sum = 0.f;
};

// Prefetches the next tile, where keys are read in order, a few lines at a time all through this one: a core has only
// so many loads in flight, and all lines at once would hold up what is read now.
struct Prefetcher {
    const char *key, *value;
    int64_t keys, values; // lines that are left of each
    int64_t rate, due; // in 1,024ths of a line: for a product of vectors, and so far

    Prefetcher() = default;
    Prefetcher(const char* key, const char* value, int64_t bytes, int64_t products)
        : key(key), value(value), keys((bytes + 63) / 64), values(keys) {
        rate = 1024 * 2 * keys / products + 1, due = 0;
    }
    void advance(int64_t products) { // that are computed meanwhile
        due += rate * products;
        for (; due >= 1024 && keys; due -= 1024, keys--, key += 64) __builtin_prefetch(key, 0, LOCALITY);
        for (; due >= 1024 && values; due -= 1024, values--, value += 64) __builtin_prefetch(value, 0, LOCALITY);
    }
};

struct Tile {
    const float *key, *value; // [H, TILE], [TILE, H]
    alignas(64) float key_scale[TILE], value_scale[TILE];
    alignas(64) int32_t position[TILE]; // NO_POSITION: does not exist
    int32_t last; // the largest of these
    int n; // entries from n on do not exist
    mutable Prefetcher next;
};

// LANES numbers of a dtype, from number i on.
template <Dtype D> static inline F load_as_float(const void* from, int64_t i) {
    if constexpr (D == BF16) return load_bf16((const bf16*)from + i);
    else if constexpr (D == FP16) return load_fp16((const fp16*)from + i);
    else if constexpr (D == INT8) return load_int8_as_float((const int8_t*)from + i);
    else return load<F>((const float*)from + i);
}
template <class Body> static inline void with_dtype(Dtype dtype, Body body) {
    if (dtype == BF16) body(std::integral_constant<Dtype, BF16>{});
    else if (dtype == FP16) body(std::integral_constant<Dtype, FP16>{});
    else if (dtype == INT8) body(std::integral_constant<Dtype, INT8>{});
    else body(std::integral_constant<Dtype, FP32>{});
}
static inline void widen(Dtype dtype, const void* from, float* to, int64_t n) {
    with_dtype(dtype, [&](auto d) {
        for (int64_t i = 0; i < n; i += LANES) store(to + i, load_as_float<decltype(d)::value>(from, i));
    });
}

// Widen and transpose N * LANES dims of LANES keys, wherever each lies, to columns of [H, TILE]. N dims share a lane
// until they are transposed.
template <Dtype D, int N> static inline void transpose_dims(const char* const* from, int64_t h, float* to) {
    F x[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) x[i] = N == 1 ? load_as_float<D>(from[i], h) : load<F>(from[i] + 4 / N * h);
    transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const I bits = (I)x[i];
            const F two = (F)(n ? bits & -0x10000 : bits << 16), four = to_float(bits << (24 - 8 * n) >> 24);
            store(to + (h + N * i + n) * TILE, N == 1 ? x[i] : N == 2 ? two : four);
        }
}
template <Dtype D> static inline void transpose_keys(const char* const* from, float* to) {
    constexpr int N = D == BF16 ? 2 : D == INT8 ? 4 : 1;
    int64_t h = 0;
    for (; h + N * LANES <= H; h += N * LANES) transpose_dims<D, N>(from, h, to);
    for (; h < H; h += LANES) transpose_dims<D, 1>(from, h, to);
}

// Join an entry of two planes (model/cache.py): a byte of the upper one has the upper nibbles of dims i and i + H / 2.
// Without the lower plane its nibble counts as 7.5, in the middle of what it may be.
static void join_planes(const uint8_t* upper, const uint8_t* lower, float* to) {
    int i = 0;
    for (; i + LANES <= H / 2; i += LANES) {
        const I up = load_int8((const int8_t*)upper + i), low = lower ? load_int8((const int8_t*)lower + i) : I{};
        const F first = lower ? to_float(low & 15) : broadcast(7.5f);
        const F second = lower ? to_float(low >> 4 & 15) : broadcast(7.5f);
        store(to + i, to_float(16 * (up & 15) - 128) + first);
        store(to + i + H / 2, to_float(16 * (up >> 4 & 15) - 128) + second);
    }
    for (; i < H / 2; i++) {
        const uint8_t low = lower ? lower[i] : 0;
        to[i] = (float)(16 * (upper[i] & 15) - 128) + (lower ? (float)(low & 15) : 7.5f);
        to[i + H / 2] = (float)(16 * (upper[i] >> 4) - 128) + (lower ? (float)(low >> 4) : 7.5f);
    }
}

// Q K': the scores of N rows over a tile.
template <int N> static inline void compute_scores(const Tile& tile, Query* queries) {
    constexpr int C = std::min(WIDE, TILE / LANES);
    for (int j = 0; j < TILE && j < tile.n; j += C * LANES) {
        F sum[N][C] = {};
        for (int h = 0; h < H; h++) {
            if (h % 8 == 0) tile.next.advance(8 * N * C);
            F key[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) key[c] = load<F>(tile.key + h * TILE + j + c * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < N; r++) {
                const F q = broadcast(queries[r].q[h]);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) sum[r][c] = fmadd(sum[r][c], q, key[c]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < N; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                const int key = j + c * LANES;
                store(queries[r].weight + key, sum[r][c] * load<F>(tile.key_scale + key));
            }
    }
}

// Scores of a row -> the weights of values, and the row's maximum and sum with this tile. Returns the factor for what
// has been summed so far. WHOLE: the row sees the whole tile.
template <bool WHOLE>
static inline float online_softmax_step(const Tile& tile, Row& row, float* weights, float* page_sum, float* page_max) {
    constexpr int V = TILE / LANES;
    F score[V], best = broadcast(LOWEST);
#pragma GCC unroll 16
    for (int c = 0; c < V; c++) {
        score[c] = load<F>(weights + c * LANES);
        if (!WHOLE) score[c] = load<I>(tile.position + c * LANES) <= row.limit ? score[c] : broadcast(LOWEST);
        best = larger(score[c], best);
    }
    const float top = reduce_max(best);
    float shrink = 1.f;
    if (top > row.max) shrink = exp2f((row.max - top) * row.to_log2), row.max = top;
    const F scale = broadcast(row.to_log2), max = broadcast(row.max);
    F sum = load<F>(row.sum) * shrink;
    if (page_sum) std::fill_n(page_sum, PAGES, 0.f);
#pragma GCC unroll 16
    for (int c = 0; c < V; c++) {
        const F power = (score[c] - max) * scale, exp = power < MIN_LOG2 ? F{} : exp2_in_range(power);
        const I seen = load<I>(tile.position + c * LANES) <= row.limit;
        const F weight = WHOLE ? exp : seen ? exp : F{};
        sum += weight;
        if (page_sum) page_sum[c * LANES / PAGE] += reduce_sum(weight);
        const F scaled = weight * load<F>(tile.value_scale + c * LANES);
        store(weights + c * LANES, WHOLE ? scaled : seen ? scaled : F{}); // a scale may be NaN
    }
    if (page_sum) *page_max = row.max;
    store(row.sum, sum);
    return shrink;
}

// P V: C vectors of N rows' outputs, from dim `from` on, take in the values of a tile.
template <int N, int C>
static inline void accumulate_values(const Tile& tile, int from, Row* rows, const Query* queries, const float* shrink) {
    F out[N][C];
#pragma GCC unroll 6
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) out[r][c] = load<F>(rows[r].out + from + c * LANES) * shrink[r];
    for (int j = 0; j < tile.n; j++) {
        if (j % 8 == 0) tile.next.advance(8 * N * C);
        F value[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) value[c] = load<F>(tile.value + j * H + from + c * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < N; r++) {
            const F weight = broadcast(queries[r].weight[j]);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) out[r][c] = fmadd(out[r][c], weight, value[c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(rows[r].out + from + c * LANES, out[r][c]);
}

template <int N> static void read_rows(const Tile& tile, Row* rows, Query* queries, float* page_sum, float* page_max) {
    constexpr int REST = VECTORS % WIDE;
    compute_scores<N>(tile, queries);
    float shrink[N];
    for (int r = 0; r < N; r++) {
        const auto step = tile.last <= rows[r].limit ? online_softmax_step<true> : online_softmax_step<false>;
        float *sums = page_sum ? page_sum + r * PAGES : nullptr, *max = page_sum ? page_max + r : nullptr;
        shrink[r] = step(tile, rows[r], queries[r].weight, sums, max);
    }
    for (int c = 0; c < VECTORS - REST; c += WIDE) accumulate_values<N, WIDE>(tile, c * LANES, rows, queries, shrink);
    if constexpr (REST) accumulate_values<N, REST>(tile, (VECTORS - REST) * LANES, rows, queries, shrink);
}

static void read_tile(const Tile& tile, Row* rows, Query* queries, int64_t n_rows, float* page_sum, float* page_max) {
    for_row_blocks<ROWS>(0, n_rows, [&](auto n, int64_t r) {
        float *sums = page_sum ? page_sum + r * PAGES : nullptr, *maxima = page_sum ? page_max + r : nullptr;
        read_rows<n()>(tile, rows + r, queries + r, sums, maxima);
    });
}

static inline int64_t query_bytes(const AttentionCall& a) { return a.q_dtype == FP32 ? 4 : 2; } // of a number
static inline int64_t entry_bytes(const AttentionCall& a) {
    return a.k_low ? H / 2 : a.k_dtype == FP32 ? 4 * H : a.k_dtype == INT8 ? H : 2 * H;
}

// The tile that a thread reads, and where it is gathered.
struct Scratch {
    alignas(64) float key[TILE * H], value[TILE * H], joined[LANES * H];
    Tile tile;
};

// The positions of a tile's entries, which begin at `start`; listed: the entries, or null for all in order.
static inline void set_positions(Tile& tile, const int64_t* listed, int64_t start) {
    if (!listed) {
        const int32_t last = (int32_t)start + tile.n - 1;
        for (int j = 0; j < TILE; j += LANES) {
            const I position = iota() + (int32_t)(start + j);
            store(tile.position + j, position > last ? broadcast(NO_POSITION) : position);
        }
        tile.last = tile.n == TILE ? last : NO_POSITION;
        return;
    }
    tile.last = 0;
    for (int j = 0; j < TILE; j++) {
        tile.position[j] = j < tile.n && listed[j] >= 0 ? (int32_t)listed[j] : NO_POSITION;
        tile.last = std::max(tile.last, tile.position[j]);
    }
}

// Gather the tile of batch row b's kv head that begins at `start`; end: where its task's reading ends; last_seen: the
// last position that any of the task's n_rows sees. What no query sees counts as 0, whatever lies there.
static void gather_tile(const AttentionCall& a, int64_t b, int64_t head, int64_t start, int64_t end, int64_t last_seen,
                        int64_t n_rows, Scratch& at) {
    static const char zeros[4 * H] = {};
    const int64_t number = a.k_dtype == INT8 ? 1 : a.k_dtype == FP32 ? 4 : 2; // bytes
    const int64_t base = (b * a.kv_b + head * a.kv_k) * number, entry = entry_bytes(a);
    const int64_t scales = b * a.scale_b + head * a.scale_k;
    const char *keys = (const char*)a.k + base, *values = (const char*)a.v + base;
    const int64_t* listed = a.index ? a.index + (b * a.K + head) * a.M + start : nullptr;
    const int64_t whole_from = a.tail ? a.pos[b * a.T] - a.tail + 1 : 0; // before: the upper plane alone
    Tile& tile = at.tile;
    tile.n = (int)std::min<int64_t>(TILE, end - start);
    set_positions(tile, listed, start);
    for (int64_t j = TILE; listed && j < std::min<int64_t>(2 * TILE, a.M - start); j++) { // the next tile's entries
        const int64_t place = std::clamp<int64_t>(listed[j], 0, a.S - 1) * entry;
        for (int64_t byte = 0; byte < entry; byte += 64)
            __builtin_prefetch(keys + place + byte), __builtin_prefetch(values + place + byte);
    }
    tile.key = at.key, tile.value = at.value;
    const int64_t n_next = listed ? 0 : std::clamp<int64_t>(end - start - TILE, 0, TILE);
    const int64_t next = n_next ? (start + TILE) * entry : 0;
    constexpr int64_t OF_ROW = 2 * TILE * VECTORS, OF_KEY = 4 * OF_ROW / TILE; // to gather takes as long as four rows
    tile.next = Prefetcher(keys + next, values + next, n_next * entry, (n_rows + 4) * OF_ROW);
    const bool in_order = !listed && !a.k_low;
    if (in_order && a.k_dtype == FP32) tile.value = (const float*)(values + start * entry);
    for (int j = 0; j < tile.n && in_order && a.k_dtype != FP32; j++) {
        tile.next.advance(OF_KEY / 2);
        widen(a.k_dtype, values + (start + j) * entry, at.value + j * H, H);
    }
    const bool together = !a.k_scale || (!listed && tile.n == TILE); // scales are loaded
    for (int j = 0; j < TILE && together; j += LANES) {
        store(tile.key_scale + j, a.k_scale ? load_fp16(a.k_scale + scales + start + j) : broadcast(1.f));
        store(tile.value_scale + j, a.v_scale ? load_fp16(a.v_scale + scales + start + j) : broadcast(1.f));
    }
    for (int from = 0; from < tile.n; from += LANES) {
        const char* key[LANES];
        for (int i = 0; i < LANES; i++)
            key[i] = !listed && from + i < tile.n ? keys + (start + from + i) * entry : zeros;
        for (int j = from; j < std::min(from + LANES, tile.n) && !(in_order && together); j++) {
            const bool exists = !listed || (listed[j] >= 0 && listed[j] <= last_seen);
            const int64_t place = listed ? std::clamp<int64_t>(listed[j], 0, a.S - 1) : start + j;
            if (!together) {
                tile.key_scale[j] = fp16_to_float(a.k_scale[scales + place]);
                tile.value_scale[j] = fp16_to_float(a.v_scale[scales + place]);
            }
            if (in_order) continue;
            tile.next.advance(OF_KEY / 2);
            const char* value = exists ? values + place * entry : zeros;
            float *to = at.value + j * H, *joined = at.joined + (j - from) * H;
            key[j - from] = exists ? keys + place * entry : zeros;
            if (!a.k_low) {
                widen(a.k_dtype, value, to, H);
                continue;
            }
            const bool whole = exists && place >= whole_from;
            join_planes((const uint8_t*)key[j - from], whole ? a.k_low + base + place * entry : nullptr, joined);
            join_planes((const uint8_t*)value, whole ? a.v_low + base + place * entry : nullptr, to);
            key[j - from] = exists ? (const char*)joined : zeros;
            if (!exists) memset(to, 0, 4 * H);
        }
        with_dtype(a.k_low ? FP32 : a.k_dtype, [&](auto d) { transpose_keys<decltype(d)::value>(key, at.key + from); });
        tile.next.advance(OF_KEY / 2 * LANES);
    }
    for (int j = tile.n; j < TILE; j++) tile.key_scale[j] = tile.value_scale[j] = 1.f; // any number
}

static inline void add_split(Total& total, const Row& row) {
    const float sum = reduce_sum(load<F>(row.sum));
    if (sum == 0.f) return; // nothing seen here
    const float top = std::max(total.max, row.max);
    const float before = exp2f((total.max - top) * row.to_log2), share = exp2f((row.max - top) * row.to_log2);
    for (int c = 0; c < H; c += LANES)
        store(total.out + c, load<F>(total.out + c) * before + load<F>(row.out + c) * share);
    total.sum = total.sum * before + sum * share;
    total.max = top;
}

// The outputs of a task's rows, of which bk is b * K + head, and the mass.
static void write_results(const AttentionCall& a, const Schedule& s, const Buffers<Row, Total>& of, int64_t bk,
                          int64_t first_row, int64_t n_rows) {
    if (a.mass) of.write_mass(a, s, bk, LOWEST);
    for (int64_t i = bk * s.R + first_row; i < bk * s.R + first_row + n_rows; i++) {
        const Total& total = of.totals[i];
        char* to = (char*)a.out + i * H * query_bytes(a);
        for (int c = 0; c < VECTORS; c++) {
            const F dims = total.sum == 0.f ? F{} : load<F>(total.out + c * LANES) / broadcast(total.sum);
            if (a.q_dtype == FP32) store((float*)to + c * LANES, dims);
            else if (a.q_dtype == FP16) store_fp16((fp16*)to + c * LANES, dims);
            else store_bf16((bf16*)to + c * LANES, dims);
        }
    }
}

// A query row of a kv head, in fp32. Of one that is not finite zeros, and false: its scores must be numbers, as whether
// it sees anything is told by the largest.
static bool load_query(const AttentionCall& a, const Task& task, int64_t r, float* q) {
    const int64_t g = r / a.T, t = r % a.T, row = task.b * a.q_b + (task.head * a.G + g) * a.q_n + t * a.q_t;
    widen(a.q_dtype, (const char*)a.q + row * query_bytes(a), q, H);
    F nan{}; // 0 unless some number is not finite
    for (int c = 0; c < H; c += LANES) nan += load<F>(q + c) - load<F>(q + c);
    const bool finite = reduce_sum(nan) == 0.f;
    if (!finite) memset(q, 0, H * sizeof *q);
    return finite;
}

// Read the splits of a task for its rows. queries, finite: scratch for each row
static void run_task(const AttentionCall& a, const Schedule& s, const Buffers<Row, Total>& of, const Task& task,
                     Scratch& at, Query* queries, char* finite) {
    const int64_t b = task.b, head = task.head, bk = b * s.K + head, n_rows = task.n_rows;
    auto limit_of = [&](int64_t r) { // the last position that a row may see
        const int64_t place = a.pos[b * s.T + (task.first_row + r) % s.T];
        return place < s.M || a.index ? (int32_t)std::clamp<int64_t>(place, -1, NO_POSITION - 1) : -1;
    };
    Total* totals = of.totals + bk * s.R + task.first_row;
    int64_t last_seen = -1; // by any row
    for (int64_t r = 0; r < n_rows; r++) {
        finite[r] = load_query(a, task, task.first_row + r, queries[r].q);
        last_seen = std::max<int64_t>(last_seen, limit_of(r));
        if (!s.shared) totals[r] = {};
    }
    const int64_t n_keys = a.index ? s.M : std::min(last_seen + 1, s.M);
    const int64_t end_of_task = std::min(n_keys, task.end_split * SPLIT);
    for (int64_t split = task.first_split; split < task.end_split; split++) {
        Row* rows = of.rows + s.row_of(b, head, split) + task.first_row;
        for (int64_t r = 0; r < n_rows; r++) {
            Row& row = rows[r];
            memset(row.out, 0, sizeof row.out), memset(row.sum, 0, sizeof row.sum);
            row.to_log2 = finite[r] ? a.scale * 1.44269504f : std::numeric_limits<float>::quiet_NaN();
            row.max = LOWEST, row.limit = limit_of(r);
        }
        const int64_t end = std::min(n_keys, (split + 1) * SPLIT);
        for (int64_t start = split * SPLIT; start < end; start += TILE) {
            gather_tile(a, b, head, start, end_of_task, last_seen, n_rows, at);
            const int64_t n = (bk * s.n_tiles + start / TILE) * s.R;
            read_tile(at.tile, rows, queries, n_rows, of.sums_of(n), of.maxima_of(n));
        }
        for (int64_t r = 0; r < n_rows && !s.shared; r++) add_split(totals[r], rows[r]);
    }
    if (!s.shared) write_results(a, s, of, bk, task.first_row, n_rows);
}
}

extern "C" void attention(const AttentionCall* call) {
    const AttentionCall& a = *call;
    if (!a.B) return;
    const Schedule s(a, 1, TILE, sizeof(Row));
    const Buffers<Row, Total> of(a, s, PAGES, LOWEST);
#pragma omp parallel num_threads(a.threads)
    {
        Scratch at; // of this thread: one that is thread_local would be looked up in every loop
        std::vector<Query> queries(s.n_rows);
        std::vector<char> finite(s.n_rows);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < s.n_tasks(); i++) run_task(a, s, of, s.task(i), at, queries.data(), finite.data());
        if (s.shared) {
#pragma omp for
            for (int64_t n = 0; n < s.B * s.K * s.n_blocks; n++) {
                const int64_t bk = n / s.n_blocks, b = bk / s.K, from = n % s.n_blocks * s.n_rows;
                const int64_t n_rows = std::min(s.n_rows, s.R - from);
                for (int64_t r = from; r < from + n_rows; r++) {
                    Total& total = of.totals[bk * s.R + r] = {};
                    for (int64_t split = 0; split < s.splits_of(b); split++)
                        add_split(total, of.rows[s.row_of(b, bk % s.K, split) + r]);
                }
                write_results(a, s, of, bk, from, n_rows);
            }
        }
    }
}
