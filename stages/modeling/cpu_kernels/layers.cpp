// RMSNorm, SwiGLU and rotary embedding, forward and backward: the operations of a LLaMA layer that work token by token.
// Each is one pass over memory. Sums are in fp32.

#include <cmath>

#include "simd.h"

namespace {

constexpr int64_t SPAN = 4096;  // in one unit of work of a thread

// out = weight * x / rms, rms = sqrt(mean(x^2) + epsilon) (arXiv 1910.07467); inverse [tokens]: 1 / rms.
template <class T>
void rms_norm_row(const T *x, const T *weight, T *out, float *inverse, int64_t width, float epsilon) {
    Vector squares = {};
    for (int64_t i = 0; i < width; i += SIMD_WIDTH) {
        Vector values = load(x + i, width - i);
        squares += values * values;
    }
    *inverse = 1 / std::sqrt(reduce_sum(squares) / width + epsilon);
    for (int64_t i = 0; i < width; i += SIMD_WIDTH)
        store(out + i, load(weight + i, width - i) * (load(x + i, width - i) * *inverse), width - i);
}

template <class T>
void rms_norm_backward_row(const T *x, const T *weight, const T *grad_out, T *out, float inverse, int64_t width) {
    Vector products = {};
    for (int64_t i = 0; i < width; i += SIMD_WIDTH)
        products += load(x + i, width - i) * load(weight + i, width - i) * load(grad_out + i, width - i);
    float mean = reduce_sum(products) / width * inverse * inverse;
    for (int64_t i = 0; i < width; i += SIMD_WIDTH) {
        Vector grads = load(weight + i, width - i) * load(grad_out + i, width - i);
        store(out + i, (grads - load(x + i, width - i) * mean) * inverse, width - i);
    }
}

inline Vector sigmoid(Vector x) {
    Vector e = exponential(x < broadcast(0) ? x : -x);
    return (x < broadcast(0) ? e : broadcast(1)) / (e + 1);
}

// out = silu(gate) * up (arXiv 2002.05202).
template <class T>
void swiglu_span(const T *gate, const T *up, T *out, int64_t count) {
    for (int64_t i = 0; i < count; i += SIMD_WIDTH) {
        Vector x = load(gate + i, count - i);
        store(out + i, x * sigmoid(x) * load(up + i, count - i), count - i);
    }
}

template <class T>
void swiglu_backward_span(const T *gate, const T *up, const T *grad_out, T *grad_gate, T *grad_up, int64_t count) {
    for (int64_t i = 0; i < count; i += SIMD_WIDTH) {
        Vector x = load(gate + i, count - i), grad = load(grad_out + i, count - i), gate_sigmoid = sigmoid(x);
        store(grad_up + i, grad * x * gate_sigmoid, count - i);
        store(grad_gate + i, grad * load(up + i, count - i) * gate_sigmoid * (1 + x * (1 - gate_sigmoid)), count - i);
    }
}

// Rotate the pairs (i, i + half) by angles given as cosines and sines (arXiv 2104.09864, in LLaMA's order).
// inverse: rotate back, which is the gradient.
template <class T>
void rotate_head(const T *x, const T *cosine, const T *sine, T *out, int64_t half, bool inverse) {
    for (int64_t i = 0; i < half; i += SIMD_WIDTH) {
        int64_t left = half - i;
        Vector a = load(x + i, left), b = load(x + half + i, left);
        Vector up = load(sine + i, left), down = load(sine + half + i, left);
        if (inverse) {
            Vector negated = -up;
            up = -down;
            down = negated;
        }
        store(out + i, a * load(cosine + i, left) - b * up, left);
        store(out + half + i, b * load(cosine + half + i, left) + a * down, left);
    }
}

template <class T>
void apply_rotary(View x, const T *cosine, const T *sine, View out, int64_t tokens, int64_t heads, int64_t width,
                  bool inverse, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads * width > MIN_PARALLEL_VALUES)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++)
            rotate_head(Head<T>(x, head).at(token), cosine + token * width, sine + token * width,
                   Head<T>(out, head).at(token), width / 2, inverse);
}

template <class T>
void rms_norm(const T *x, const T *weight, T *out, float *inverse, int64_t tokens, int64_t width, float epsilon,
           int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * width > MIN_PARALLEL_VALUES)
    for (int64_t token = 0; token < tokens; token++)
        rms_norm_row(x + token * width, weight, out + token * width, inverse + token, width, epsilon);
}

template <class T>
void rms_norm_backward(const T *x, const T *weight, const T *grad_out, T *out, const float *inverse, int64_t tokens,
                 int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * width > MIN_PARALLEL_VALUES)
    for (int64_t token = 0; token < tokens; token++)
        rms_norm_backward_row(x + token * width, weight, grad_out + token * width, out + token * width, inverse[token],
                              width);
}

inline int64_t span_length(int64_t first, int64_t count) { return count - first < SPAN ? count - first : SPAN; }

template <class T>
void swiglu(const T *gate, const T *up, T *out, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) if (count > MIN_PARALLEL_VALUES)
    for (int64_t i = 0; i < count; i += SPAN) swiglu_span(gate + i, up + i, out + i, span_length(i, count));
}

template <class T>
void swiglu_backward(const T *gate, const T *up, const T *grad_out, T *grad_gate, T *grad_up, int64_t count,
                     int threads) {
#pragma omp parallel for num_threads(threads) if (count > MIN_PARALLEL_VALUES)
    for (int64_t i = 0; i < count; i += SPAN)
        swiglu_backward_span(gate + i, up + i, grad_out + i, grad_gate + i, grad_up + i, span_length(i, count));
}

}  // namespace

extern "C" {

#define FOR_TYPE(TYPE, SUFFIX)                                                                                         \
    void rms_norm_##SUFFIX(const TYPE *x, const TYPE *weight, TYPE *out, float *inverse, int64_t tokens, int64_t width,\
                       float epsilon, int threads) {                                                                   \
        rms_norm(x, weight, out, inverse, tokens, width, epsilon, threads);                                            \
    }                                                                                                                  \
    void rms_norm_backward_##SUFFIX(const TYPE *x, const TYPE *weight, const TYPE *grad_out, TYPE *out,                \
                              const float *inverse, int64_t tokens, int64_t width, int threads) {                      \
        rms_norm_backward(x, weight, grad_out, out, inverse, tokens, width, threads);                                  \
    }                                                                                                                  \
    void swiglu_##SUFFIX(const TYPE *gate, const TYPE *up, TYPE *out, int64_t count, int threads) {                    \
        swiglu(gate, up, out, count, threads);                                                                         \
    }                                                                                                                  \
    void swiglu_backward_##SUFFIX(const TYPE *gate, const TYPE *up, const TYPE *grad_out, TYPE *grad_gate,             \
                                  TYPE *grad_up, int64_t count, int threads) {                                         \
        swiglu_backward(gate, up, grad_out, grad_gate, grad_up, count, threads);                                       \
    }                                                                                                                  \
    void apply_rotary_##SUFFIX(View x, const TYPE *cosine, const TYPE *sine, View out, int64_t tokens, int64_t heads,  \
                       int64_t width, int64_t inverse, int threads) {                                                  \
        apply_rotary(x, cosine, sine, out, tokens, heads, width, inverse, threads);                                    \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(BFloat16, bf16)
}
