// Dropout whose random numbers are computed, not stored: the backward pass computes them again from the seed.

#include "simd.h"

namespace {

constexpr int64_t SPAN = 4096;  // in one unit of work of a thread

typedef uint32_t Words __attribute__((vector_size(4 * SIMD_WIDTH), aligned(4)));

// Two keys of a seed, which differ in half of their bits between neighbouring seeds (SplitMix64's finaliser).
struct Keys {
    uint32_t first, second;
    explicit Keys(uint64_t seed) {
        seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9u;
        seed = (seed ^ (seed >> 27)) * 0x94d049bb133111ebu;
        seed ^= seed >> 31;
        first = uint32_t(seed);
        second = uint32_t(seed >> 32);
    }
};

// Hash each number to 32 uniform bits (triple32, Wellons 2018), with the second key after the first round.
inline Words hash(Words number, Keys keys) {
    Words x = number + keys.first;
    x = (x ^ (x >> 17)) * 0xed5ad4bbu + keys.second;
    x = (x ^ (x >> 11)) * 0xac4c1b51u;
    x = (x ^ (x >> 15)) * 0x31848babu;
    return x ^ (x >> 14);
}

// out = (or +=) scale * x where the hash of the value's index is at least `threshold`, else 0.
template <class T>
void dropout_span(const T *x, T *out, int64_t first, int64_t end, Keys keys, uint32_t threshold, float scale,
                  bool add) {
    Words number = {};
    for (int i = 0; i < SIMD_WIDTH; i++) number[i] = uint32_t(first) + i;
    for (int64_t i = first; i < end; i += SIMD_WIDTH, number += uint32_t(SIMD_WIDTH)) {
        Vector value = hash(number, keys) >= threshold ? load(x + i, end - i) * scale : Vector{};
        store(out + i, add ? load(out + i, end - i) + value : value, end - i);
    }
}

template <class T>
void dropout(const T *x, T *out, int64_t count, int64_t seed, float probability, int64_t add, int threads) {
    uint32_t threshold = uint32_t(double(probability) * 4294967296.0);
    float scale = 1 / (1 - probability);
    Keys keys{uint64_t(seed)};
#pragma omp parallel for num_threads(threads) if (count > MIN_PARALLEL_VALUES)
    for (int64_t i = 0; i < count; i += SPAN)
        dropout_span(x, out, i, count - i < SPAN ? count : i + SPAN, keys, threshold, scale, add);
}

}  // namespace

extern "C" {

#define FOR_TYPE(TYPE, SUFFIX)                                                                                         \
    void dropout_##SUFFIX(const TYPE *x, TYPE *out, int64_t count, int64_t seed, float probability, int64_t add,       \
                          int threads) {                                                                               \
        dropout(x, out, count, seed, probability, add, threads);                                                       \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(BFloat16, bf16)
}
