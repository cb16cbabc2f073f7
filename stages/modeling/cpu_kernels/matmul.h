// Products of small matrices that lie in the core's cache, their sums in its registers.
#pragma once

#include <vector>

#include "simd.h"

constexpr int REGISTERS = LANES == 16 ? 24 : 12;  // for sums

// A matrix whose element (i, j) stands at i * row + j * column.
struct Matrix {
    const float *data;
    int64_t row, column;
};

// A tile of few sums: each is made of four, or they would wait for one another's additions.
template <int ROWS, int VECTORS, class T>
inline void small_tile(float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t depth, bool add) {
    Lanes sums[4][ROWS][VECTORS] = {};
    for (int64_t first = 0; first < depth; first += 4)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
            if (first + k < depth)
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
                    for (int j = 0; j < VECTORS; j++)
                        sums[k][i][j] += a.data[i * a.row + (first + k) * a.column] *
                                         load(b + (first + k) * b_row + j * LANES);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < VECTORS; j++) {
            float *place = to + i * stride + j * LANES;
            Lanes sum = sums[0][i][j] + sums[1][i][j] + sums[2][i][j] + sums[3][i][j];
            store(place, add ? load(place) + sum : sum);
        }
}

// ROWS x VECTORS * LANES of a product, kept in registers.
template <int ROWS, int VECTORS, class T>
inline void tile(float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t depth, bool add) {
    if constexpr (ROWS * VECTORS < 8) return small_tile<ROWS, VECTORS>(to, stride, a, b, b_row, depth, add);
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

// `rows` of them, at most ROWS.
template <int ROWS, int VECTORS, class T>
inline void tile_of(int64_t rows, float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t depth,
                    bool add) {
    if (rows == ROWS) return tile<ROWS, VECTORS>(to, stride, a, b, b_row, depth, add);
    if constexpr (ROWS > 1) tile_of<ROWS - 1, VECTORS>(rows, to, stride, a, b, b_row, depth, add);
}

// In tiles of about as many rows each: sums of a tile of few rows would wait for each other.
template <int VECTORS, class T>
inline void columns(int64_t rows, float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t depth,
                    bool add) {
    constexpr int ROWS = REGISTERS / VECTORS;
    for (int64_t tiles = (rows + ROWS - 1) / ROWS; tiles; tiles--) {
        int64_t taken = (rows + tiles - 1) / tiles;
        tile_of<ROWS, VECTORS>(taken, to, stride, a, b, b_row, depth, add);
        rows -= taken, to += taken * stride, a.data += taken * a.row;
    }
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

// Room for some matrices, filled with 0.
struct Scratch {
    std::vector<float> room;
    size_t used = 0;
    explicit Scratch(size_t size) : room(size) {}
    float *take(size_t size) {
        used += size;
        return room.data() + used - size;
    }
};
