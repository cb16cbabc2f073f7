// Log-probabilities of given tokens, and the softmax that their gradient needs, row by row in the core's cache.

#include <cmath>

#include "simd.h"

namespace {

// Return log softmax(logits)[token_id] and replace logits [width] by their softmax.
float log_softmax_row(float *logits, int64_t token_id, int64_t width) {
    Vector vector_max = broadcast(-INFINITY), sums = {};
    for (int64_t i = 0; i + SIMD_WIDTH <= width; i += SIMD_WIDTH)
        vector_max = load(logits + i) > vector_max ? load(logits + i) : vector_max;
    float largest = reduce_max(vector_max), sum = 0, chosen_logit = logits[token_id];
    int64_t whole = width / SIMD_WIDTH * SIMD_WIDTH;
    for (int64_t i = whole; i < width; i++) largest = logits[i] > largest ? logits[i] : largest;
    for (int64_t i = 0; i < whole; i += SIMD_WIDTH) {
        Vector result = exponential(load(logits + i) - largest);
        sums += result;
        store(logits + i, result);
    }
    if (whole < width) {
        Vector result = exponential(load(logits + whole, width - whole) - largest);
        store(logits + whole, result, width - whole);
        for (int64_t i = whole; i < width; i++) sum += logits[i];
    }
    sum += reduce_sum(sums);
    for (int64_t i = 0; i < width; i += SIMD_WIDTH) store(logits + i, load(logits + i, width - i) / sum, width - i);
    return chosen_logit - largest - std::log(sum);
}

}  // namespace

extern "C" {

void log_softmax_fp32(float *logits, const int64_t *token_ids, float *logprobs, int64_t tokens, int64_t width,
                      int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * width > MIN_PARALLEL_VALUES)
    for (int64_t token = 0; token < tokens; token++)
        logprobs[token] = log_softmax_row(logits + token * width, token_ids[token], width);
}
}
