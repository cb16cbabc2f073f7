// What the kernels of attention are told, and how they divide it.
#pragma once

#include <omp.h>

#include "simd.h"

// Which keys the queries see. Row r has the tokens tokens[starts[r]] to before tokens[starts[r + 1]]; its queries are
// those from firsts[r] on. groups: heads of queries for each head of keys. window: how many keys a query sees at most.
// shares: a token may stand in several rows, as a key; as a query it stands in one.
struct Rows {
    const int64_t *tokens, *starts, *firsts;
    int64_t rows, width, groups, window, shares;
    float scaling;
};

// run(first, end) of the heads of keys: each thread takes some, so that no two of them write to one place. values: how
// many are worked through.
template <class Run>
void by_heads(int64_t heads, int64_t values, int threads, Run run) {
#pragma omp parallel num_threads(values > WORTH_THREADS ? threads : 1)
    {
        int64_t of = omp_get_num_threads(), own = omp_get_thread_num();
        run(heads * own / of, heads * (own + 1) / of);
    }
}
