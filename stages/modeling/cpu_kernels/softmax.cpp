// Log-probabilities of chosen tokens, and the softmax that their gradient needs, row by row in the core's cache.

#include <cmath>

#include "simd.h"

namespace {

// log softmax(logits)[chosen], logits [width]; they become the softmax itself.
float log_share(float *logits, int64_t chosen, int64_t width) {
    Lanes most = all(-INFINITY), sums = {};
    for (int64_t i = 0; i + LANES <= width; i += LANES) most = load(logits + i) > most ? load(logits + i) : most;
    float largest = largest_of(most), sum = 0, of_chosen = logits[chosen];
    int64_t whole = width / LANES * LANES;
    for (int64_t i = whole; i < width; i++) largest = logits[i] > largest ? logits[i] : largest;
    for (int64_t i = 0; i < whole; i += LANES) {
        Lanes found = exponential(load(logits + i) - largest);
        sums += found;
        store(logits + i, found);
    }
    if (whole < width) {
        Lanes found = exponential(load(logits + whole, width - whole) - largest);
        store(logits + whole, found, width - whole);
        for (int64_t i = whole; i < width; i++) sum += logits[i];
    }
    sum += sum_of(sums);
    for (int64_t i = 0; i < width; i += LANES) store(logits + i, load(logits + i, width - i) / sum, width - i);
    return of_chosen - largest - std::log(sum);
}

}  // namespace

extern "C" {

void softmax_fp32(float *logits, const int64_t *chosen, float *log_shares, int64_t tokens, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * width > WORTH_THREADS)
    for (int64_t token = 0; token < tokens; token++)
        log_shares[token] = log_share(logits + token * width, chosen[token], width);
}
}
