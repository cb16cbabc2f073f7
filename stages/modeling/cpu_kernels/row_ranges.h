// The rows of a packed batch, as the attention kernels read them, and the division of heads among threads.
#pragma once

#include <omp.h>

#include "simd.h"

// Row r has the tokens tokens[starts[r]] to tokens[starts[r + 1] - 1], of which those from first_queries[r] on are
// queries. groups: query heads per key head. window: most keys that a query attends to. shares_prefixes: a token may be
// a key in several rows; it is a query in one.
struct RowIndex {
    const int64_t *tokens, *starts, *first_queries;
    int64_t num_rows, width, groups, window, shares_prefixes;
    float scaling;
};

// Call run(first, end) on each thread's key heads, so that no two threads write to one address. values: how many are
// processed; few are left to one thread.
template <class Run>
void by_heads(int64_t heads, int64_t values, int threads, Run run) {
#pragma omp parallel num_threads(values > MIN_PARALLEL_VALUES ? threads : 1)
    {
        int64_t count = omp_get_num_threads(), number = omp_get_thread_num();
        run(heads * number / count, heads * (number + 1) / count);
    }
}
