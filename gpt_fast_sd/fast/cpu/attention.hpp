// Shared by both attention kernels: a call's arguments, and how its work is cut into tasks.
//
// Flash-decoding (Dao et al. 2023): the keys of a row are cut into splits at absolute positions, each split is read
// once with an online softmax, and the splits are added up in the order of their keys. Sums never depend on what else
// is in the batch, on the number of queries, on how much of the cache is in view or on which thread reads which split:
// where there are rows enough for all threads, one reads all splits of some rows, else they share those of a row.
//
// Names: B batch, K kv heads, G query heads a kv head, T queries a head, R = G * T rows of one kv head, H head dim,
// S capacity, M keys in view or entries listed, bk = b * K + head.

// One call; attention_cpp.py and layers.cpp fill it. A query at or past M sees nothing: its output is 0, and it costs
// no reading. Positions are below 2^31.
struct AttentionCall {
    const void *q, *k, *v; // [B, K * G, T, H] with strides (q_b, q_n, q_t); [B, K, S, H] with strides (kv_b, kv_k)
    const fp16 *k_scale, *v_scale; // null, or of int8: [B, K, S] with strides (scale_b, scale_k)
    const uint8_t *k_low, *v_low; // null, or the lower planes, of which k, v are the upper ones then: [B, K, S, H / 2]
    const int64_t *pos, *index; // [B, T]; null or the entries to read [B, K, M], -1 is nothing
    void* out; // [B, K * G, T, H]
    float* mass; // null or [B, K, M / 16]: the attention that each 16 keys received from all rows of a kv head
    int64_t B, K, G, T, M, S, q_b, q_n, q_t, kv_b, kv_k, scale_b, scale_k;
    int64_t tail; // of planes, entries before pos[b, 0] - tail + 1 are read of the upper one alone; 0: none
    int64_t window; // entries before a query's place - window + 1 it does not see, nor are their tiles read; 0: it does
    Dtype q_dtype, k_dtype; // fp32, fp16 or bf16; the same or int8
    int64_t fine; // whether queries over int8 have two bytes a number; only the kernel for AVX-512 rounds them at all
    float scale; // of scores
    int threads;
};
typedef void AttentionKernel(const AttentionCall*);

// The first position that a query which sees up to `limit` may see.
static inline int64_t first_seen(const AttentionCall& a, int64_t limit) {
    return a.window ? std::max<int64_t>(limit - a.window + 1, 0) : 0;
}

namespace {
constexpr int PAGE = 16, SPLIT = 1024; // keys
constexpr int BLOCK = 64; // rows that read a split together, at least
constexpr int TASKS = 8; // a thread, if there are rows enough
constexpr int64_t MAX_KEPT = 64 << 20; // bytes of the rows of all splits that are kept at once

// Some splits and some rows of a kv head.
struct Task {
    int64_t b, head, first_split, end_split, first_row, n_rows;
};

struct Schedule {
    const int64_t B, K, T, M, R;
    const int64_t slots; // rows that are kept of a kv head's split: R, rounded up
    int64_t n_tiles, n_rows, n_blocks; // of the longest row; rows of a block, and blocks of a kv head
    int64_t splits_per_task, n_kept; // n_kept: the splits whose rows are kept
    bool shared; // whether the splits of a row are different tasks'; the results are added up afterwards
    const int64_t *first_split, *first_task; // of batch row b: first_split[b], for one kv head; [B] has the total

    // multiple: of rows that are computed together; tile: its keys; row_bytes: of what is kept of a row
    Schedule(const AttentionCall& a, int64_t multiple, int64_t tile, int64_t row_bytes)
        : B(a.B), K(a.K), T(a.T), M(a.M), R(a.G * a.T), slots((R + multiple - 1) / multiple * multiple) {
        static thread_local std::vector<int64_t> splits, tasks; // kept between calls
        splits.assign(B + 1, 0), tasks.assign(B + 1, 0);
        int64_t longest = 0; // keys that some query sees, or entries listed
        for (int64_t b = 0; b < B; b++) {
            int64_t n_keys = a.index ? M : 0;
            for (int64_t t = 0; t < T && !a.index; t++) {
                const int64_t place = a.pos[b * T + t];
                n_keys = std::max(n_keys, place < M ? place + 1 : 0);
            }
            longest = std::max(longest, n_keys);
            splits[b + 1] = splits[b] + std::max<int64_t>(1, (n_keys + SPLIT - 1) / SPLIT);
        }
        const int64_t n_splits = std::max<int64_t>(1, (longest + SPLIT - 1) / SPLIT), target = TASKS * a.threads;
        const int64_t n_wanted = a.mass ? 1 : (target + B * K - 1) / (B * K); // blocks; mass is summed over all rows
        n_rows = ((R + n_wanted - 1) / n_wanted + multiple - 1) / multiple * multiple;
        n_rows = std::min(std::clamp<int64_t>(n_rows, BLOCK, std::max<int64_t>(slots, BLOCK)), std::max<int64_t>(R, 1));
        n_blocks = std::max<int64_t>(1, (R + n_rows - 1) / n_rows);
        n_tiles = (longest + tile - 1) / tile;
        // shared if rows as long as the longest one are fewer than the tasks wanted, and what is kept is not too much
        const int64_t work = K * n_blocks * splits[B];
        shared = n_splits > 1 && work < target * n_splits && K * splits[B] * slots * row_bytes <= MAX_KEPT;
        splits_per_task = shared ? std::max<int64_t>(1, work / target) : n_splits;
        n_kept = shared ? K * splits[B] : B * K;
        first_split = splits.data(), first_task = tasks.data();
        for (int64_t b = 0; b < B; b++) tasks[b + 1] = tasks[b] + K * n_blocks * parts_of(b);
    }

    int64_t splits_of(int64_t b) const { return first_split[b + 1] - first_split[b]; }
    int64_t parts_of(int64_t b) const { return (splits_of(b) + splits_per_task - 1) / splits_per_task; }
    int64_t n_tasks() const { return first_task[B]; }
    Task task(int64_t i) const {
        const int64_t b = std::upper_bound(first_task, first_task + B, i) - first_task - 1, n_parts = parts_of(b);
        const int64_t number = i - first_task[b], block = number % n_blocks, part = number / n_blocks % n_parts;
        const int64_t head = number / n_blocks / n_parts, first = part * splits_per_task, row = block * n_rows;
        return {b, head, first, std::min(splits_of(b), first + splits_per_task), row, std::min(n_rows, R - row)};
    }
    // Where the rows of a split are kept.
    int64_t row_of(int64_t b, int64_t head, int64_t split) const {
        return (shared ? K * first_split[b] + head * splits_of(b) + split : b * K + head) * slots;
    }
};

// What all threads of a call read and write; kept between calls, as fresh pages of memory would cost more than a small
// call, and used by address, as each thread has thread_locals of its own.
template <class Row, class Total> struct Buffers {
    Row* rows; // see Schedule.row_of
    Total* totals; // [B * K, R]: what the splits of a row have come to so far
    float *page_sum = nullptr, *page_max = nullptr; // of mass: [B * K, n_tiles, R, pages], [B * K, n_tiles, R]
    int pages; // of a tile

    // lowest: the maximum of no scores
    Buffers(const AttentionCall& a, const Schedule& s, int pages, float lowest) : pages(pages) {
        static thread_local std::vector<Row> kept_rows;
        static thread_local std::vector<Total> kept_totals;
        static thread_local std::vector<float> kept_sums, kept_maxima;
        const int64_t n_rows = s.n_kept * s.slots, n_totals = s.B * s.K * s.R;
        if ((int64_t)kept_rows.size() < n_rows) kept_rows.clear(), kept_rows.resize(n_rows);
        if ((int64_t)kept_totals.size() < n_totals) kept_totals.clear(), kept_totals.resize(n_totals);
        rows = kept_rows.data(), totals = kept_totals.data();
        if (!a.mass) return;
        kept_sums.resize(n_totals * s.n_tiles * pages);
        kept_maxima.assign(n_totals * s.n_tiles, lowest);
        page_sum = kept_sums.data(), page_max = kept_maxima.data();
    }
    float* sums_of(int64_t tile_rows) const { return page_sum ? page_sum + tile_rows * pages : nullptr; }
    float* maxima_of(int64_t tile_rows) const { return page_max ? page_max + tile_rows : nullptr; }

    // The mass of a kv head, all rows of which are done.
    void write_mass(const AttentionCall& a, const Schedule& s, int64_t bk, float lowest) const {
        float* mass = a.mass + bk * (s.M / PAGE);
        memset(mass, 0, s.M / PAGE * sizeof(float));
        for (int64_t t = 0; t < s.n_tiles; t++)
            for (int64_t r = 0; r < s.R; r++) {
                const int64_t n = (bk * s.n_tiles + t) * s.R + r;
                if (page_max[n] == lowest) continue; // nothing seen here
                const Total& total = totals[bk * s.R + r];
                const float to_log2 = rows[s.row_of(bk / s.K, bk % s.K, 0) + r].to_log2;
                const float share = exp2f((page_max[n] - total.max) * to_log2) / total.sum;
                for (int p = 0; p < pages && t * pages + p < s.M / PAGE; p++)
                    mass[t * pages + p] += page_sum[n * pages + p] * share;
            }
    }
};
}
