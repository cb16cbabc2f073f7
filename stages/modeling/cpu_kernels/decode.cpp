// One new token a row over the keys of all tokens before it: decoding.

#include <cmath>

#include "matmul.h"
#include "row_ranges.h"

namespace {

inline void fill(float *values, int64_t first, int64_t end, float value) {
    for (int64_t i = first; i < end; i++) values[i] = value;
}

// Scores of one query, of which it sees those from `first` to before `end`: their exponentials less the largest, 0 for
// the others up to a whole vector. Returns their sum.
float exponentials(float *scores, int64_t first, int64_t end) {
    int64_t stop = rounded(end);
    fill(scores, 0, first, -INFINITY);
    fill(scores, end, stop, -INFINITY);
    Lanes most = load(scores), sums = {};
    for (int64_t i = LANES; i < stop; i += LANES) most = load(scores + i) > most ? load(scores + i) : most;
    float largest = largest_of(most);
    for (int64_t i = 0; i < stop; i += LANES) {
        Lanes found = exponential(load(scores + i) - largest);
        sums += found;
        store(scores + i, found);
    }
    return sum_of(sums);
}

// One new token a row: its keys stand as columns [width, columns], its values as rows [columns, wide].
template <class T>
void newest(View query, View out, const T *keys, const T *values, const int64_t *lengths, int64_t heads,
            int64_t columns, const Rows &rows, int64_t first_head, int64_t end_head) {
    int64_t wide = rounded(rows.width), groups = rows.groups;
    Scratch scratch(groups * (columns + 2 * wide + 1));
    float *scores = scratch.take(groups * columns), *queries = scratch.take(groups * wide);
    float *found = scratch.take(groups * wide), *sums = scratch.take(groups);
    for (int64_t row = 0; row < rows.rows; row++)
        for (int64_t shared = first_head; shared < end_head; shared++) {
            int64_t place = row * heads + shared, length = lengths[row];
            int64_t seen = length > rows.window ? (length - rows.window) / LANES * LANES : 0;
            int64_t begin = length > rows.window ? length - rows.window - seen : 0, count = rounded(length - seen);
            for (int64_t i = 0; i < groups; i++)
                for (int64_t w = 0; w < rows.width; w += LANES)
                    store(queries + i * wide + w, rows.scaling * load(Head<T>(query, shared * groups + i).at(row) + w,
                                                                      rows.width - w));
            multiply(scores, columns, {queries, wide, 1}, keys + place * rows.width * columns + seen, columns,
                     groups, count, rows.width);
            for (int64_t i = 0; i < groups; i++)
                sums[i] = exponentials(scores + i * columns, begin, length - seen);
            multiply(found, wide, {scores, columns, 1}, values + (place * columns + seen) * wide, wide, groups, wide,
                     length - seen);
            for (int64_t i = 0; i < groups; i++)
                for (int64_t w = 0; w < rows.width; w += LANES)
                    store(Head<T>(out, shared * groups + i).at(row) + w, load(found + i * wide + w) / sums[i],
                          rows.width - w);
        }
}

// The newest token's key and value to where `newest` reads them.
template <class T>
void append(View key, View value, T *keys, T *values, const int64_t *lengths, int64_t rows, int64_t heads,
            int64_t columns, int64_t width) {
    int64_t wide = rounded(width);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t place = row * heads + head, column = lengths[row] - 1;
            for (int64_t w = 0; w < width; w++) {
                keys[(place * width + w) * columns + column] = Head<T>(key, head).at(row)[w];
                values[(place * columns + column) * wide + w] = Head<T>(value, head).at(row)[w];
            }
        }
}

}  // namespace

extern "C" {

int64_t attend_lanes() { return LANES; }

#define FOR_TYPE(TYPE, SUFFIX)                                                                                         \
    void attend_newest_##SUFFIX(View query, View out, const TYPE *keys, const TYPE *values, const int64_t *lengths,    \
                                int64_t columns, const Rows *rows, int64_t heads, int threads) {                       \
        by_heads(heads, rows->rows * heads * columns * rows->width, threads, [&](int64_t first, int64_t end) {         \
            newest(query, out, keys, values, lengths, heads, columns, *rows, first, end);                              \
        });                                                                                                            \
    }                                                                                                                  \
    void append_newest_##SUFFIX(View key, View value, TYPE *keys, TYPE *values, const int64_t *lengths, int64_t rows,  \
                                int64_t heads, int64_t width, int64_t columns, int) {                                  \
        append(key, value, keys, values, lengths, rows, heads, columns, width);                                        \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(BFloat16, bf16)
}
