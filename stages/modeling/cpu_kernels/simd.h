// Vectors of the processor's width as the compiler's vector types: one source for every processor.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__FMA__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int SIMD_WIDTH = 16;
#else
constexpr int SIMD_WIDTH = 8;
#endif

typedef float Vector __attribute__((vector_size(4 * SIMD_WIDTH), aligned(4)));
typedef int32_t Bits __attribute__((vector_size(4 * SIMD_WIDTH), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * SIMD_WIDTH), aligned(2)));

struct BFloat16 {
    uint16_t bits;
};

constexpr int64_t MIN_PARALLEL_VALUES = 1 << 15;  // fewer values are left to one thread: waking others takes longer

inline Vector broadcast(float value) { return value - Vector{}; }
inline int64_t round_up(int64_t count) { return (count + SIMD_WIDTH - 1) / SIMD_WIDTH * SIMD_WIDTH; }

// a * b + c, rounded once where the processor can. Left to the compiler, one loop rounds once and another twice: GCC
// avoids chains of fused products for Zen 2 and 3, and decoding then differs from the packed pass in the last bit.
inline Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline Vector load(const float *from) { return *reinterpret_cast<const Vector *>(from); }
inline Vector load(const BFloat16 *from) {
    return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves *>(from), Bits) << 16);
}

inline void store(float *to, Vector values) { *reinterpret_cast<Vector *>(to) = values; }
inline void store(BFloat16 *to, Vector values) {  // to nearest, ties to even; NaN stays NaN
    Bits bits = (Bits)values;
    Bits near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Bits result = values == values ? near : (Bits{} + 0x7fc0);
    *reinterpret_cast<Halves *>(to) = __builtin_convertvector(result, Halves);
}

// Load or store the first `count` values; missing ones are loaded as 0.
template <class T>
inline Vector load(const T *from, int64_t count) {
    if (count >= SIMD_WIDTH) return load(from);
    T buffer[SIMD_WIDTH] = {};
    std::memcpy(buffer, from, count * sizeof(T));
    return load(buffer);
}

template <class T>
inline void store(T *to, Vector values, int64_t count) {
    if (count >= SIMD_WIDTH) return store(to, values);
    T buffer[SIMD_WIDTH];
    store(buffer, values);
    std::memcpy(to, buffer, count * sizeof(T));
}

// Add (or compare) the two halves until one value is left.
inline float reduce_sum(Vector values) {
#pragma GCC unroll 8
    for (int half = SIMD_WIDTH / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) values[i] += values[i + half];
    return values[0];
}

inline float reduce_max(Vector values) {
#pragma GCC unroll 8
    for (int half = SIMD_WIDTH / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) values[i] = values[i + half] > values[i] ? values[i + half] : values[i];
    return values[0];
}

// e^x for x <= 0, within 2 units in the last place; 0 below -87; NaN stays NaN. Cephes' polynomial.
inline Vector exponential(Vector x) {
    const float shift = 12582912;  // 1.5 * 2^23: a number added to it is rounded to an integer, in its last bits
    Vector power = multiply_add(x, broadcast(1.44269504f), broadcast(shift)), whole = power - shift;
    Vector rest = multiply_add(whole, broadcast(-0.693359375f), x);
    rest = multiply_add(whole, broadcast(2.12194440e-4f), rest);
    Vector sum = broadcast(1.9875691500e-4f);
    for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        sum = multiply_add(sum, rest, broadcast(coefficient));
    sum = multiply_add(sum, rest * rest, rest) + 1;
    Vector result = (Vector)((Bits)sum + ((Bits)power << 23));
    return x >= broadcast(-87) ? result : x < broadcast(-87) ? Vector{} : x;
}

// A tensor [tokens, heads, W] with W contiguous; strides in values.
struct View {
    void *data;
    int64_t token, head;
};

template <class T>
struct Head {
    T *data;
    int64_t stride;
    Head(const View &view, int64_t head) : data(static_cast<T *>(view.data) + head * view.head), stride(view.token) {}
    T *at(int64_t token) const { return data + token * stride; }
};
