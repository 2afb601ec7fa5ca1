// Attention of a few query rows over keys of any dtype and head dim, on any CPU. attention_avx512.cpp has the products
// of one instruction set; here they are fp32, of keys and values that are widened in registers as they are read, after
// two planes were joined.
//
// Scores have dims in their lanes, and the sums of as many keys as there are lanes are added up across them together;
// outputs have a dim in every lane, in the order in which the cache's dtype is widened. Both take as many rows together
// as fit the registers; what a row gets does not depend on them.
#include "simd.hpp"
#include "attention.hpp"

namespace {
constexpr int H = HEAD_DIM, VECTORS = H / LANES;
static_assert(H % 16 == 0 && H <= 256);
#define ALWAYS inline __attribute__((always_inline)) // so that arrays stay in registers
constexpr int TILE = 32, PAGES = TILE / PAGE;
constexpr float LOWEST = -0x1p126f; // finite, so that a difference of two is not NaN; times a scale it stays exact
constexpr float MIN_LOG2 = -100.f; // a weight below 2^-100 counts as 0: what it is multiplied by may be small, too
constexpr int32_t NO_POSITION = std::numeric_limits<int32_t>::max();
// Together: rows, keys whose products share what is read of these, and vectors of outputs; sums of each fit registers.
constexpr int ROWS = REGISTERS == 32 ? 6 : 3, KEYS = 2, WIDE = 4;

constexpr int UNROLLED = VECTORS <= 12 ? VECTORS : 4; // of more vectors GCC loads all at once, and spills sums

struct Query { // while a split is read
    alignas(64) float q[H], weight[TILE]; // weight: the scores, then the weights of a tile
};
struct Row { // one query of a split
    alignas(64) float out[H], sum[LANES];
    float max, to_log2; // to_log2: times a score, whose exp2 is its weight
    int32_t first, limit; // the first and last positions it may see
};
struct Total { // what the splits of a row have come to so far
    alignas(64) float out[H] = {};
    float max = LOWEST, sum = 0.f;
};

// The entries of a tile, wherever each lies.
struct Tile {
    const char *key[TILE], *value[TILE];
    alignas(64) float key_scale[TILE], value_scale[TILE];
    alignas(64) int32_t position[TILE]; // NO_POSITION: does not exist
    int32_t first, last; // the smallest and largest of these
    int n; // entries from n on do not exist
    int64_t ahead; // bytes from an entry to the same one of the next tile; 0: that is not prefetched
};

// The dims of an entry of this dtype as vector v has them, LANES each. Vectors of bf16 come in twos, the first of which
// has the even dims of both: half a word becomes fp32 by one instruction.
template <Dtype D> static constexpr bool in_twos(int v) { return D == BF16 && (v / 2 + 1) * 2 * LANES <= H; }
template <Dtype D> static ALWAYS F load_dims(const void* from, int v) {
    if constexpr (D == BF16) {
        if (!in_twos<D>(v)) return load_bf16((const bf16*)from + v * LANES);
        const I two = load<I>((const bf16*)from + v / 2 * 2 * LANES);
        return (F)(v % 2 ? two & -0x10000 : two << 16);
    } else if constexpr (D == FP16) return load_fp16((const fp16*)from + v * LANES);
    else if constexpr (D == INT8) return load_int8_as_float((const int8_t*)from + v * LANES);
    else return load<F>((const float*)from + v * LANES);
}
template <class Body> static inline void with_dtype(Dtype dtype, Body body) {
    if (dtype == BF16) body(std::integral_constant<Dtype, BF16>{});
    else if (dtype == FP16) body(std::integral_constant<Dtype, FP16>{});
    else if (dtype == INT8) body(std::integral_constant<Dtype, INT8>{});
    else body(std::integral_constant<Dtype, FP32>{});
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

// The sums across the lanes of each of x [LANES], in its order.
template <int... L> static ALWAYS F sums_across(F* x, std::integer_sequence<int, L...> lanes) {
    int n = LANES;
#pragma GCC unroll 2
    for (int level = 0; level < 2; level++) { // within each four lanes
        n /= 2;
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            const F a = x[2 * i], b = x[2 * i + 1];
            x[i] = shuffle<(L / 4 * 4 + L % 2 * 2 + (L & 2 ? LANES : 0))...>(a, b) +
                   shuffle<(L / 4 * 4 + L % 2 * 2 + 1 + (L & 2 ? LANES : 0))...>(a, b);
        }
    }
    if constexpr (LANES >= 8) {
#pragma GCC unroll 2
        for (int i = 0; i < LANES / 8; i++) {
            const F a = x[2 * i], b = x[2 * i + 1];
            x[i] = shuffle<(L & 4 ? LANES + (L ^ 4) : L)...>(a, b) + shuffle<(L & 4 ? LANES + L : L | 4)...>(a, b);
        }
    }
    if constexpr (LANES == 16) // fours 0 and 2 of each have its first four sums
        return shuffle<(L % 4 + L / 4 % 2 * 4 + (L & 8 ? LANES : 0))...>(x[0], x[1]) +
               shuffle<(L % 4 + L / 4 % 2 * 4 + 8 + (L & 8 ? LANES : 0))...>(x[0], x[1]);
    return x[0];
}

static ALWAYS void prefetch(const char* from, int bytes) {
#pragma GCC unroll 16
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}
template <Dtype D> constexpr int BYTES = H * (D == FP32 ? 4 : D == INT8 ? 1 : 2); // of an entry

// The entries of the next tile that are prefetched while some rows read this one: a core has only so many loads in
// flight, and all at once would hold up what is read now.
struct Share {
    int from, end;
    int64_t ahead;

    template <Dtype D, int N> ALWAYS void prefetch_entries(const char* const* entries, int j) const {
        if (j < from || j >= end) return;
#pragma GCC unroll 2
        for (int i = 0; i < N; i++) prefetch(entries[i] + ahead, BYTES<D>);
    }
};

// Q K': the scores of N rows over a tile.
template <Dtype D, int N> static ALWAYS void compute_scores(const Tile& tile, Query* queries, Share share) {
    for (int j = 0; j < TILE && j < tile.n; j += LANES) {
        F sum[N][LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES; i += KEYS) {
            const char* const* keys = tile.key + j + i;
            F of[N][KEYS] = {};
            share.prefetch_entries<D, KEYS>(keys, j + i);
#pragma GCC unroll UNROLLED
            for (int v = 0; v < VECTORS; v++) {
                F key[KEYS];
#pragma GCC unroll 4
                for (int k = 0; k < KEYS; k++) key[k] = load_dims<D>(keys[k], v);
#pragma GCC unroll 6
                for (int r = 0; r < N; r++) {
                    const F q = load<F>(queries[r].q + v * LANES);
#pragma GCC unroll 4
                    for (int k = 0; k < KEYS; k++) of[r][k] = fmadd(of[r][k], q, key[k]);
                }
            }
#pragma GCC unroll 6
            for (int r = 0; r < N; r++)
#pragma GCC unroll 4
                for (int k = 0; k < KEYS; k++) sum[r][i + k] = of[r][k];
        }
#pragma GCC unroll 6
        for (int r = 0; r < N; r++) {
            const F score = sums_across(sum[r], std::make_integer_sequence<int, LANES>{});
            store(queries[r].weight + j, score * load<F>(tile.key_scale + j));
        }
    }
}

// Which of some positions a row sees.
static ALWAYS I seen_by(const Row& row, const int32_t* positions) {
    const I position = load<I>(positions);
    return (position >= row.first) & (position <= row.limit);
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
        if (!WHOLE) score[c] = seen_by(row, tile.position + c * LANES) ? score[c] : broadcast(LOWEST);
        best = larger(score[c], best);
    }
    float shrink = 1.f;
    if (any_above(best, row.max)) { // rare, after the first tiles
        const float top = reduce_max(best);
        shrink = exp2f((row.max - top) * row.to_log2), row.max = top;
    }
    const F scale = broadcast(row.to_log2), max = broadcast(row.max);
    F sum = load<F>(row.sum) * shrink;
    if (page_sum) std::fill_n(page_sum, PAGES, 0.f);
#pragma GCC unroll 16
    for (int c = 0; c < V; c++) {
        const F power = (score[c] - max) * scale, exp = power < MIN_LOG2 ? F{} : exp2_in_range(power);
        const I seen = seen_by(row, tile.position + c * LANES);
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
template <Dtype D, int N, int C>
static ALWAYS void accumulate_values(const Tile& tile, int from, Row* rows, const Query* queries, const float* shrink,
                                     Share share) {
    F out[N][C];
#pragma GCC unroll 6
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) out[r][c] = load<F>(rows[r].out + (from + c) * LANES) * shrink[r];
    for (int j = 0; j < tile.n; j++) {
        share.prefetch_entries<D, 1>(tile.value + j, j);
#pragma GCC unroll 4
        for (int c = 0; c < C; c += 2) {
            F value[2];
            for (int i = 0; i < 2 && c + i < C; i++) value[i] = load_dims<D>(tile.value[j], from + c + i);
            asm volatile("" ::: "memory"); // weights are loaded again: all of them and the values fit no registers
#pragma GCC unroll 6
            for (int r = 0; r < N; r++) {
                const F weight = broadcast(queries[r].weight[j]);
                for (int i = 0; i < 2 && c + i < C; i++) out[r][c + i] = fmadd(out[r][c + i], weight, value[i]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(rows[r].out + (from + c) * LANES, out[r][c]);
}

template <Dtype D, int N>
static __attribute__((noinline)) void read_rows(const Tile& tile, Row* rows, Query* queries, float* page_sum,
                                                float* page_max, Share share) {
    constexpr int REST = VECTORS % WIDE;
    compute_scores<D, N>(tile, queries, share);
    float shrink[N];
    for (int r = 0; r < N; r++) {
        const bool whole = rows[r].first <= tile.first && tile.last <= rows[r].limit;
        const auto step = whole ? online_softmax_step<true> : online_softmax_step<false>;
        float *sums = page_sum ? page_sum + r * PAGES : nullptr, *max = page_sum ? page_max + r : nullptr;
        shrink[r] = step(tile, rows[r], queries[r].weight, sums, max);
    }
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS - REST; c += WIDE)
        accumulate_values<D, N, WIDE>(tile, c, rows, queries, shrink, c ? Share{} : share);
    if constexpr (REST)
        accumulate_values<D, N, REST>(tile, VECTORS - REST, rows, queries, shrink, VECTORS == REST ? share : Share{});
}

static void read_tile(Dtype dtype, const Tile& tile, Row* rows, Query* queries, int64_t n_rows, float* page_sum,
                      float* page_max) {
    with_dtype(dtype, [&](auto d) {
        for_row_blocks<ROWS>(0, n_rows, [&](auto n, int64_t r) {
            float *sums = page_sum ? page_sum + r * PAGES : nullptr, *maxima = page_sum ? page_max + r : nullptr;
            auto part = [&](int64_t row) { return tile.ahead ? int(row * TILE / n_rows + 1) / KEYS * KEYS : 0; };
            const Share share = {part(r), part(r + n()), tile.ahead};
            read_rows<decltype(d)::value, n()>(tile, rows + r, queries + r, sums, maxima, share);
        });
    });
}

// The dtype in whose order dims come, see load_dims.
static inline Dtype order_of(const AttentionCall& a) { return a.k_low ? FP32 : a.k_dtype; }
// Dims in the order of bf16 -> as they are numbered.
static void to_order(float* dims) {
    for (int v = 0; in_twos<BF16>(v); v += 2) {
        alignas(64) float both[2 * LANES];
        memcpy(both, dims + v * LANES, sizeof both);
        for (int i = 0; i < 2 * LANES; i++) dims[v * LANES + i] = both[i / 2 + i % 2 * LANES];
    }
}
static inline int64_t query_bytes(const AttentionCall& a) { return a.q_dtype == FP32 ? 4 : 2; } // of a number
static inline int64_t entry_bytes(const AttentionCall& a) {
    return a.k_low ? H / 2 : a.k_dtype == FP32 ? 4 * H : a.k_dtype == INT8 ? H : 2 * H;
}

// The tile that a thread reads, and where its planes are joined.
struct Scratch {
    alignas(64) float key[TILE * H], value[TILE * H];
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
        tile.first = (int32_t)start, tile.last = tile.n == TILE ? last : NO_POSITION;
        return;
    }
    tile.first = NO_POSITION, tile.last = 0;
    for (int j = 0; j < TILE; j++) {
        tile.position[j] = j < tile.n && listed[j] >= 0 ? (int32_t)listed[j] : NO_POSITION;
        tile.first = std::min(tile.first, tile.position[j]), tile.last = std::max(tile.last, tile.position[j]);
    }
}

// Find the tile of batch row b's kv head that begins at `start`; end: where its task's reading ends; last_seen: the
// last position that any of the task's rows sees. What no query sees counts as 0, whatever lies there.
static void find_tile(const AttentionCall& a, int64_t b, int64_t head, int64_t start, int64_t end, int64_t last_seen,
                      Scratch& at) {
    static const char zeros[4 * H] = {};
    const int64_t number = a.k_dtype == INT8 ? 1 : a.k_dtype == FP32 ? 4 : 2; // bytes
    const int64_t base = (b * a.kv_b + head * a.kv_k) * number, entry = entry_bytes(a);
    const int64_t scales = b * a.scale_b + head * a.scale_k;
    const char *keys = (const char*)a.k + base, *values = (const char*)a.v + base;
    const int64_t* listed = a.index ? a.index + (b * a.K + head) * a.M + start : nullptr;
    const int64_t whole_from = a.tail ? a.pos[b * a.T] - a.tail + 1 : 0; // before: the upper plane alone
    const bool in_order = !listed && !a.k_low;
    Tile& tile = at.tile;
    tile.n = (int)std::min<int64_t>(TILE, end - start);
    tile.ahead = in_order && end - start >= 2 * TILE ? TILE * entry : 0;
    set_positions(tile, listed, start);
    auto place_of = [&](int64_t j) { return listed ? std::clamp<int64_t>(listed[j], 0, a.S - 1) : start + j; };
    if (in_order && tile.n == TILE) {
        const char *key = keys + start * entry, *value = values + start * entry;
        for (int j = 0; j < TILE; j++, key += entry, value += entry) tile.key[j] = key, tile.value[j] = value;
    } else {
        for (int j = 0; j < TILE; j++) {
            const bool exists = j < tile.n && (!listed || (listed[j] >= 0 && listed[j] <= last_seen));
            tile.key[j] = exists ? keys + place_of(j) * entry : zeros;
            tile.value[j] = exists ? values + place_of(j) * entry : zeros;
        }
    }
    for (int64_t j = TILE; !tile.ahead && j < std::min<int64_t>(2 * TILE, end - start); j++) // the next tile's entries
        prefetch(keys + place_of(j) * entry, entry), prefetch(values + place_of(j) * entry, entry);
    const bool together = !a.k_scale || (!listed && tile.n == TILE); // scales are loaded
    for (int j = 0; j < TILE && together; j += LANES) {
        store(tile.key_scale + j, a.k_scale ? load_fp16(a.k_scale + scales + start + j) : broadcast(1.f));
        store(tile.value_scale + j, a.v_scale ? load_fp16(a.v_scale + scales + start + j) : broadcast(1.f));
    }
    for (int j = 0; j < TILE && !together; j++) { // of what does not exist, any number
        tile.key_scale[j] = j < tile.n ? fp16_to_float(a.k_scale[scales + place_of(j)]) : 1.f;
        tile.value_scale[j] = j < tile.n ? fp16_to_float(a.v_scale[scales + place_of(j)]) : 1.f;
    }
    for (int j = 0; j < tile.n && a.k_low; j++) {
        if (tile.key[j] == zeros) continue;
        const int64_t low = base + place_of(j) * entry;
        const bool whole = place_of(j) >= whole_from;
        join_planes((const uint8_t*)tile.key[j], whole ? a.k_low + low : nullptr, at.key + j * H);
        join_planes((const uint8_t*)tile.value[j], whole ? a.v_low + low : nullptr, at.value + j * H);
        tile.key[j] = (const char*)(at.key + j * H), tile.value[j] = (const char*)(at.value + j * H);
    }
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
        alignas(64) float dims[H];
        for (int v = 0; v < VECTORS; v++)
            store(dims + v * LANES, total.sum == 0.f ? F{} : load<F>(total.out + v * LANES) / broadcast(total.sum));
        if (order_of(a) == BF16) to_order(dims);
        for (int c = 0; c < VECTORS; c++) {
            const F x = load<F>(dims + c * LANES);
            if (a.q_dtype == FP32) store((float*)to + c * LANES, x);
            else if (a.q_dtype == FP16) store_fp16((fp16*)to + c * LANES, x);
            else store_bf16((bf16*)to + c * LANES, x);
        }
    }
}

// A query row of a kv head, in fp32. Of one that is not finite zeros, and false: its scores must be numbers, as whether
// it sees anything is told by the largest.
static bool load_query(const AttentionCall& a, const Task& task, int64_t r, float* q) {
    const int64_t g = r / a.T, t = r % a.T, row = task.b * a.q_b + (task.head * a.G + g) * a.q_n + t * a.q_t;
    const char* from = (const char*)a.q + row * query_bytes(a);
    for (int v = 0; v < VECTORS; v++) {
        F x;
        if (order_of(a) == BF16) x = load_dims<BF16>(from, v);
        else if (a.q_dtype == BF16) x = load_bf16((const bf16*)from + v * LANES);
        else x = a.q_dtype == FP16 ? load_dims<FP16>(from, v) : load_dims<FP32>(from, v);
        store(q + v * LANES, x);
    }
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
    int64_t first = std::numeric_limits<int64_t>::max(), last_seen = -1; // the first and last seen by any row
    for (int64_t r = 0; r < n_rows; r++) {
        finite[r] = load_query(a, task, task.first_row + r, queries[r].q);
        last_seen = std::max<int64_t>(last_seen, limit_of(r));
        if (limit_of(r) >= 0) first = std::min(first, first_seen(a, limit_of(r)));
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
            row.max = LOWEST, row.limit = limit_of(r), row.first = (int32_t)first_seen(a, row.limit);
        }
        const int64_t end = std::min(n_keys, (split + 1) * SPLIT);
        for (int64_t start = std::max(split * SPLIT, a.index ? 0 : first / TILE * TILE); start < end; start += TILE) {
            find_tile(a, b, head, start, end_of_task, last_seen, at);
            const int64_t n = (bk * s.n_tiles + start / TILE) * s.R;
            read_tile(order_of(a), at.tile, rows, queries, n_rows, of.sums_of(n), of.maxima_of(n));
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
