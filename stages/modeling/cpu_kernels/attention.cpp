// Causal attention of packed rows, forward and backward.
//
// The keys of a head, a few hundred short vectors, stay in the core's cache, and so do the scores of a block of
// queries: nothing of size length x length is written to memory, and keys after the block are not multiplied. The
// backward pass recomputes the attention weights from each query's largest score and sum of exponentials, as
// FlashAttention does (arXiv 2205.14135). Scores are stored as [keys, BLOCK], one query per lane, so that maxima and
// sums need no shuffles and only a block's queries are transposed. Sums are in fp32.
//
// Shapes: L tokens of a row, W width of a head.

#include <cmath>

#include "matmul.h"
#include "row_ranges.h"

namespace {

constexpr int64_t BLOCK = 2 * SIMD_WIDTH;  // queries

// One row's tokens; `first` is its first query. stride: W rounded up to whole vectors.
struct Row {
    const int64_t *tokens;
    int64_t length, first, width, stride;
    Row(const RowIndex &rows, int64_t row)
        : tokens(rows.tokens + rows.starts[row]), length(rows.starts[row + 1] - rows.starts[row]),
          first(rows.first_queries[row]), width(rows.width), stride(round_up(width)) {}
};

// Queries [first, first + count) over the keys [first_key, first_key + keys).
struct Block {
    int64_t first, count, first_key, keys, window;
    Block(const Row &row, int64_t first, int64_t window) : first(first), window(window) {
        count = row.length - first < BLOCK ? row.length - first : BLOCK;
        first_key = first - window + 1 > 0 ? first - window + 1 : 0;
        keys = first + count - first_key;
    }
};

// Copy `count` tokens from `first` on to [count, stride], times `factor`, padded with 0.
template <class T>
void gather(float *to, const Row &row, Head<T> from, int64_t first, int64_t count, float factor = 1) {
    for (int64_t i = 0; i < count; i++, to += row.stride) {
        const T *values = from.at(row.tokens[first + i]);
        for (int64_t w = 0; w < row.width; w += SIMD_WIDTH) store(to + w, load(values + w, row.width - w) * factor);
    }
}

// Transpose a block's [count, stride] to [W, BLOCK], 0 beyond `count`.
void transpose(float *to, const Row &row, const float *from, int64_t count) {
    for (int64_t w = 0; w < row.width; w++)
        for (int64_t i = 0; i < BLOCK; i++) to[w * BLOCK + i] = i < count ? from[i * row.stride + w] : 0;
}

template <class T>
void scatter(Head<T> to, const Row &row, const float *from, int64_t first, int64_t count, float factor, bool add) {
    for (int64_t i = 0; i < count; i++, from += row.stride) {
        T *values = to.at(row.tokens[first + i]);
        for (int64_t w = 0; w < row.width; w += SIMD_WIDTH) {
            Vector result = load(from + w) * factor;
            store(values + w, add ? result + load(values + w, row.width - w) : result, row.width - w);
        }
    }
}

// Set scores to -inf where the query of a lane, counted from `lane` on, does not attend to the block's key.
inline Vector mask_scores(Vector scores, const Block &block, int64_t key, int64_t lane) {
    int64_t ahead = block.first_key + key - block.first - lane;  // of the first lane's query
    if (ahead <= 0 && ahead + block.window >= SIMD_WIDTH) return scores;
    Bits number = {};
    for (int i = 0; i < SIMD_WIDTH; i++) number[i] = i;
    int32_t oldest = ahead + block.window < SIMD_WIDTH ? ahead + block.window : SIMD_WIDTH;
    return (number >= int32_t(ahead)) & (number < oldest) ? scores : broadcast(-INFINITY);
}

// Replace scores [keys, BLOCK] by exp(score - the query's maximum); max_scores, sums [BLOCK]. Each sum is added up in
// PARTS parts, of every PARTS-th key of the row: with SIMD_WIDTH of them in the order of decode.cpp's.
template <int PARTS>
void exponentials(float *scores, const Block &block, float *max_scores, float *sums) {
    for (int64_t lane = 0; lane < BLOCK; lane += SIMD_WIDTH) {
        Vector max_score = broadcast(-INFINITY), parts[PARTS] = {};
        for (int64_t key = 0; key < block.keys; key++) {
            Vector result = mask_scores(load(scores + key * BLOCK + lane), block, key, lane);
            max_score = result > max_score ? result : max_score;
            store(scores + key * BLOCK + lane, result);
        }
        for (int64_t key = 0; key < block.keys; key++) {
            Vector result = exponential(load(scores + key * BLOCK + lane) - max_score);
            parts[(block.first_key + key) % PARTS] += result;
            store(scores + key * BLOCK + lane, result);
        }
        for (int half = PARTS / 2; half; half /= 2)
            for (int i = 0; i < half; i++) parts[i] += parts[i + half];
        store(max_scores + lane, max_score);
        store(sums + lane, parts[0]);
    }
}

// Replace scores by attention weights, and gradients of the weights by gradients of the scores; all [keys, BLOCK].
void scores_backward(float *weights, float *grad_scores, const Block &block, const float *max_scores,
                     const float *sums) {
    for (int64_t lane = 0; lane < BLOCK; lane += SIMD_WIDTH) {
        Vector max_score = load(max_scores + lane), inverse_sum = 1 / load(sums + lane), mean = {};
        for (int64_t key = 0; key < block.keys; key++) {
            float *address = weights + key * BLOCK + lane;
            Vector weight = exponential(mask_scores(load(address), block, key, lane) - max_score) * inverse_sum;
            mean += weight * load(grad_scores + key * BLOCK + lane);
            store(address, weight);
        }
        for (int64_t key = 0; key < block.keys; key++) {
            float *address = grad_scores + key * BLOCK + lane;
            store(address, load(weights + key * BLOCK + lane) * (load(address) - mean));
        }
    }
}

template <class T>
void forward(View query, View key, View value, View out, float *max_scores, float *sums, int64_t tokens,
             const RowIndex &rows, int64_t first_head, int64_t end_head) {
    constexpr bool IN_ORDER = ADDS_IN_ORDER<T>;
    for (int64_t r = 0; r < rows.num_rows; r++) {
        Row row(rows, r);
        int64_t stride = row.stride;
        Scratch scratch(row.length * (2 * stride + BLOCK) + BLOCK * (2 * stride + row.width + 2));
        float *keys = scratch.take(row.length * stride), *values = scratch.take(row.length * stride);
        float *scores = scratch.take(row.length * BLOCK), *columns = scratch.take(row.width * BLOCK);
        float *queries = scratch.take(BLOCK * stride), *result = scratch.take(BLOCK * stride);
        float *max_score = scratch.take(BLOCK), *sum = scratch.take(BLOCK);
        for (int64_t key_head = first_head; key_head < end_head; key_head++) {
            gather<T>(keys, row, {key, key_head}, 0, row.length);
            gather<T>(values, row, {value, key_head}, 0, row.length);
            for (int64_t head = key_head * rows.groups; head < (key_head + 1) * rows.groups; head++)
                for (int64_t first = row.first; first < row.length; first += BLOCK) {
                    Block block(row, first, rows.window);
                    int64_t first_key = block.first_key * stride;
                    gather<T>(queries, row, {query, head}, first, block.count, rows.scaling);
                    transpose(columns, row, queries, block.count);
                    multiply<IN_ORDER>(scores, BLOCK, {keys + first_key, stride, 1}, columns, BLOCK, block.keys, BLOCK,
                                       row.width);
                    exponentials<IN_ORDER ? SIMD_WIDTH : 1>(scores, block, max_score, sum);
                    multiply<IN_ORDER>(result, stride, {scores, 1, BLOCK}, values + first_key, stride, block.count,
                                       stride, block.keys);
                    for (int64_t i = 0; i < block.count; i++) {
                        int64_t index = head * tokens + row.tokens[first + i];
                        max_scores[index] = max_score[i];
                        sums[index] = sum[i];
                        scatter<T>({out, head}, row, result + i * stride, first + i, 1, 1 / sum[i], false);
                    }
                }
        }
    }
}

template <class T>
void backward(View query, View key, View value, View grad_out, const float *max_scores, const float *sums,
              int64_t tokens, View grad_query, View grad_key, View grad_value, const RowIndex &rows,
              int64_t first_head, int64_t end_head) {
    for (int64_t r = 0; r < rows.num_rows; r++) {
        Row row(rows, r);
        int64_t stride = row.stride, size = row.length * stride;
        Scratch scratch(4 * size + 2 * row.length * BLOCK + BLOCK * (3 * stride + 2 * row.width + 2));
        float *keys = scratch.take(size), *values = scratch.take(size);
        float *grad_keys = scratch.take(size), *grad_values = scratch.take(size);
        float *weights = scratch.take(row.length * BLOCK), *scores = scratch.take(row.length * BLOCK);
        float *queries = scratch.take(BLOCK * stride), *query_columns = scratch.take(row.width * BLOCK);
        float *grads = scratch.take(BLOCK * stride), *grad_columns = scratch.take(row.width * BLOCK);
        float *result = scratch.take(BLOCK * stride);
        float *max_score = scratch.take(BLOCK), *sum = scratch.take(BLOCK);
        for (int64_t key_head = first_head; key_head < end_head; key_head++) {
            gather<T>(keys, row, {key, key_head}, 0, row.length);
            gather<T>(values, row, {value, key_head}, 0, row.length);
            std::memset(grad_keys, 0, size * sizeof(float));
            std::memset(grad_values, 0, size * sizeof(float));
            for (int64_t head = key_head * rows.groups; head < (key_head + 1) * rows.groups; head++)
                for (int64_t first = row.first; first < row.length; first += BLOCK) {
                    Block block(row, first, rows.window);
                    int64_t first_key = block.first_key * stride;
                    gather<T>(queries, row, {query, head}, first, block.count, rows.scaling);
                    gather<T>(grads, row, {grad_out, head}, first, block.count);
                    transpose(query_columns, row, queries, block.count);
                    transpose(grad_columns, row, grads, block.count);
                    for (int64_t i = 0; i < BLOCK; i++) {
                        int64_t index = head * tokens + row.tokens[first + (i < block.count ? i : 0)];
                        max_score[i] = max_scores[index];
                        sum[i] = sums[index];
                    }
                    multiply(weights, BLOCK, {keys + first_key, stride, 1}, query_columns, BLOCK, block.keys, BLOCK,
                             row.width);
                    multiply(scores, BLOCK, {values + first_key, stride, 1}, grad_columns, BLOCK, block.keys, BLOCK,
                             row.width);
                    scores_backward(weights, scores, block, max_score, sum);
                    multiply(result, stride, {scores, 1, BLOCK}, keys + first_key, stride, block.count, stride,
                             block.keys);
                    scatter<T>({grad_query, head}, row, result, first, block.count, rows.scaling, false);
                    multiply(grad_keys + first_key, stride, {scores, BLOCK, 1}, queries, stride, block.keys, stride,
                             block.count, true);
                    multiply(grad_values + first_key, stride, {weights, BLOCK, 1}, grads, stride, block.keys, stride,
                             block.count, true);
                }
            scatter<T>({grad_key, key_head}, row, grad_keys, 0, row.length, 1, rows.shares_prefixes);
            scatter<T>({grad_value, key_head}, row, grad_values, 0, row.length, 1, rows.shares_prefixes);
        }
    }
}

}  // namespace

extern "C" {

#define FOR_TYPE(TYPE, SUFFIX)                                                                                         \
    void attend_forward_##SUFFIX(View query, View key, View value, View out, float *max_scores, float *sums,           \
                                 int64_t tokens, const RowIndex *rows, int64_t heads, int threads) {                   \
        by_heads(heads, tokens * heads * rows->width, threads, [&](int64_t first, int64_t end) {                       \
            forward<TYPE>(query, key, value, out, max_scores, sums, tokens, *rows, first, end);                        \
        });                                                                                                            \
    }                                                                                                                  \
    void attend_backward_##SUFFIX(View query, View key, View value, View grad_out, const float *max_scores,            \
                                  const float *sums, int64_t tokens, View grad_query, View grad_key, View grad_value,  \
                                  const RowIndex *rows, int64_t heads, int threads) {                                  \
        by_heads(heads, tokens * heads * rows->width, threads, [&](int64_t first, int64_t end) {                       \
            backward<TYPE>(query, key, value, grad_out, max_scores, sums, tokens, grad_query, grad_key, grad_value,    \
                           *rows, first, end);                                                                         \
        });                                                                                                            \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(BFloat16, bf16)
}
