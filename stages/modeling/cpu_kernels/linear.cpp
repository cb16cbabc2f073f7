// Linear layers of a few rows in bf16, with a LoRA adapter: decoding.
//
// A library packs the weights for the processor at each call, which for a few rows takes longer than the product. These
// weights are packed once: vectors of 16 outputs, for pairs of inputs. The products of an output are added as oneDNN
// adds them in a pass over many rows, and the results are the same to the bit. The processor's matrix unit (AMX) adds 32
// inputs after the other. Without one, its bf16 instruction adds in the order of the inputs, in blocks of inputs whose
// sums are then added.
//
// Shapes: N rows, I inputs, O outputs, R rank; I is even, O and R are multiples of SIMD_WIDTH.

#include "matmul.h"
#include "row_ranges.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512BF16__)

namespace {

constexpr int64_t MAX_ROWS = 16;  // of a tile

// A matrix [O, I], packed as [O / 16, I / 2, 16, 2]. block: how many inputs are added before their sum is added; 0: the
// matrix unit adds.
struct Packed {
    const BFloat16 *data;
    int64_t inputs, block;
};

#if defined(__AMX_BF16__)

constexpr int64_t UNIT_INPUTS = 32;

// The matrix unit's registers: rows, and bytes of a row. 0 and 1 are sums, 2 and 3 the factors of a product, 4 and 5
// those of the last inputs, which may be fewer.
struct alignas(64) Registers {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    Registers(int64_t num_rows, int64_t last) {
        int64_t shapes[6][2] = {{num_rows, 64}, {num_rows, 64}, {num_rows, 64},
                                {16, 64}, {num_rows, 2 * last}, {last / 2, 64}};
        for (int i = 0; i < 6; i++) rows[i] = shapes[i][0], bytes[i] = shapes[i][1];
    }
};

// Add the products of the inputs from FIRST on to the sums; numbers of registers are a part of the instructions.
#define ADD_PRODUCTS(FIRST, X, WEIGHTS)                        \
    _tile_loadd(X, x + (FIRST), stride);                       \
    _tile_loadd(WEIGHTS, packed + (FIRST) * SIMD_WIDTH, 64);   \
    _tile_dpbf16ps(0, X, WEIGHTS);                             \
    if constexpr (VECTORS > 1) {                               \
        _tile_loadd(WEIGHTS, next + (FIRST) * SIMD_WIDTH, 64); \
        _tile_dpbf16ps(1, X, WEIGHTS);                         \
    }

// As product, below.
template <int VECTORS>
inline void unit_product(float *sums, const BFloat16 *x, const Packed &matrix, int64_t rows, int64_t first) {
    const BFloat16 *packed = matrix.data + first * matrix.inputs, *next = packed + matrix.inputs * SIMD_WIDTH;
    int64_t last = matrix.inputs % UNIT_INPUTS, stride = 2 * matrix.inputs, end = matrix.inputs - last;
    Registers registers(rows, last ? last : UNIT_INPUTS);
    _tile_loadconfig(&registers);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < end; k += UNIT_INPUTS) {
        ADD_PRODUCTS(k, 2, 3)
    }
    if (last) {
        ADD_PRODUCTS(end, 4, 5)
    }
    _tile_stored(0, sums, VECTORS * 64);
    if constexpr (VECTORS > 1) _tile_stored(1, sums + SIMD_WIDTH, VECTORS * 64);
    _tile_release();
}

#endif

// sums [ROWS, VECTORS * 16] of ROWS rows and VECTORS vectors of outputs from `first` on; x [ROWS, I].
template <int ROWS, int VECTORS>
inline void vector_product(float *sums, const BFloat16 *x, const Packed &matrix, int64_t first) {
    const BFloat16 *packed = matrix.data + first * matrix.inputs;
    Vector total[ROWS][VECTORS];
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
            for (int j = 0; j < VECTORS; j++) total[i][j] = start ? total[i][j] + parts[i][j] : parts[i][j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) store(sums + (i * VECTORS + j) * SIMD_WIDTH, total[i][j]);
}

// sums [N, VECTORS * 16] of at most MAX_ROWS rows and VECTORS vectors of outputs from `first` on; x [N, I].
template <int VECTORS, int ROWS = 8>
inline void product(float *sums, const BFloat16 *x, const Packed &matrix, int64_t rows, int64_t first) {
#if defined(__AMX_BF16__)
    if (!matrix.block) return unit_product<VECTORS>(sums, x, matrix, rows, first);
#endif
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * matrix.inputs, sums += ROWS * VECTORS * SIMD_WIDTH)
        vector_product<ROWS, VECTORS>(sums, x, matrix, first);
    if constexpr (ROWS > 1)
        if (rows) product<VECTORS, ROWS / 2>(sums, x, matrix, rows, first);
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

// At most MAX_ROWS rows from `row` on, of VECTORS vectors of outputs from `first` on.
template <int VECTORS>
inline void tile(const BFloat16 *x, const Layer &layer, BFloat16 *out, int64_t outputs, int64_t rows, int64_t row,
                 int64_t first) {
    float sums[MAX_ROWS * VECTORS * SIMD_WIDTH], added[MAX_ROWS * VECTORS * SIMD_WIDTH];
    product<VECTORS>(sums, x + row * layer.weight.inputs, layer.weight, rows, first);
    if (layer.up.data) product<VECTORS>(added, layer.low + row * layer.up.inputs, layer.up, rows, first);
    for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < VECTORS; j++) {
            int64_t column = first + j * SIMD_WIDTH, index = (i * VECTORS + j) * SIMD_WIDTH;
            Vector sum = load(sums + index);
            if (layer.bias) sum = sum + load(layer.bias + column);
            store(out + (row + i) * outputs + column, layer.up.data ? load(added + index) + rounded(sum) : sum);
        }
}

template <int VECTORS>
inline void tiles(const BFloat16 *x, const Layer &layer, BFloat16 *out, int64_t outputs, int64_t rows, int64_t first) {
    for (int64_t row = 0; row < rows; row += MAX_ROWS)
        tile<VECTORS>(x, layer, out, outputs, rows - row < MAX_ROWS ? rows - row : MAX_ROWS, row, first);
}

// Vectors [first, end) of outputs.
void linear(const BFloat16 *x, const Layer &layer, BFloat16 *out, int64_t outputs, int64_t rows, int64_t first,
            int64_t end) {
    for (; first + 2 <= end; first += 2) tiles<2>(x, layer, out, outputs, rows, first * SIMD_WIDTH);
    if (first < end) tiles<1>(x, layer, out, outputs, rows, first * SIMD_WIDTH);
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

// Whether there is a matrix unit that this process may use: the kernel gives each one its registers only on request.
int has_matrix_unit() {
#if defined(__AMX_BF16__)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
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
