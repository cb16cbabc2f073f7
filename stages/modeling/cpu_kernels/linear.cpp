// Linear layers of a few rows in bf16, with a LoRA adapter: decoding.
//
// A library packs the weights for the processor at each call, which for a few rows takes longer than the product. These
// weights are packed once: vectors of 16 outputs, for pairs of inputs. The products of an output are added as oneDNN adds
// them, by the processor's bf16 instruction in the order of the inputs, and in blocks of inputs whose sums are then added:
// the results are the same to the bit.
//
// Shapes: N rows, I inputs, O outputs, R rank; I is even, O and R are multiples of SIMD_WIDTH.

#include "matmul.h"
#include "row_ranges.h"

#if defined(__AVX512BF16__)

namespace {

// A matrix [O, I], packed as [O / 16, I / 2, 16, 2]. block: how many inputs are added before their sum is added.
struct Packed {
    const BFloat16 *data;
    int64_t inputs, block;
};

// sums [row, vector] of ROWS rows and VECTORS vectors of outputs from `first` on; x [ROWS, I].
template <int ROWS, int VECTORS>
inline void product(Vector (&sums)[ROWS][VECTORS], const BFloat16 *x, const Packed &matrix, int64_t first) {
    const BFloat16 *packed = matrix.data + first * matrix.inputs;
    for (int64_t start = 0; start < matrix.inputs; start += matrix.block) {
        int64_t end = start + matrix.block < matrix.inputs ? start + matrix.block : matrix.inputs;
        Vector parts[ROWS][VECTORS] = {};
        for (int64_t k = start; k < end; k += 2) {
            __m512bh weights[VECTORS];
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++)
                weights[j] = (__m512bh)_mm512_loadu_si512(packed + (j * matrix.inputs + k) * SIMD_WIDTH);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) {
                int32_t pair;
                std::memcpy(&pair, x + i * matrix.inputs + k, sizeof(pair));
                __m512bh values = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; j++)
                    parts[i][j] = (Vector)_mm512_dpbf16_ps((__m512)parts[i][j], values, weights[j]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) sums[i][j] = start ? sums[i][j] + parts[i][j] : parts[i][j];
    }
}

// down.data and up.data are null without an adapter, bias without one. low [N, R]: room for x down'.
struct Layer {
    Packed weight, down, up;
    const BFloat16 *bias;
    BFloat16 *low;
};

inline Vector rounded(Vector values) {
    BFloat16 halves[SIMD_WIDTH];
    store(halves, values);
    return load(halves);
}

// ROWS rows from `row` on, of VECTORS vectors of outputs from `first` on.
template <int ROWS, int VECTORS>
inline void tile(const BFloat16 *x, const Layer &layer, BFloat16 *out, int64_t outputs, int64_t row, int64_t first) {
    Vector sums[ROWS][VECTORS], added[ROWS][VECTORS];
    product(sums, x + row * layer.weight.inputs, layer.weight, first);
    if (layer.up.data) product(added, layer.low + row * layer.up.inputs, layer.up, first);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < VECTORS; j++) {
            int64_t column = first + j * SIMD_WIDTH;
            Vector sum = layer.bias ? sums[i][j] + load(layer.bias + column) : sums[i][j];
            store(out + (row + i) * outputs + column, layer.up.data ? added[i][j] + rounded(sum) : sum);
        }
}

template <int VECTORS, int ROWS = 8>
inline void tiles(const BFloat16 *x, const Layer &layer, BFloat16 *out, int64_t outputs, int64_t rows, int64_t row,
                  int64_t first) {
    for (; rows >= ROWS; rows -= ROWS, row += ROWS) tile<ROWS, VECTORS>(x, layer, out, outputs, row, first);
    if constexpr (ROWS > 1)
        if (rows) tiles<VECTORS, ROWS / 2>(x, layer, out, outputs, rows, row, first);
}

// Vectors [first, end) of outputs.
void linear(const BFloat16 *x, const Layer &layer, BFloat16 *out, int64_t outputs, int64_t rows, int64_t first,
            int64_t end) {
    for (; first + 2 <= end; first += 2) tiles<2>(x, layer, out, outputs, rows, 0, first * SIMD_WIDTH);
    if (first < end) tiles<1>(x, layer, out, outputs, rows, 0, first * SIMD_WIDTH);
}

}  // namespace

#endif

extern "C" {

int has_bf16_products() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

#if defined(__AVX512BF16__)

// packed [O / 16, I / 2, 16, 2] from weight [O, I].
void pack_linear_bf16(const BFloat16 *weight, BFloat16 *packed, int64_t outputs, int64_t inputs, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t vector = 0; vector < outputs / SIMD_WIDTH; vector++)
        for (int64_t k = 0; k < inputs; k += 2)
            for (int64_t o = 0; o < SIMD_WIDTH; o++)
                std::memcpy(packed + (vector * inputs + k) * SIMD_WIDTH + 2 * o,
                            weight + (vector * SIMD_WIDTH + o) * inputs + k, 2 * sizeof(BFloat16));
}

// out [N, O] = x [N, I] weight' + bias + (x down') up'.
void linear_bf16(const BFloat16 *x, const Layer *layer, BFloat16 *out, int64_t rows, int64_t outputs, int threads) {
    const Packed &down = layer->down;
    int64_t rank = layer->up.inputs;
    if (down.data) linear(x, {down, {}, {}, nullptr, nullptr}, layer->low, rank, rows, 0, rank / SIMD_WIDTH);
    by_heads(outputs / SIMD_WIDTH, rows * outputs * layer->weight.inputs, threads, [&](int64_t first, int64_t end) {
        linear(x, *layer, out, outputs, rows, first, end);
    });
}

#endif
}
