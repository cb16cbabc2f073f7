// Products of small matrices in the core's cache, with sums in registers.
#pragma once

#include <vector>

#include "simd.h"

constexpr int REGISTERS = SIMD_WIDTH == 16 ? 24 : 12;  // for sums

// Whether all kernels add the same numbers in the same order, however many rows or columns they compute at once. In bf16
// a last bit's difference grows, layer by layer, to the rounding of every activation: decoding and the forward pass of
// an update then agree to the bit or hardly at all. In fp32 it stays as small as it is.
template <class T>
constexpr bool ADDS_IN_ORDER = sizeof(T) == sizeof(BFloat16);

// A matrix whose element (i, j) is at i * row + j * column.
struct Matrix {
    const float *data;
    int64_t row, column;
};

// A tile of few sums: each is computed in four parts, because a chain of additions has latency.
template <int ROWS, int VECTORS, class T>
inline void tile_in_parts(float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t depth, bool add) {
    Vector sums[4][ROWS][VECTORS] = {};
    for (int64_t first = 0; first < depth; first += 4)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
            if (first + k < depth)
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
                    for (int j = 0; j < VECTORS; j++)
                        sums[k][i][j] = multiply_add(broadcast(a.data[i * a.row + (first + k) * a.column]),
                                                     load(b + (first + k) * b_row + j * SIMD_WIDTH), sums[k][i][j]);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < VECTORS; j++) {
            float *target = to + i * stride + j * SIMD_WIDTH;
            Vector sum = sums[0][i][j] + sums[1][i][j] + sums[2][i][j] + sums[3][i][j];
            store(target, add ? load(target) + sum : sum);
        }
}

// ROWS x (VECTORS * SIMD_WIDTH) of a product, in registers.
template <bool IN_ORDER, int ROWS, int VECTORS, class T>
inline void tile(float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t depth, bool add) {
    if constexpr (ROWS * VECTORS < 8 && !IN_ORDER)
        return tile_in_parts<ROWS, VECTORS>(to, stride, a, b, b_row, depth, add);
    Vector sums[ROWS][VECTORS];
#pragma GCC unroll 24
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 24
        for (int j = 0; j < VECTORS; j++) sums[i][j] = add ? load(to + i * stride + j * SIMD_WIDTH) : Vector{};
    for (int64_t k = 0; k < depth; k++) {
        Vector x[VECTORS];
#pragma GCC unroll 24
        for (int j = 0; j < VECTORS; j++) x[j] = load(b + k * b_row + j * SIMD_WIDTH);
#pragma GCC unroll 24
        for (int i = 0; i < ROWS; i++) {
            Vector share = broadcast(a.data[i * a.row + k * a.column]);
#pragma GCC unroll 24
            for (int j = 0; j < VECTORS; j++) sums[i][j] = multiply_add(share, x[j], sums[i][j]);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 24
        for (int j = 0; j < VECTORS; j++) store(to + i * stride + j * SIMD_WIDTH, sums[i][j]);
}

// A tile of `rows` rows, at most ROWS.
template <bool IN_ORDER, int ROWS, int VECTORS, class T>
inline void tile_rows(int64_t rows, float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t depth,
                    bool add) {
    if (rows == ROWS) return tile<IN_ORDER, ROWS, VECTORS>(to, stride, a, b, b_row, depth, add);
    if constexpr (ROWS > 1) tile_rows<IN_ORDER, ROWS - 1, VECTORS>(rows, to, stride, a, b, b_row, depth, add);
}

// Split into tiles of nearly equal numbers of rows: a tile of few rows would be slow (see tile_in_parts).
template <bool IN_ORDER, int VECTORS, class T>
inline void columns(int64_t rows, float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t depth,
                    bool add) {
    constexpr int ROWS = REGISTERS / VECTORS;
    for (int64_t tiles = (rows + ROWS - 1) / ROWS; tiles; tiles--) {
        int64_t height = (rows + tiles - 1) / tiles;
        tile_rows<IN_ORDER, ROWS, VECTORS>(height, to, stride, a, b, b_row, depth, add);
        rows -= height, to += height * stride, a.data += height * a.row;
    }
}

// to [rows, width] = (or +=) a [rows, depth] b [depth, width]; width is a multiple of SIMD_WIDTH. IN_ORDER: add each
// element's products one after the other.
template <bool IN_ORDER = false, class T>
void multiply(float *to, int64_t stride, Matrix a, const T *b, int64_t b_row, int64_t rows, int64_t width,
              int64_t depth, bool add = false) {
    for (; width >= 4 * SIMD_WIDTH; width -= 4 * SIMD_WIDTH, to += 4 * SIMD_WIDTH, b += 4 * SIMD_WIDTH)
        columns<IN_ORDER, 4>(rows, to, stride, a, b, b_row, depth, add);
    for (; width >= 2 * SIMD_WIDTH; width -= 2 * SIMD_WIDTH, to += 2 * SIMD_WIDTH, b += 2 * SIMD_WIDTH)
        columns<IN_ORDER, 2>(rows, to, stride, a, b, b_row, depth, add);
    if (width) columns<IN_ORDER, 1>(rows, to, stride, a, b, b_row, depth, add);
}

// Memory for several matrices, filled with 0.
struct Scratch {
    std::vector<float> memory;
    size_t used = 0;
    explicit Scratch(size_t size) : memory(size) {}
    float *take(size_t size) {
        used += size;
        return memory.data() + used - size;
    }
};
