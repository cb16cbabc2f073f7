// Attention of one new token per row over its cached keys, and appending to the cache.

#include <cmath>

#include "matmul.h"
#include "row_ranges.h"

namespace {

inline void fill(float *values, int64_t first, int64_t end, float value) {
    for (int64_t i = first; i < end; i++) values[i] = value;
}

// Replace the scores of one query by exp(score - maximum) in columns `first` to `end` - 1, and by 0 in the others up to
// a whole vector. Return their sum.
float exponentials(float *scores, int64_t first, int64_t end) {
    int64_t stop = round_up(end);
    fill(scores, 0, first, -INFINITY);
    fill(scores, end, stop, -INFINITY);
    Vector maxima = load(scores), sums = {};
    for (int64_t i = SIMD_WIDTH; i < stop; i += SIMD_WIDTH)
        maxima = load(scores + i) > maxima ? load(scores + i) : maxima;
    float largest = reduce_max(maxima);
    for (int64_t i = 0; i < stop; i += SIMD_WIDTH) {
        Vector result = exponential(load(scores + i) - largest);
        sums += result;
        store(scores + i, result);
    }
    return reduce_sum(sums);
}

// In order, the quotient is that of attention.cpp, a product with the inverse.
template <bool IN_ORDER>
inline Vector divide(Vector result, float sum) {
    return IN_ORDER ? result * (1 / sum) : result / sum;
}

// Per row and key head: keys [width, columns], values [columns, stride].
template <class T>
void decode(View query, View out, const T *keys, const T *values, const int64_t *lengths, int64_t heads,
            int64_t columns, const RowIndex &rows, int64_t first_head, int64_t end_head) {
    constexpr bool IN_ORDER = ADDS_IN_ORDER<T>;
    int64_t stride = round_up(rows.width), groups = rows.groups;
    Scratch scratch(groups * (columns + 2 * stride + 1));
    float *scores = scratch.take(groups * columns), *queries = scratch.take(groups * stride);
    float *result = scratch.take(groups * stride), *sums = scratch.take(groups);
    for (int64_t row = 0; row < rows.num_rows; row++)
        for (int64_t key_head = first_head; key_head < end_head; key_head++) {
            int64_t cell = row * heads + key_head, length = lengths[row];
            int64_t first_column = length > rows.window ? (length - rows.window) / SIMD_WIDTH * SIMD_WIDTH : 0;
            int64_t first_visible = length > rows.window ? length - rows.window - first_column : 0;
            int64_t count = round_up(length - first_column);
            for (int64_t i = 0; i < groups; i++)
                for (int64_t w = 0; w < rows.width; w += SIMD_WIDTH)
                    store(queries + i * stride + w,
                          rows.scaling * load(Head<T>(query, key_head * groups + i).at(row) + w, rows.width - w));
            multiply<IN_ORDER>(scores, columns, {queries, stride, 1},
                               keys + cell * rows.width * columns + first_column, columns, groups, count, rows.width);
            for (int64_t i = 0; i < groups; i++)
                sums[i] = exponentials(scores + i * columns, first_visible, length - first_column);
            multiply<IN_ORDER>(result, stride, {scores, columns, 1}, values + (cell * columns + first_column) * stride,
                               stride, groups, stride, length - first_column);
            for (int64_t i = 0; i < groups; i++)
                for (int64_t w = 0; w < rows.width; w += SIMD_WIDTH)
                    store(Head<T>(out, key_head * groups + i).at(row) + w,
                          divide<IN_ORDER>(load(result + i * stride + w), sums[i]),
                          rows.width - w);
        }
}

// Store the new token's key and value in the layout that `decode` reads.
template <class T>
void append_key_value(View key, View value, T *keys, T *values, const int64_t *lengths, int64_t rows, int64_t heads,
            int64_t columns, int64_t width) {
    int64_t stride = round_up(width);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t cell = row * heads + head, column = lengths[row] - 1;
            for (int64_t w = 0; w < width; w++) {
                keys[(cell * width + w) * columns + column] = Head<T>(key, head).at(row)[w];
                values[(cell * columns + column) * stride + w] = Head<T>(value, head).at(row)[w];
            }
        }
}

}  // namespace

extern "C" {

int64_t simd_width() { return SIMD_WIDTH; }

#define FOR_TYPE(TYPE, SUFFIX)                                                                                         \
    void decode_##SUFFIX(View query, View out, const TYPE *keys, const TYPE *values, const int64_t *lengths,           \
                         int64_t columns, const RowIndex *rows, int64_t heads, int threads) {                          \
        by_heads(heads, rows->num_rows * heads * columns * rows->width, threads, [&](int64_t first, int64_t end) {     \
            decode(query, out, keys, values, lengths, heads, columns, *rows, first, end);                              \
        });                                                                                                            \
    }                                                                                                                  \
    void append_key_value_##SUFFIX(View key, View value, TYPE *keys, TYPE *values, const int64_t *lengths,             \
                                   int64_t rows, int64_t heads, int64_t width, int64_t columns, int) {                 \
        append_key_value(key, value, keys, values, lengths, rows, heads, columns, width);                              \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(BFloat16, bf16)
}
