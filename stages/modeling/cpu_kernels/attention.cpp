// Causal attention of rows of tokens, forward and backward.
//
// A head's keys, a few hundred short vectors, stay in the core's cache, and so do the scores of a block of queries:
// nothing of the size of length x length is written to memory, and keys after the block are not multiplied. The
// backward pass makes the shares anew from the largest score and the sum of each query, as FlashAttention does (arXiv
// 2205.14135). Scores lie [keys, BLOCK], a query a lane: its largest, sum and mean are taken in its lane, and only a
// block's queries are ever transposed. Sums are in fp32.
//
// Shapes: L tokens of a row, W width of a head.

#include <cmath>

#include "matmul.h"
#include "row_ranges.h"

namespace {

constexpr int64_t BLOCK = 2 * LANES;  // queries

// One row's tokens; wide: W in whole vectors.
struct Row {
    const int64_t *tokens;
    int64_t length, first, width, wide;
    Row(const Rows &rows, int64_t row)
        : tokens(rows.tokens + rows.starts[row]), length(rows.starts[row + 1] - rows.starts[row]),
          first(rows.firsts[row]), width(rows.width), wide(rounded(width)) {}
};

// Queries first to before first + count, over the keys seen to before seen + keys.
struct Block {
    int64_t first, count, seen, keys, window;
    Block(const Row &row, int64_t first, int64_t window) : first(first), window(window) {
        count = row.length - first < BLOCK ? row.length - first : BLOCK;
        seen = first - window + 1 > 0 ? first - window + 1 : 0;
        keys = first + count - seen;
    }
};

// Tokens from `first` on to [count, wide], times `factor`; what lies beyond a head's width is 0.
template <class T>
void gather(float *to, const Row &row, Head<T> from, int64_t first, int64_t count, float factor = 1) {
    for (int64_t i = 0; i < count; i++, to += row.wide) {
        const T *values = from.at(row.tokens[first + i]);
        for (int64_t w = 0; w < row.width; w += LANES) store(to + w, load(values + w, row.width - w) * factor);
    }
}

// A block's [count, wide] to [W, BLOCK], 0 beyond `count`.
void transpose(float *to, const Row &row, const float *from, int64_t count) {
    for (int64_t w = 0; w < row.width; w++)
        for (int64_t i = 0; i < BLOCK; i++) to[w * BLOCK + i] = i < count ? from[i * row.wide + w] : 0;
}

template <class T>
void scatter(Head<T> to, const Row &row, const float *from, int64_t first, int64_t count, float factor, bool add) {
    for (int64_t i = 0; i < count; i++, from += row.wide) {
        T *values = to.at(row.tokens[first + i]);
        for (int64_t w = 0; w < row.width; w += LANES) {
            Lanes found = load(from + w) * factor;
            store(values + w, add ? found + load(values + w, row.width - w) : found, row.width - w);
        }
    }
}

// -inf where the queries of the lanes from `lane` on do not see the block's key.
inline Lanes masked(Lanes scores, const Block &block, int64_t key, int64_t lane) {
    int64_t ahead = block.seen + key - block.first - lane;  // of the first lane's query
    if (ahead <= 0 && ahead + block.window >= LANES) return scores;
    Bits place = {};
    for (int i = 0; i < LANES; i++) place[i] = i;
    int32_t oldest = ahead + block.window < LANES ? ahead + block.window : LANES;
    return (place >= int32_t(ahead)) & (place < oldest) ? scores : all(-INFINITY);
}

// Scores [keys, BLOCK] to e^(score - largest of the query); largest, sums [BLOCK].
void exponentials(float *scores, const Block &block, float *largest, float *sums) {
    for (int64_t lane = 0; lane < BLOCK; lane += LANES) {
        Lanes most = all(-INFINITY), sum = {};
        for (int64_t key = 0; key < block.keys; key++) {
            Lanes found = masked(load(scores + key * BLOCK + lane), block, key, lane);
            most = found > most ? found : most;
            store(scores + key * BLOCK + lane, found);
        }
        for (int64_t key = 0; key < block.keys; key++) {
            Lanes found = exponential(load(scores + key * BLOCK + lane) - most);
            sum += found;
            store(scores + key * BLOCK + lane, found);
        }
        store(largest + lane, most);
        store(sums + lane, sum);
    }
}

// Scores to shares, and gradients of the shares to gradients of the scores; all [keys, BLOCK].
void score_gradients(float *shares, float *gradients, const Block &block, const float *largest, const float *sums) {
    for (int64_t lane = 0; lane < BLOCK; lane += LANES) {
        Lanes most = load(largest + lane), part = 1 / load(sums + lane), mean = {};
        for (int64_t key = 0; key < block.keys; key++) {
            float *place = shares + key * BLOCK + lane;
            Lanes share = exponential(masked(load(place), block, key, lane) - most) * part;
            mean += share * load(gradients + key * BLOCK + lane);
            store(place, share);
        }
        for (int64_t key = 0; key < block.keys; key++) {
            float *place = gradients + key * BLOCK + lane;
            store(place, load(shares + key * BLOCK + lane) * (load(place) - mean));
        }
    }
}

template <class T>
void forward(View query, View key, View value, View out, float *largest, float *sums, int64_t tokens, const Rows &rows,
             int64_t first_head, int64_t end_head) {
    for (int64_t r = 0; r < rows.rows; r++) {
        Row row(rows, r);
        Scratch scratch(row.length * (2 * row.wide + BLOCK) + BLOCK * (2 * row.wide + row.width + 2));
        float *keys = scratch.take(row.length * row.wide), *values = scratch.take(row.length * row.wide);
        float *scores = scratch.take(row.length * BLOCK), *columns = scratch.take(row.width * BLOCK);
        float *queries = scratch.take(BLOCK * row.wide), *found = scratch.take(BLOCK * row.wide);
        float *most = scratch.take(BLOCK), *sum = scratch.take(BLOCK);
        for (int64_t shared = first_head; shared < end_head; shared++) {
            gather<T>(keys, row, {key, shared}, 0, row.length);
            gather<T>(values, row, {value, shared}, 0, row.length);
            for (int64_t head = shared * rows.groups; head < (shared + 1) * rows.groups; head++)
                for (int64_t first = row.first; first < row.length; first += BLOCK) {
                    Block block(row, first, rows.window);
                    gather<T>(queries, row, {query, head}, first, block.count, rows.scaling);
                    transpose(columns, row, queries, block.count);
                    multiply(scores, BLOCK, {keys + block.seen * row.wide, row.wide, 1}, columns, BLOCK, block.keys,
                             BLOCK, row.width);
                    exponentials(scores, block, most, sum);
                    multiply(found, row.wide, {scores, 1, BLOCK}, values + block.seen * row.wide, row.wide,
                             block.count, row.wide, block.keys);
                    for (int64_t i = 0; i < block.count; i++) {
                        int64_t place = head * tokens + row.tokens[first + i];
                        largest[place] = most[i];
                        sums[place] = sum[i];
                        scatter<T>({out, head}, row, found + i * row.wide, first + i, 1, 1 / sum[i], false);
                    }
                }
        }
    }
}

template <class T>
void backward(View query, View key, View value, View gradient, const float *largest, const float *sums, int64_t tokens,
              View of_query, View of_key, View of_value, const Rows &rows, int64_t first_head, int64_t end_head) {
    for (int64_t r = 0; r < rows.rows; r++) {
        Row row(rows, r);
        int64_t size = row.length * row.wide;
        Scratch scratch(4 * size + 2 * row.length * BLOCK + BLOCK * (3 * row.wide + 2 * row.width + 2));
        float *keys = scratch.take(size), *values = scratch.take(size);
        float *key_slopes = scratch.take(size), *value_slopes = scratch.take(size);
        float *shares = scratch.take(row.length * BLOCK), *scores = scratch.take(row.length * BLOCK);
        float *queries = scratch.take(BLOCK * row.wide), *query_columns = scratch.take(row.width * BLOCK);
        float *slopes = scratch.take(BLOCK * row.wide), *slope_columns = scratch.take(row.width * BLOCK);
        float *found = scratch.take(BLOCK * row.wide), *most = scratch.take(BLOCK), *sum = scratch.take(BLOCK);
        for (int64_t shared = first_head; shared < end_head; shared++) {
            gather<T>(keys, row, {key, shared}, 0, row.length);
            gather<T>(values, row, {value, shared}, 0, row.length);
            std::memset(key_slopes, 0, size * sizeof(float));
            std::memset(value_slopes, 0, size * sizeof(float));
            for (int64_t head = shared * rows.groups; head < (shared + 1) * rows.groups; head++)
                for (int64_t first = row.first; first < row.length; first += BLOCK) {
                    Block block(row, first, rows.window);
                    int64_t seen = block.seen * row.wide;
                    gather<T>(queries, row, {query, head}, first, block.count, rows.scaling);
                    gather<T>(slopes, row, {gradient, head}, first, block.count);
                    transpose(query_columns, row, queries, block.count);
                    transpose(slope_columns, row, slopes, block.count);
                    for (int64_t i = 0; i < BLOCK; i++) {
                        int64_t place = head * tokens + row.tokens[first + (i < block.count ? i : 0)];
                        most[i] = largest[place];
                        sum[i] = sums[place];
                    }
                    multiply(shares, BLOCK, {keys + seen, row.wide, 1}, query_columns, BLOCK, block.keys, BLOCK,
                             row.width);
                    multiply(scores, BLOCK, {values + seen, row.wide, 1}, slope_columns, BLOCK, block.keys, BLOCK,
                             row.width);
                    score_gradients(shares, scores, block, most, sum);
                    multiply(found, row.wide, {scores, 1, BLOCK}, keys + seen, row.wide, block.count, row.wide,
                             block.keys);
                    scatter<T>({of_query, head}, row, found, first, block.count, rows.scaling, false);
                    multiply(key_slopes + seen, row.wide, {scores, BLOCK, 1}, queries, row.wide, block.keys, row.wide,
                             block.count, true);
                    multiply(value_slopes + seen, row.wide, {shares, BLOCK, 1}, slopes, row.wide, block.keys, row.wide,
                             block.count, true);
                }
            scatter<T>({of_key, shared}, row, key_slopes, 0, row.length, 1, rows.shares);
            scatter<T>({of_value, shared}, row, value_slopes, 0, row.length, 1, rows.shares);
        }
    }
}

}  // namespace

extern "C" {

#define FOR_TYPE(TYPE, SUFFIX)                                                                                         \
    void attend_forward_##SUFFIX(View query, View key, View value, View out, float *largest, float *sums,              \
                                 int64_t tokens, const Rows *rows, int64_t heads, int threads) {                       \
        by_heads(heads, tokens * heads * rows->width, threads, [&](int64_t first, int64_t end) {                       \
            forward<TYPE>(query, key, value, out, largest, sums, tokens, *rows, first, end);                           \
        });                                                                                                            \
    }                                                                                                                  \
    void attend_backward_##SUFFIX(View query, View key, View value, View gradient, const float *largest,               \
                                  const float *sums, int64_t tokens, View of_query, View of_key, View of_value,        \
                                  const Rows *rows, int64_t heads, int threads) {                                      \
        by_heads(heads, tokens * heads * rows->width, threads, [&](int64_t first, int64_t end) {                       \
            backward<TYPE>(query, key, value, gradient, largest, sums, tokens, of_query, of_key, of_value, *rows,      \
                           first, end);                                                                                \
        });                                                                                                            \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(BFloat16, bf16)
}
