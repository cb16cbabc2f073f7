// What a layer does token by token between its matrix products, forward and backward, in one pass over memory each.
// Sums are in fp32.

#include <cmath>

#include "simd.h"

namespace {

constexpr int64_t SPAN = 4096;  // values that a thread takes at a time

// out = weight * x / rms, rms = sqrt(mean(x^2) + epsilon) (arXiv 1910.07467); inverse [tokens]: 1 / rms.
template <class T>
void norm(const T *x, const T *weight, T *out, float *inverse, int64_t width, float epsilon) {
    Lanes squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        Lanes values = load(x + i, width - i);
        squares += values * values;
    }
    *inverse = 1 / std::sqrt(sum_of(squares) / width + epsilon);
    for (int64_t i = 0; i < width; i += LANES)
        store(out + i, load(weight + i, width - i) * (load(x + i, width - i) * *inverse), width - i);
}

template <class T>
void norm_slope(const T *x, const T *weight, const T *gradient, T *out, float inverse, int64_t width) {
    Lanes products = {};
    for (int64_t i = 0; i < width; i += LANES)
        products += load(x + i, width - i) * load(weight + i, width - i) * load(gradient + i, width - i);
    float mean = sum_of(products) / width * inverse * inverse;
    for (int64_t i = 0; i < width; i += LANES) {
        Lanes slopes = load(weight + i, width - i) * load(gradient + i, width - i);
        store(out + i, (slopes - load(x + i, width - i) * mean) * inverse, width - i);
    }
}

inline Lanes sigmoid(Lanes x) {
    Lanes e = exponential(x < all(0) ? x : -x);
    return (x < all(0) ? e : all(1)) / (e + 1);
}

// out = silu(gate) * up (arXiv 2002.05202).
template <class T>
void gated(const T *gate, const T *up, T *out, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        Lanes x = load(gate + i, count - i);
        store(out + i, x * sigmoid(x) * load(up + i, count - i), count - i);
    }
}

template <class T>
void gated_slopes(const T *gate, const T *up, const T *gradient, T *of_gate, T *of_up, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        Lanes x = load(gate + i, count - i), slope = load(gradient + i, count - i), share = sigmoid(x);
        store(of_up + i, slope * x * share, count - i);
        store(of_gate + i, slope * load(up + i, count - i) * share * (1 + x * (1 - share)), count - i);
    }
}

// Pairs (i, i + half) turned by an angle with these cosines and sines (arXiv 2104.09864, in LLaMA's order); back: the
// other way, which is the gradient.
template <class T>
void turned(const T *x, const T *cosine, const T *sine, T *out, int64_t half, bool back) {
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t left = half - i;
        Lanes a = load(x + i, left), b = load(x + half + i, left);
        Lanes up = load(sine + i, left), down = load(sine + half + i, left);
        if (back) {
            Lanes other = -up;
            up = -down;
            down = other;
        }
        store(out + i, a * load(cosine + i, left) - b * up, left);
        store(out + half + i, b * load(cosine + half + i, left) + a * down, left);
    }
}

template <class T>
void turn(View x, const T *cosine, const T *sine, View out, int64_t tokens, int64_t heads, int64_t width, bool back,
          int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads * width > WORTH_THREADS)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++)
            turned(Head<T>(x, head).at(token), cosine + token * width, sine + token * width,
                   Head<T>(out, head).at(token), width / 2, back);
}

template <class T>
void norms(const T *x, const T *weight, T *out, float *inverse, int64_t tokens, int64_t width, float epsilon,
           int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * width > WORTH_THREADS)
    for (int64_t token = 0; token < tokens; token++)
        norm(x + token * width, weight, out + token * width, inverse + token, width, epsilon);
}

template <class T>
void norm_slopes(const T *x, const T *weight, const T *gradient, T *out, const float *inverse, int64_t tokens,
                 int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * width > WORTH_THREADS)
    for (int64_t token = 0; token < tokens; token++)
        norm_slope(x + token * width, weight, gradient + token * width, out + token * width, inverse[token], width);
}

inline int64_t up_to(int64_t first, int64_t count) { return count - first < SPAN ? count - first : SPAN; }

template <class T>
void all_gated(const T *gate, const T *up, T *out, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) if (count > WORTH_THREADS)
    for (int64_t i = 0; i < count; i += SPAN) gated(gate + i, up + i, out + i, up_to(i, count));
}

template <class T>
void all_gated_slopes(const T *gate, const T *up, const T *gradient, T *of_gate, T *of_up, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) if (count > WORTH_THREADS)
    for (int64_t i = 0; i < count; i += SPAN)
        gated_slopes(gate + i, up + i, gradient + i, of_gate + i, of_up + i, up_to(i, count));
}

}  // namespace

extern "C" {

#define FOR_TYPE(TYPE, SUFFIX)                                                                                         \
    void norm_##SUFFIX(const TYPE *x, const TYPE *weight, TYPE *out, float *inverse, int64_t tokens, int64_t width,    \
                       float epsilon, int threads) {                                                                   \
        norms(x, weight, out, inverse, tokens, width, epsilon, threads);                                               \
    }                                                                                                                  \
    void norm_slopes_##SUFFIX(const TYPE *x, const TYPE *weight, const TYPE *gradient, TYPE *out,                      \
                              const float *inverse, int64_t tokens, int64_t width, int threads) {                      \
        norm_slopes(x, weight, gradient, out, inverse, tokens, width, threads);                                        \
    }                                                                                                                  \
    void gated_##SUFFIX(const TYPE *gate, const TYPE *up, TYPE *out, int64_t count, int threads) {                     \
        all_gated(gate, up, out, count, threads);                                                                      \
    }                                                                                                                  \
    void gated_slopes_##SUFFIX(const TYPE *gate, const TYPE *up, const TYPE *gradient, TYPE *of_gate, TYPE *of_up,     \
                               int64_t count, int threads) {                                                           \
        all_gated_slopes(gate, up, gradient, of_gate, of_up, count, threads);                                          \
    }                                                                                                                  \
    void turn_##SUFFIX(View x, const TYPE *cosine, const TYPE *sine, View out, int64_t tokens, int64_t heads,          \
                       int64_t width, int64_t back, int threads) {                                                     \
        turn(x, cosine, sine, out, tokens, heads, width, back, threads);                                               \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(BFloat16, bf16)
}
