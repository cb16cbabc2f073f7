// Vectors of the processor's width, by the compiler's own vector types: the same source for any processor.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Bits __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));

struct BFloat16 {
    uint16_t bits;
};

constexpr int64_t WORTH_THREADS = 1 << 15;  // values: fewer are done by one thread, before others have woken up

inline Lanes all(float value) { return value - Lanes{}; }
inline int64_t rounded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

inline Lanes load(const float *from) { return *reinterpret_cast<const Lanes *>(from); }
inline Lanes load(const BFloat16 *from) {
    return (Lanes)(__builtin_convertvector(*reinterpret_cast<const Halves *>(from), Bits) << 16);
}

inline void store(float *to, Lanes values) { *reinterpret_cast<Lanes *>(to) = values; }
inline void store(BFloat16 *to, Lanes values) {  // to nearest, ties to even; NaN stays NaN
    Bits bits = (Bits)values;
    Bits near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Bits found = values == values ? near : (Bits{} + 0x7fc0);
    *reinterpret_cast<Halves *>(to) = __builtin_convertvector(found, Halves);
}

// The first `count` values, 0 for what is missing to a whole vector.
template <class T>
inline Lanes load(const T *from, int64_t count) {
    if (count >= LANES) return load(from);
    T room[LANES] = {};
    std::memcpy(room, from, count * sizeof(T));
    return load(room);
}

template <class T>
inline void store(T *to, Lanes values, int64_t count) {
    if (count >= LANES) return store(to, values);
    T room[LANES];
    store(room, values);
    std::memcpy(to, room, count * sizeof(T));
}

// Halves onto each other, until one value is left.
inline float sum_of(Lanes values) {
#pragma GCC unroll 8
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) values[i] += values[i + half];
    return values[0];
}

inline float largest_of(Lanes values) {
#pragma GCC unroll 8
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) values[i] = values[i + half] > values[i] ? values[i + half] : values[i];
    return values[0];
}

// e^x for x <= 0, within 2 units in the last place; 0 below -87; NaN stays NaN. Cephes' polynomial.
inline Lanes exponential(Lanes x) {
    const float shift = 12582912;  // 1.5 * 2^23: what is added to it is rounded to an integer, in its last bits
    Lanes power = x * 1.44269504f + shift;
    Lanes rest = x - (power - shift) * 0.693359375f + (power - shift) * 2.12194440e-4f;
    Lanes sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * (rest * rest) + rest + 1;
    Lanes found = (Lanes)((Bits)sum + ((Bits)power << 23));
    return x >= all(-87) ? found : x < all(-87) ? Lanes{} : x;
}

// Vectors of W values each, of a token and a head; strides in values.
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
