// What the kernels of attention are told, and how they divide it.
#pragma once

#include <omp.h>

#include "lanes.h"

// Which keys the queries see. Row r has the tokens tokens[starts[r]] to before tokens[starts[r + 1]]; its queries are
// those from firsts[r] on. groups: heads of queries for each head of keys. window: how many keys a query sees at most.
// shares: a token may stand in several rows, as a key; as a query it stands in one.
struct Rows {
    const int64_t *tokens, *starts, *firsts;
    int64_t rows, width, groups, window, shares;
    float scaling;
};

// Each of `threads` takes some heads of keys, of which there are `heads`: no two of them write to one place.
#define BY_HEADS(call)                                                      \
    _Pragma("omp parallel num_threads(threads)") {                          \
        int64_t of = omp_get_num_threads(), own = omp_get_thread_num();     \
        int64_t first_head = heads * own / of, end_head = heads * (own + 1) / of; \
        call;                                                               \
    }
