// Causal attention of rows of tokens, forward and backward, and of one new token a row: what attention.py calls on a CPU.
//
// A head's keys, a few hundred short vectors, fit the core's cache, and so do the scores of a block of queries: nothing
// of the size of length x length is written to memory, and the keys after a block are not multiplied. The backward pass
// makes the shares anew from the log of their sum (FlashAttention, arXiv 2205.14135). Sums are in fp32.
//
// Shapes: L tokens of a row, W width of a head.

#include <cmath>
#include <omp.h>
#include <vector>

#include "lanes.h"

namespace {

constexpr int REGISTERS = LANES == 16 ? 24 : 12;  // for sums
constexpr int64_t BLOCK_QUERIES = 24;

// A matrix whose element (i, j) stands at i * row + j * column.
struct Matrix {
    const float *data;
    int64_t row, column;
};

// ROWS x VECTORS * LANES of a product, kept in registers.
template <int ROWS, int VECTORS, class T>
inline void tile(float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t depth, bool add) {
    Lanes sums[ROWS][VECTORS];
#pragma GCC unroll 24
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 24
        for (int j = 0; j < VECTORS; j++) sums[i][j] = add ? load(to + i * stride + j * LANES) : Lanes{};
    for (int64_t k = 0; k < depth; k++) {
        Lanes x[VECTORS];
#pragma GCC unroll 24
        for (int j = 0; j < VECTORS; j++) x[j] = load(b + k * b_row + j * LANES);
#pragma GCC unroll 24
        for (int i = 0; i < ROWS; i++) {
            float share = a.data[i * a.row + k * a.column];
#pragma GCC unroll 24
            for (int j = 0; j < VECTORS; j++) sums[i][j] += share * x[j];
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 24
        for (int j = 0; j < VECTORS; j++) store(to + i * stride + j * LANES, sums[i][j]);
}

template <int ROWS, int VECTORS, class T>
inline void last_rows(int64_t rows, float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t depth,
                      bool add) {
    if (rows == ROWS) tile<ROWS, VECTORS>(to, stride, a, b, b_row, depth, add);
    if constexpr (ROWS > 1) last_rows<ROWS - 1, VECTORS>(rows, to, stride, a, b, b_row, depth, add);
}

template <int VECTORS, class T>
inline void columns(int64_t rows, float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t depth,
                    bool add) {
    constexpr int ROWS = REGISTERS / VECTORS;
    for (; rows >= ROWS; rows -= ROWS, to += ROWS * stride, a.data += ROWS * a.row)
        tile<ROWS, VECTORS>(to, stride, a, b, b_row, depth, add);
    last_rows<ROWS - 1, VECTORS>(rows, to, stride, a, b, b_row, depth, add);
}

// to [rows, width] = a [rows, depth] b [depth, width], or += ; width is a multiple of LANES.
template <class T>
void multiply(float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t rows, int64_t width,
              int64_t depth, bool add = false) {
    for (; width >= 4 * LANES; width -= 4 * LANES, to += 4 * LANES, b += 4 * LANES)
        columns<4>(rows, to, stride, a, b, b_row, depth, add);
    for (; width >= 2 * LANES; width -= 2 * LANES, to += 2 * LANES, b += 2 * LANES)
        columns<2>(rows, to, stride, a, b, b_row, depth, add);
    if (width) columns<1>(rows, to, stride, a, b, b_row, depth, add);
}

inline void fill(float *values, int64_t first, int64_t end, float value) {
    for (int64_t i = first; i < end; i++) values[i] = value;
}

// Scores [columns] of one query, of which it sees those from `first` to before `end`: their exponentials less the
// largest, 0 for the others. Returns their sum.
float exponentials(float *scores, int64_t columns, int64_t first, int64_t end, float *largest) {
    int64_t stop = rounded(end);
    fill(scores, 0, first, -INFINITY);
    fill(scores, end, stop, -INFINITY);
    Lanes most = load(scores), sums = {};
    for (int64_t i = LANES; i < stop; i += LANES) most = load(scores + i) > most ? load(scores + i) : most;
    *largest = largest_of(most);
    for (int64_t i = 0; i < stop; i += LANES) {
        Lanes found = exponential(load(scores + i) - *largest);
        sums += found;
        store(scores + i, found);
    }
    fill(scores, stop, columns, 0);
    return sum_of(sums);
}

}  // namespace

extern "C" {

// Row r has the tokens tokens[starts[r]] to before tokens[starts[r + 1]]; its queries are those from firsts[r] on.
// groups: heads of queries for each head of keys. window: how many keys a query sees at most. shares: a token may stand
// in several rows, as a key; as a query it stands in one.
struct Rows {
    const int64_t *tokens, *starts, *firsts;
    int64_t rows, width, groups, window, shares;
    float scaling;
};
}

namespace {

// One row's tokens, and the room that its heads need in turn.
struct Row {
    const int64_t *tokens;
    int64_t length, padded, first, width, wide;
    Row(const Rows &rows, int64_t row)
        : tokens(rows.tokens + rows.starts[row]), length(rows.starts[row + 1] - rows.starts[row]),
          padded(rounded(length)), first(rows.firsts[row]), width(rows.width), wide(rounded(width)) {}
};

// Tokens from `first` on to [count, wide], times `factor`; what lies beyond a head's width is 0.
template <class T>
void gather(float *to, const Row &row, Head<T> from, int64_t first, int64_t count, float factor = 1) {
    for (int64_t i = 0; i < count; i++, to += row.wide) {
        const T *values = from.at(row.tokens[first + i]);
        for (int64_t w = 0; w < row.width; w += LANES) store(to + w, load(values + w, row.width - w) * factor);
    }
}

// All tokens of the row, as columns: to [width, padded].
template <class T>
void gather_columns(float *to, const Row &row, Head<T> from) {
    float room[LANES];
    for (int64_t i = 0; i < row.length; i++) {
        const T *values = from.at(row.tokens[i]);
        for (int64_t w = 0; w < row.width; w += LANES) {
            store(room, load(values + w, row.width - w));
            for (int64_t j = 0; j < LANES && w + j < row.width; j++) to[(w + j) * row.padded + i] = room[j];
        }
    }
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

// A block of queries: `count` from `first` on, over the keys from `seen` on, `keys` of them, `columns` with filler.
struct Block {
    int64_t first, count, seen, keys, columns, window;
    Block(const Row &row, int64_t first, int64_t window) : first(first), window(window) {
        count = row.length - first < BLOCK_QUERIES ? row.length - first : BLOCK_QUERIES;
        seen = first - window + 1 > 0 ? (first - window + 1) / LANES * LANES : 0;
        keys = first + count - seen;
        columns = rounded(keys);
    }
    int64_t end(int64_t query) const { return first + query + 1 - seen; }
    int64_t begin(int64_t query) const { return end(query) > window ? end(query) - window : 0; }
};

// Room for a head's matrices; grows with the longest row, filled with 0.
struct Scratch {
    std::vector<float> room;
    size_t used = 0;
    explicit Scratch(size_t size) : room(size) {}
    float *take(size_t size) {
        used += size;
        return room.data() + used - size;
    }
};

template <class T>
void forward(View query, View key, View value, View out, float *largest, float *sums, int64_t tokens, const Rows &rows,
             int64_t first_head, int64_t end_head) {
    for (int64_t r = 0; r < rows.rows; r++) {
        Row row(rows, r);
        Scratch scratch(row.padded * (row.width + row.wide + BLOCK_QUERIES) + 2 * BLOCK_QUERIES * row.wide);
        float *keys = scratch.take(row.width * row.padded), *values = scratch.take(row.padded * row.wide);
        float *queries = scratch.take(BLOCK_QUERIES * row.wide), *found = scratch.take(BLOCK_QUERIES * row.wide);
        float *scores = scratch.take(BLOCK_QUERIES * row.padded);
        for (int64_t shared = first_head; shared < end_head; shared++) {
            gather_columns<T>(keys, row, {key, shared});
            gather<T>(values, row, {value, shared}, 0, row.length);
            for (int64_t head = shared * rows.groups; head < (shared + 1) * rows.groups; head++)
                for (int64_t first = row.first; first < row.length; first += BLOCK_QUERIES) {
                    Block block(row, first, rows.window);
                    gather<T>(queries, row, {query, head}, first, block.count, rows.scaling);
                    multiply(scores, block.columns, {queries, row.wide, 1}, keys + block.seen, row.padded, block.count,
                             block.columns, row.width);
                    float of_block[BLOCK_QUERIES];
                    for (int64_t i = 0; i < block.count; i++) {
                        int64_t place = head * tokens + row.tokens[first + i];
                        of_block[i] = sums[place] = exponentials(scores + i * block.columns, block.columns,
                                                                 block.begin(i), block.end(i), largest + place);
                    }
                    multiply(found, row.wide, {scores, block.columns, 1}, values + block.seen * row.wide, row.wide,
                             block.count, row.wide, block.keys);
                    for (int64_t i = 0; i < block.count; i++)
                        scatter<T>({out, head}, row, found + i * row.wide, first + i, 1, 1 / of_block[i], false);
                }
        }
    }
}

// Scores to shares, and gradients of the shares to gradients of the scores.
inline void score_gradients(float *shares, float *gradients, int64_t columns, int64_t first, int64_t end,
                            float largest, float sum) {
    int64_t stop = rounded(end);
    float part = 1 / sum;
    Lanes sums = {};
    fill(shares, 0, first, -INFINITY);
    fill(shares, end, stop, -INFINITY);
    for (int64_t i = 0; i < stop; i += LANES) {
        Lanes share = exponential(load(shares + i) - largest) * part;
        sums += share * load(gradients + i);
        store(shares + i, share);
    }
    float mean = sum_of(sums);
    for (int64_t i = 0; i < stop; i += LANES)
        store(gradients + i, load(shares + i) * (load(gradients + i) - mean));
    fill(shares, stop, columns, 0);
    fill(gradients, stop, columns, 0);
}

template <class T>
void backward(View query, View key, View value, View gradient, const float *largest, const float *sums,
              int64_t tokens, View of_query,
              View of_key, View of_value, const Rows &rows, int64_t first_head, int64_t end_head) {
    for (int64_t r = 0; r < rows.rows; r++) {
        Row row(rows, r);
        Scratch scratch(row.padded * (2 * row.width + 3 * row.wide + 2 * BLOCK_QUERIES) + 3 * BLOCK_QUERIES * row.wide);
        float *key_columns = scratch.take(row.width * row.padded), *value_columns = scratch.take(row.width * row.padded);
        float *keys = scratch.take(row.padded * row.wide);
        float *key_slopes = scratch.take(row.padded * row.wide), *value_slopes = scratch.take(row.padded * row.wide);
        float *queries = scratch.take(BLOCK_QUERIES * row.wide), *slopes = scratch.take(BLOCK_QUERIES * row.wide);
        float *found = scratch.take(BLOCK_QUERIES * row.wide);
        float *shares = scratch.take(BLOCK_QUERIES * row.padded), *scores = scratch.take(BLOCK_QUERIES * row.padded);
        for (int64_t shared = first_head; shared < end_head; shared++) {
            gather_columns<T>(key_columns, row, {key, shared});
            gather_columns<T>(value_columns, row, {value, shared});
            gather<T>(keys, row, {key, shared}, 0, row.length);
            std::memset(key_slopes, 0, row.padded * row.wide * sizeof(float));
            std::memset(value_slopes, 0, row.padded * row.wide * sizeof(float));
            for (int64_t head = shared * rows.groups; head < (shared + 1) * rows.groups; head++)
                for (int64_t first = row.first; first < row.length; first += BLOCK_QUERIES) {
                    Block block(row, first, rows.window);
                    gather<T>(queries, row, {query, head}, first, block.count, rows.scaling);
                    gather<T>(slopes, row, {gradient, head}, first, block.count);
                    multiply(shares, block.columns, {queries, row.wide, 1}, key_columns + block.seen, row.padded,
                             block.count, block.columns, row.width);
                    multiply(scores, block.columns, {slopes, row.wide, 1}, value_columns + block.seen, row.padded,
                             block.count, block.columns, row.width);
                    for (int64_t i = 0; i < block.count; i++) {
                        int64_t place = head * tokens + row.tokens[first + i];
                        score_gradients(shares + i * block.columns, scores + i * block.columns, block.columns,
                                        block.begin(i), block.end(i), largest[place], sums[place]);
                    }
                    multiply(found, row.wide, {scores, block.columns, 1}, keys + block.seen * row.wide, row.wide,
                             block.count, row.wide, block.keys);
                    scatter<T>({of_query, head}, row, found, first, block.count, rows.scaling, false);
                    multiply(key_slopes + block.seen * row.wide, row.wide, {scores, 1, block.columns}, queries,
                             row.wide, block.keys, row.wide, block.count, true);
                    multiply(value_slopes + block.seen * row.wide, row.wide, {shares, 1, block.columns}, slopes,
                             row.wide, block.keys, row.wide, block.count, true);
                }
            scatter<T>({of_key, shared}, row, key_slopes, 0, row.length, 1, rows.shares);
            scatter<T>({of_value, shared}, row, value_slopes, 0, row.length, 1, rows.shares);
        }
    }
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
            float largest;
            for (int64_t i = 0; i < groups; i++)
                sums[i] = exponentials(scores + i * columns, count, begin, length - seen, &largest);
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

// Each of `threads` takes some heads of keys, of which there are `heads`: no two of them write to one place.
#define BY_HEADS(call)                                                      \
    _Pragma("omp parallel num_threads(threads)") {                          \
        int64_t of = omp_get_num_threads(), own = omp_get_thread_num();     \
        int64_t first_head = heads * own / of, end_head = heads * (own + 1) / of; \
        call;                                                               \
    }

#define FOR_TYPE(TYPE, SUFFIX)                                                                                         \
    void attend_forward_##SUFFIX(View query, View key, View value, View out, float *largest, float *sums,              \
                                 int64_t tokens, const Rows *rows, int64_t heads, int threads) {                       \
        BY_HEADS(forward<TYPE>(query, key, value, out, largest, sums, tokens, *rows, first_head, end_head))            \
    }                                                                                                                  \
    void attend_backward_##SUFFIX(View query, View key, View value, View gradient, const float *largest,               \
                                  const float *sums, int64_t tokens, View of_query, View of_key, View of_value,        \
                                  const Rows *rows, int64_t heads, int threads) {                                      \
        BY_HEADS(backward<TYPE>(query, key, value, gradient, largest, sums, tokens, of_query, of_key, of_value, *rows, \
                                first_head, end_head))                                                                 \
    }                                                                                                                  \
    void attend_newest_##SUFFIX(View query, View out, const TYPE *keys, const TYPE *values, const int64_t *lengths,    \
                                int64_t columns, const Rows *rows, int64_t heads, int threads) {                       \
        BY_HEADS(newest(query, out, keys, values, lengths, heads, columns, *rows, first_head, end_head))               \
    }                                                                                                                  \
    void append_newest_##SUFFIX(View key, View value, TYPE *keys, TYPE *values, const int64_t *lengths, int64_t rows,  \
                                int64_t heads, int64_t width, int64_t columns, int) {                                  \
        append(key, value, keys, values, lengths, rows, heads, columns, width);                                        \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(BFloat16, bf16)
}
