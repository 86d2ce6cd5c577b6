// Products of a row with tokens. The host defines TILE, most tokens of an item, which share the reading of a row, and
//
//   LOCAL_TEAMS      16 items have a row: an item has a chain of each token, and they add them up in local memory
//
// Without it an item has a row. Neighbouring items have neighbouring rows of a tile; or the chains of a row, where rows lie
// one after the other. Chains are added in the same order by all: halves, quarters, and so on.

#ifndef BLOCKS
// An item's part of a row, and its number among those rows that the work group has.
typedef struct {
    int chain, row;
} Member;

Member member(void) {
    Member of;
    int item = get_local_id(0);
#if !defined(LOCAL_TEAMS)
    of.chain = 0;
    of.row = item;
#elif defined(TILES)
    int rows = get_local_size(0) / CHAINS;
    of.chain = item / rows;
    of.row = item % rows;
#else
    of.chain = item % CHAINS;
    of.row = item / CHAINS;
#endif
    return of;
}

// The row of an item, among all rows of the kernel.
int row_of(Member of) {
#ifdef LOCAL_TEAMS
    return get_group_id(0) * (get_local_size(0) / CHAINS) + of.row;
#else
    return get_global_id(0);
#endif
}

#if defined(LOCAL_TEAMS)
// Local memory: for each row and token of a work group 16 chains, and then sums.
#define ROOM , __local Chain *chains, __local float *totals
#define ITS_ROOM , chains, totals

// The sum of 16 chains.
float of_chains(__local Chain *all) {
    Chain sum[CHAINS / 2];
    for (int j = 0; j < CHAINS / 2; ++j) {
        sum[j] = all[j] + all[j + CHAINS / 2];
    }
    for (int width = CHAINS / 4; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) {
            sum[j] += sum[j + width];
        }
    }
    return of_chain(sum[0]);
}
#else
#define ROOM
#define ITS_ROOM
#endif

#ifdef LOCAL_TEAMS
// A row times those of `count` tokens whose bit is set. All items of a work group call it.
void products(Row row, bytes tokens, int count, uint wanted, float *out, Member of ROOM) {
    Chain sum[TILE];
    for (int t = 0; t < TILE; ++t) {
        sum[t] = no_sum();
    }
    if (popcount(wanted) > 1) {
        for (int s = of.chain; s < STEPS; s += CHAINS) {
            Weights w = weights_at(row, s);
            for (int t = 0; t < count; ++t) {
                sum[t] = added(w, inputs_at(tokens + (size_t)t * TOKEN_BYTES, s), s, sum[t]);
            }
        }
    } else if (wanted) {
        int t = 31 - clz(wanted);
        Chain one = no_sum();
        for (int s = of.chain; s < STEPS; s += CHAINS) {
            Inputs x = inputs_at(tokens + (size_t)t * TOKEN_BYTES, s);
            one = added(weights_at(row, s), x, s, one);
        }
        sum[t] = one;
    }
    for (int t = 0; t < count; ++t) {
        chains[(of.row * TILE + t) * CHAINS + of.chain] = sum[t];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (of.chain < count) {
        int at = of.row * TILE + of.chain;
        totals[at] = of_chains(chains + at * CHAINS);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int t = 0; t < count; ++t) {
        out[t] = totals[of.row * TILE + t];
    }
}
#else
// The sum of a token's chains.
float of_chains(Chain *sum) {
    for (int width = CHAINS / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) {
            sum[j] += sum[j + width];
        }
    }
    return of_chain(sum[0]);
}

// A row times a token.
float product(Row row, bytes token) {
    Chain sum[CHAINS];
    for (int j = 0; j < CHAINS; ++j) {
        sum[j] = no_sum();
    }
    for (int first = 0; first < STEPS; first += CHAINS) {
        int here = min(CHAINS, STEPS - first);
        for (int j = 0; j < here; ++j) {
            Inputs x = inputs_at(token, first + j);
            sum[j] = added(weights_at(row, first + j), x, first + j, sum[j]);
        }
    }
    return of_chains(sum);
}

// A row times `count` tokens, TILE at most.
void tile(Row row, bytes tokens, int count, float *out) {
    Chain sum[TILE][CHAINS];
    for (int t = 0; t < TILE; ++t) {
        for (int j = 0; j < CHAINS; ++j) {
            sum[t][j] = no_sum();
        }
    }
    for (int first = 0; first < STEPS; first += CHAINS) {
        int here = min(CHAINS, STEPS - first);
        for (int j = 0; j < here; ++j) {
            Weights w = weights_at(row, first + j);
            for (int t = 0; t < count; ++t) {
                Inputs x = inputs_at(tokens + (size_t)t * TOKEN_BYTES, first + j);
                sum[t][j] = added(w, x, first + j, sum[t][j]);
            }
        }
    }
    for (int t = 0; t < count; ++t) {
        out[t] = of_chains(sum[t]);
    }
}

// A row times those of `count` tokens whose bit is set.
void products(Row row, bytes tokens, int count, uint wanted, float *out, Member of) {
    if (popcount(wanted) > 1) {
        tile(row, tokens, count, out);
    } else if (wanted) {
        int t = 31 - clz(wanted);
        out[t] = product(row, tokens + (size_t)t * TOKEN_BYTES);
    }
}
#endif
#endif
